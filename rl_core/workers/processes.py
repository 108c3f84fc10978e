"""System calls that keep a tree of processes together: adoption of orphans, death with the parent, process groups, marks in the environment.

Linux only. Used by the supervisor and the local launcher; no state of its own.
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
"""Seconds for which marked processes are looked for and killed. One that is alive after that hangs in the kernel."""
_LOOK_PAUSE = 0.005
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans(adopt: bool = True) -> None:
    """Make this process the new parent of its orphaned descendants (PR_SET_CHILD_SUBREAPER), so that it can end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel SIGKILL this process when the thread that started it ends; ends at once if `parent` is already gone."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


def children() -> set[int]:
    """Return the pids of this process's children, adopted ones and zombies included."""
    pids: set[int] = set()
    try:
        for listing in Path("/proc/self/task").glob("*/children"):
            pids.update(map(int, listing.read_text().split()))
    except FileNotFoundError:  # a thread ended while we looked
        return children()
    return pids


def kill_group(pid: int, signum: int) -> bool:
    """Send `signum` to the process group led by `pid`; False when no process of it is left."""
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill(pid: int, signum: int) -> bool:
    """Send `signum` to one process; False when it is gone."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def reap(pid: int) -> int | None:
    """Reap an ended child and return its exit code (128 + n after signal n); None while it runs, or when it is no child of this process."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    if ended == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def is_signalled(code: int) -> bool:
    """Return whether exit code `code` is 128 + n of a signal n."""
    return 128 < code < 128 + signal.NSIG


def signal_name(number: int) -> str:
    """Return the name of a signal, its number where it has none (most real-time signals)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process, 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def marked(*marks: str) -> Iterator[int]:
    """Yield the pids of all processes whose environment holds all `marks` (`NAME=value`), whoever their parent is; not ourselves.

    An environment is inherited, so this finds descendants that left every group and session.
    """
    wanted = [b"\0" + mark.encode() + b"\0" for mark in marks]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # gone, or of another user
            continue
        if all(mark in b"\0" + environment + b"\0" for mark in wanted):
            yield int(entry.name)


def kill_marked(*marks: str, seconds: float = KILL_SECONDS) -> None:
    """SIGKILL all processes whose environment holds all `marks`, and wait until they are gone, at most `seconds`. Blocks.

    Looks until two looks in a row find none: a program that is just being started shows no environment for a moment.
    """
    deadline = time.monotonic() + seconds
    clean = 0
    while clean < 2:
        pids = list(marked(*marks))
        for pid in pids:
            kill(pid, signal.SIGKILL)
        clean = 0 if pids else clean + 1
        if time.monotonic() >= deadline:
            logger.warning("processes %s with %s are killed and still there", pids, ", ".join(marks))
            return
        time.sleep(_LOOK_PAUSE)
