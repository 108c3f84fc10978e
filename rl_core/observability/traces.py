"""Writes Chrome trace JSON for ui.perfetto.dev and chrome://tracing: rows by process and thread, spans on rows, and arrows between spans.

A file is a JSON array without its closing bracket, as the format allows, so a file that a crash truncated can still be opened. Times are
microseconds since 1970. A file ends at FILE_BYTES and only the newest KEPT files are kept, so the size of the folder is bounded.
"""

import heapq
import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rl_core.observability.append import AppendFile

logger = logging.getLogger(__name__)
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
FILE_BYTES = 8 << 20
KEPT = 8


class TraceEvents:
    """Collects events as lines of a trace file. A row is named before its first event in a file."""

    def __init__(self, rows: "TraceRows") -> None:
        self._rows = rows
        self._lines: list[str] = []

    def span(
        self, row: tuple[int, int], name: str, began: float, ended: float, args: Mapping[str, Any] | None = None
    ) -> None:
        """Add a span from `began` to `ended`, in seconds, on `row`.

        Spans of a row must be nested or disjoint. A nested span can leave out `args`, as its parent has them.
        """
        process, thread = row
        start = int(began * 1e6)
        encoded = "" if args is None else f',"args":{_encode(args)}'
        self._lines.append(
            f'{{"ph":"X","pid":{process},"tid":{thread},"ts":{start},"dur":{max(int(ended * 1e6) - start, 0)},'
            f'"name":{_text(name)}{encoded}}},\n'
        )

    def arrow(self, name: str, source: tuple[int, int], target: tuple[int, int], at: float) -> None:
        """Add an arrow from the span that ends on `source` at time `at` to the span that begins on `target` at that time."""
        micros, label = int(at * 1e6), json.dumps(name)
        for phase, (process, thread), timestamp in (('"s"', source, micros - 1), ('"f","bp":"e"', target, micros)):
            self._lines.append(
                f'{{"ph":{phase},"pid":{process},"tid":{thread},"ts":{timestamp},"id":{label},"cat":"group","name":"group"}},\n'
            )

    def text(self) -> str:
        """Return the lines. Those that name new rows come first."""
        return "".join([*self._rows.take_names(), *self._lines])


@lru_cache(maxsize=256)
def _text(name: str) -> str:
    """Return a name as JSON; most come again and again."""
    return json.dumps(name)


class TraceRows:
    """Assigns numbers to processes and their rows. A span gets a row of its process that is free when it begins."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._slot_ends: dict[int, list[tuple[float, int]]] = {}
        """End of the last span in each slot and the slot's number, by process, as a heap."""
        self._named_rows: set[tuple[int, int]] = set()
        self._names: list[str] = []

    def process(self, name: str) -> int:
        """Return the number of a process."""
        return self._processes.setdefault(name, len(self._processes) + 1)

    def slot(self, process: str, began: float, ended: float, *, of: str) -> tuple[int, int]:
        """Return a row of `process` that has no span after `began`. `of` names the kind of row."""
        ends = self._slot_ends.setdefault(self.process(process), [])
        if ends and ends[0][0] <= began:
            place = ends[0][1]
            heapq.heapreplace(ends, (ended, place))
        else:
            place = len(ends) + 1
            heapq.heappush(ends, (ended, place))
        return self.row(process, place, f"{of} {place}")

    def row(self, process: str, thread: int, name: str) -> tuple[int, int]:
        """Return the row `thread` of `process`, named `name`."""
        process_number = self.process(process)
        row = (process_number, thread)
        if row not in self._named_rows:
            if (process_number, 0) not in self._named_rows:
                self._named_rows.add((process_number, 0))
                self._name("process_name", process_number, 0, process)
            self._named_rows.add(row)
            self._name("thread_name", process_number, thread, name)
        return row

    def take_names(self) -> list[str]:
        """Return the lines that name rows since the last call."""
        names, self._names = self._names, []
        return names

    def name_again(self) -> None:
        """Write the names of all rows again, because a new file begins."""
        self._named_rows.clear()

    def _name(self, kind: str, process: int, thread: int, name: str) -> None:
        self._names.append(
            f'{{"ph":"M","pid":{process},"tid":{thread},"name":"{kind}","args":{{"name":{json.dumps(name)}}}}},\n'
        )


class TraceFolder:
    """The trace files of a run. Not thread-safe."""

    def __init__(self, folder: Path, *, file_bytes: int = FILE_BYTES, kept: int = KEPT) -> None:
        """Write to `folder`, which is created with the first event."""
        self._folder, self._file_bytes, self._max_files = folder, file_bytes, kept
        self._file: AppendFile | None = None
        self._num_written = 0
        self._complaint = ""
        """The last failure, so that the same one is logged once."""

    @property
    def full(self) -> bool:
        """Return whether the current file is full, so that the next events begin another one."""
        return self._file is None or self._num_written >= self._file_bytes

    def append(self, text: str, *, name: str) -> None:
        """Append events; a new file is called `name`.json. Errors of the storage are logged and do not stop the run."""
        try:
            if self.full:
                self._begin(name)
            assert self._file is not None
            data = text.encode()
            self._file.append(data)
            self._num_written += len(data)
        except OSError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.warning("the trace in %s has a gap, its storage refuses: %s", self._folder, error)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self, name: str) -> None:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = AppendFile(self._folder / f"{name}.json")
        self._file.append(b"[\n")
        self._num_written = 0
        for old in sorted(self._folder.glob("*.json"))[: -self._max_files]:
            old.unlink(missing_ok=True)
