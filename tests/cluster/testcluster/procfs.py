"""What /proc tells of processes. A process is known by its number and start time, as numbers are used again."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_STATE, _PARENT, _THREADS, _START = 0, 1, 17, 19  # positions after the command's name; see proc(5)


@dataclass(frozen=True)
class Identity:
    """One process, and never a later one with the same number."""

    pid: int
    start: str
    """Start time in clock ticks since the machine's start, as in /proc/PID/stat."""

    @property
    def alive(self) -> bool:
        """Whether it runs; a zombie does not, once all its threads have ended: until then it holds its ports."""
        fields = _stat(self.pid)
        return fields is not None and fields[_START] == self.start


def identify(pid: int) -> Identity | None:
    """The identity of a running process; None when it has gone."""
    fields = _stat(pid)
    return Identity(pid, fields[_START]) if fields else None


def child_of(parent: int) -> Identity | None:
    """A child of a process, if it has any."""
    for pid in _pids():
        fields = _stat(pid)
        if fields and fields[_PARENT] == str(parent):
            return Identity(pid, fields[_START])
    return None


def memory_kib(pid: int) -> int:
    """The memory of a process; a page that several processes share counts in part. 0 when it cannot be read."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def in_namespace_of(init: int) -> Iterator[tuple[int, str]]:
    """Number and name of each process in the process namespace of `init`."""
    with suppress(OSError):
        namespace = os.readlink(f"/proc/{init}/ns/pid")
        for pid in _pids():
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/pid") == namespace:
                    yield pid, _name(pid)


def _pids() -> list[int]:
    return sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _name(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    multicall = words[0].endswith("/testcluster") and len(words) > 1
    return words[1] if multicall else os.path.basename(words[0])


def _stat(pid: int) -> list[str] | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[_STATE] == "Z" and fields[_THREADS] == "1" else fields
