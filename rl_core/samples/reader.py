"""Reads the kept samples of a run from its files alone, while they are written or afterwards.

`refresh` reads only what was appended since the last call. Lines that are damaged or not whole are passed over.
"""

import json
import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rl_core.samples.lines import TRAIN, Entry, entry_of
from rl_core.samples.writer import DATA, INDEX

logger = logging.getLogger(__name__)
FIELDS = len(Entry._fields)


@dataclass(slots=True)
class _File:
    """One data file as far as it was read."""

    path: Path
    entries: list[Entry] = field(default_factory=list)
    indexed: int = 0
    """Bytes read of the index file."""
    end: int = 0
    """End of the last line of the data file that has an entry or was passed over."""


class Found(NamedTuple):
    """A sample that the index knows."""

    path: Path
    entry: Entry


class SampleReader:
    """The samples in `<folder>/samples`. May be used by several threads."""

    def __init__(self, folder: Path) -> None:
        """`folder`: output folder of a run; it need not have any samples yet."""
        self.folder = folder / "samples"
        self._files: dict[str, _File] = {}
        self._steps: dict[tuple[str, int], list[Found]] = {}
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Take in what was written, and forget files that were deleted."""
        with self._lock:
            paths = {path.name: path for path in sorted(self.folder.glob(f"*{DATA}"))}
            changed = self._files.keys() - paths.keys()
            for name in changed:
                del self._files[name]
            grown = False
            for name, path in paths.items():
                try:
                    grown |= self._read(self._files.setdefault(name, _File(path)))
                except OSError as error:
                    logger.warning("samples in %s cannot be read: %s", path, error)
            if grown or changed:
                self._steps = self._by_step()

    def _read(self, file: _File) -> bool:
        """Take in the new entries of a file; return whether there were any."""
        size = file.path.stat().st_size
        if size < file.end:  # another file of the same name
            file.entries, file.indexed, file.end = [], 0, 0
        before = len(file.entries)
        for entry in self._new_index_entries(file):
            if entry.offset >= file.end and entry.offset + entry.length <= size:
                file.entries.append(entry)
                file.end = entry.offset + entry.length
        if file.end < size:
            self._index_lines(file)
        return len(file.entries) != before

    def _new_index_entries(self, file: _File) -> Iterator[Entry]:
        index = file.path.with_suffix(INDEX)
        if not index.is_file():
            return
        with index.open("rb") as source:
            source.seek(file.indexed)
            data = source.read()
        data = data[: data.rfind(b"\n") + 1]
        file.indexed += len(data)
        lines = data.splitlines()
        try:
            rows = json.loads(b"[" + b",".join(lines) + b"]")
        except ValueError:
            rows = [row for line in lines if (row := _parsed(line)) is not None]
        for row in rows:
            if isinstance(row, list) and len(row) == FIELDS:
                yield Entry._make(row)

    def _index_lines(self, file: _File) -> None:
        """Make entries of whole lines that the index lacks: its writer ended between the two, or is about to write them."""
        with file.path.open("rb") as source:
            source.seek(file.end)
            for line in source:
                if not line.endswith(b"\n"):
                    return
                if (entry := entry_of(line, file.end)) is not None:
                    file.entries.append(entry)
                file.end += len(line)

    def _by_step(self) -> dict[tuple[str, int], list[Found]]:
        """Return the samples by split and step; those of a history that a later epoch trained anew are left out."""
        first: dict[int, int] = {}
        for file in self._files.values():
            for entry in file.entries:
                if entry.split == TRAIN and entry.step < first.get(entry.epoch, 1 << 60):
                    first[entry.epoch] = entry.step
        end: dict[int, int] = {}
        for epoch in {entry.epoch for file in self._files.values() for entry in file.entries}:
            end[epoch] = min((step for later, step in first.items() if later > epoch), default=1 << 60)
        found: dict[tuple[str, int], list[Found]] = defaultdict(list)
        for file in self._files.values():
            for entry in file.entries:
                if entry.step < end[entry.epoch]:
                    found[entry.split, entry.step].append(Found(file.path, entry))
        return dict(found)

    def steps(self, split: str) -> list[int]:
        """Return the steps that have samples, in order."""
        with self._lock:
            return sorted(step for kind, step in self._steps if kind == split)

    def of_step(self, split: str, step: int) -> list[Found]:
        """Return the samples of a step in the order of groups and completions."""
        with self._lock:
            return list(self._steps.get((split, step), ()))

    def every(self, split: str) -> list[Found]:
        """Return all samples of a split, by step."""
        with self._lock:
            return [found for (kind, _), each in sorted(self._steps.items()) if kind == split for found in each]

    @staticmethod
    def read(found: Found) -> dict[str, Any] | None:
        """Return the line of a sample; None when its file was deleted or the line is damaged."""
        data = SampleReader.read_bytes(found)
        sample = None if data is None else _parsed(data)
        return sample if isinstance(sample, dict) else None

    @staticmethod
    def read_bytes(found: Found) -> bytes | None:
        """Return the line of a sample as it lies on the disk; None when its file was deleted."""
        try:
            with found.path.open("rb") as file:
                file.seek(found.entry.offset)
                return file.read(found.entry.length)
        except OSError:
            return None


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def worst_first(found: Iterable[Found]) -> list[Found]:
    """Return the samples by ascending reward; those without a reward are left out."""
    rewarded = [one for one in found if one.entry.reward is not None]
    return sorted(rewarded, key=lambda one: one.entry.reward or 0.0)
