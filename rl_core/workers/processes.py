"""System calls for trees of processes: adoption of orphans, death with the parent, process groups, and search by environment.

Linux only. Used by the supervisor and the local launcher; the module has no state of its own.
"""

import ctypes
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)
KILL_SECONDS = 5.0
"""Seconds for which `kill_with_environment` waits. A process that still exists then hangs in the kernel."""
_LOOK_PAUSE = 0.005
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans(adopt: bool = True) -> None:
    """Make this process the parent of its orphaned descendants (PR_SET_CHILD_SUBREAPER), so that it can end them. False undoes it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process with SIGKILL when the thread that started it ends.

    `parent` is the expected pid of the parent; if it has already ended, this process ends now. None skips the check.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


def children() -> set[int]:
    """Return the pids of the children of this process, including adopted processes and zombies."""
    pids: set[int] = set()
    try:
        for listing in Path("/proc/self/task").glob("*/children"):
            pids.update(map(int, listing.read_text().split()))
    except FileNotFoundError:  # A thread ended during the listing.
        return children()
    return pids


def kill_group(pid: int, signum: int) -> bool:
    """Send signal `signum` to the process group that `pid` leads. Returns False when it has no process left."""
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill(pid: int, signum: int) -> bool:
    """Send signal `signum` to one process. Returns False when it has ended."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def reap(pid: int) -> int | None:
    """Reap an ended child and return its exit code, or 128 + n after signal n.

    None when it still runs or is no child of this process.
    """
    try:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    if ended_pid == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def is_signalled(code: int) -> bool:
    """Return whether exit code `code` says that a signal ended the process, that is 128 + n."""
    return 128 < code < 128 + signal.NSIG


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number as text when it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes, 0 when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def with_environment(*settings: str) -> Iterator[int]:
    """Yield the pids of all other processes whose environment contains all `settings`, texts of the form `NAME=value`.

    Children inherit the environment, so this also finds descendants that have left every process group and session.
    """
    entries = [b"\0" + variable.encode() + b"\0" for variable in settings]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # The process is gone, or belongs to another user.
            continue
        if all(variable in b"\0" + environment + b"\0" for variable in entries):
            yield int(entry.name)


def kill_with_environment(*settings: str, seconds: float = KILL_SECONDS) -> None:
    """Kill all processes whose environment contains all `settings`, and wait until they have ended, at most `seconds`. Blocks.

    Two searches in a row must find none, because a program that is just being started shows no environment for a moment.
    """
    deadline = time.monotonic() + seconds
    clean = 0
    while clean < 2:
        pids = list(with_environment(*settings))
        for pid in pids:
            kill(pid, signal.SIGKILL)
        clean = 0 if pids else clean + 1
        if pids and time.monotonic() >= deadline:
            logger.warning("processes %s with %s are killed and still there", pids, ", ".join(settings))
            return
        time.sleep(_LOOK_PAUSE)
