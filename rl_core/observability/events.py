"""What a process tells its parent: children started and ended, signs of life, state. One JSON line each on an inherited descriptor.

The parent writes the descriptor's number into RLJOB_EVENTS_FD: worker -> supervisor -> launcher. Without it (a process
started by hand, or a container's supervisor) nothing is reported. Never blocks: a full pipe drops the line.

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
    """Return the descriptor to the parent, taken out of the environment so that grandchildren do not write into it."""
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
    """Tell the parent one event; `fields` must be JSON values and the line shorter than 4 KiB (written whole or not at all)."""
    fd = descriptor()
    if fd is None:
        return
    line = json.dumps({"event": event, **fields}).encode() + b"\n"
    try:
        os.write(fd, line)
    except (BlockingIOError, BrokenPipeError, ConnectionResetError):
        return  # the parent is busy or gone; its own end is dealt with elsewhere
