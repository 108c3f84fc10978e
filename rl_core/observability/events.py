"""Events that a process reports to its parent: children that start and end, heartbeats, and state.

Each is a JSON line on an inherited descriptor.

The parent passes the number of the descriptor in RLJOB_EVENTS_FD: a worker reports to its supervisor, and the supervisor to the launcher.
Without it, as in a process started by hand or in a container, nothing is reported. Reporting never blocks: a line that does not fit into
the pipe is dropped.

Lines are objects with `event`:
`started {name, role, index, rank, pid, process}`, `ended {pid, code, reason, ...}`, `alive {state, version}`, `exit {code, reason, tail}`.
"""

import json
import os
import threading
from typing import Any

VARIABLE = "RLJOB_EVENTS_FD"

_lock = threading.Lock()
_fd: int | None = None
_taken = False


def descriptor() -> int | None:
    """Return the descriptor of the parent. It is removed from the environment so that grandchildren do not write to it."""
    global _fd, _taken
    with _lock:
        if not _taken:
            _taken = True
            text = os.environ.pop(VARIABLE, "")
            _fd = int(text) if text.isdigit() else None
            if _fd is not None:
                os.set_inheritable(_fd, False)
                os.set_blocking(_fd, False)
        return _fd


def report(event: str, **fields: Any) -> None:
    """Report an event to the parent process, as a JSON line on an inherited pipe. Never blocks.

    The event is dropped if there is no pipe, if the pipe is full, or if the parent has ended. `fields` must be JSON values. The line must be
    shorter than 4 KiB, so that it is written completely or not at all.
    """
    fd = descriptor()
    if fd is None:
        return
    line = json.dumps({"event": event, **fields}).encode() + b"\n"
    try:
        os.write(fd, line)
    except (BlockingIOError, BrokenPipeError, ConnectionResetError):
        return  # the parent is busy or gone; its own end is dealt with elsewhere
