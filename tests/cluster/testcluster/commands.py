"""Run a short command of the machine."""

import subprocess

from tests.cluster.testcluster.errors import ClusterError


def run(*words: object) -> str:
    """Run a command and return what it printed. Raises ClusterError with what it said when it fails."""
    command = [str(word) for word in words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def succeeds(*words: object) -> bool:
    """Whether a command ends with status 0."""
    command = [str(word) for word in words]
    return not subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode
