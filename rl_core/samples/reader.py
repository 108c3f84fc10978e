"""Reads the kept samples of a run from its files alone, while they are written or afterwards.

`refresh` reads only what was appended since the last call, and of an index only which lines belong to which step: the lines of a step are
parsed when it is asked for. Lines that are damaged or not whole are passed over.
"""

import json
import logging
import os
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from rl_core.samples.lines import TRAIN, Entry, entry_of
from rl_core.samples.writer import DATA, INDEX

logger = logging.getLogger(__name__)
FIELDS = len(Entry._fields)
STRING = rb'"(?:[^"\\\n]|\\.)*"'
REST = rb"," + STRING + rb",\d+,(?:null|[-+.eE\d]+)," + STRING + rb",\d+,"
"""A line of an index from its group to its number of tokens."""
MESSAGES, PIECES = b'"messages":[', b'],"pieces":['
"""Between them a line has its messages."""
PLAIN = re.compile(r"[ !#-\[\]-~]+")
"""Text that JSON writes as it is."""
BLOCK = re.compile(
    rb'^\[(?P<begin>\d+),(?P<length>\d+),(?P<step>\d+),"(?P<split>\w+)"' + REST + rb"(?P<epoch>\d+),-?\d+\]\n"
    rb'(?:\[(?P<last_begin>\d+),(?P<last_length>\d+),(?P=step),"(?P=split)"' + REST + rb"(?P=epoch),-?\d+\]\n)*",
    re.MULTILINE,
)
"""Consecutive lines of an index with one step, split and epoch."""


@dataclass(slots=True)
class _Block:
    """Consecutive entries of a file with one step, split and epoch."""

    path: Path
    step: int
    split: str
    epoch: int
    begin: int
    """Bytes of the data file between which the lines of the entries lie."""
    end: int
    lines: bytes
    """Lines of the index; empty once they are parsed."""
    parsed: list[Entry] = field(default_factory=list)

    def entries(self) -> list[Entry]:
        """Return the entries, without those that are damaged or lie elsewhere."""
        if self.lines:
            end = self.begin
            for entry in _entries(self.lines):
                if end <= entry.offset and entry.offset + entry.length <= self.end:
                    self.parsed.append(entry)
                    end = entry.offset + entry.length
            self.lines = b""
        return self.parsed


@dataclass(slots=True)
class _File:
    """One data file as far as it was read."""

    path: Path
    blocks: list[_Block] = field(default_factory=list)
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
        self._steps: dict[tuple[str, int], list[_Block]] = {}
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Read the samples that were written since the last call, and forget those in deleted files."""
        with self._lock:
            paths = {path.name: path for path in sorted(self.folder.glob(f"*{DATA}"))}
            changed = self._files.keys() - paths.keys()
            for name in changed:
                del self._files[name]
            has_grown = False
            for name, path in paths.items():
                try:
                    has_grown |= self._read(self._files.setdefault(name, _File(path)))
                except OSError as error:
                    logger.warning("samples in %s cannot be read: %s", path, error)
            if has_grown or changed:
                self._steps = self._by_step()

    def _read(self, file: _File) -> bool:
        """Take in the new entries of a file; return whether there were any."""
        size = file.path.stat().st_size
        if size < file.end:  # another file of the same name
            file.blocks, file.indexed, file.end = [], 0, 0
        num_blocks = len(file.blocks)
        for match in BLOCK.finditer(self._new_index_lines(file)):
            data_end = int(match["last_begin"] or match["begin"]) + int(match["last_length"] or match["length"])
            block = _Block(
                file.path,
                int(match["step"]),
                match["split"].decode(),
                int(match["epoch"]),
                file.end,
                min(data_end, size),
                match[0],
            )
            if data_end > size:  # the data file was cut
                data_end = max((entry.offset + entry.length for entry in block.entries()), default=file.end)
            if data_end > file.end:
                file.blocks.append(block)
                file.end = data_end
        if file.end < size:
            self._index_lines(file)
        return len(file.blocks) != num_blocks

    def _new_index_lines(self, file: _File) -> bytes:
        index = file.path.with_suffix(INDEX)
        if not index.is_file():
            return b""
        with index.open("rb") as source:
            source.seek(file.indexed)
            data = source.read()
        data = data[: data.rfind(b"\n") + 1]
        file.indexed += len(data)
        return data

    def _index_lines(self, file: _File) -> None:
        """Make entries of whole lines that the index lacks: its writer ended between the two, or is about to write them."""
        with file.path.open("rb") as source:
            source.seek(file.end)
            for line in source:
                if not line.endswith(b"\n"):
                    return
                begin = file.end
                file.end += len(line)
                if (entry := entry_of(line, begin)) is not None:
                    key = entry.step, entry.split, entry.epoch
                    block = file.blocks[-1] if file.blocks else None
                    if block is None or block.lines or key != (block.step, block.split, block.epoch):
                        block = _Block(file.path, *key, begin, file.end, b"")
                        file.blocks.append(block)
                    block.parsed.append(entry)

    def _by_step(self) -> dict[tuple[str, int], list[_Block]]:
        """Return the samples by split and step; those of a history that a later epoch trained anew are left out."""
        blocks = [block for file in self._files.values() for block in file.blocks]
        first_steps: dict[int, int] = {}
        for block in blocks:
            if block.split == TRAIN:
                first_steps[block.epoch] = min(block.step, first_steps.get(block.epoch, block.step))
        end = {
            epoch: min((step for later, step in first_steps.items() if later > epoch), default=1 << 60)
            for epoch in {block.epoch for block in blocks}
        }
        blocks_by_step: dict[tuple[str, int], list[_Block]] = defaultdict(list)
        for block in blocks:
            if block.step < end[block.epoch]:
                blocks_by_step[block.split, block.step].append(block)
        return dict(blocks_by_step)

    def steps(self, split: str) -> list[int]:
        """Return the steps that have samples, in order."""
        with self._lock:
            return sorted(step for kind, step in self._steps if kind == split)

    def of_step(self, split: str, step: int) -> list[Found]:
        """Return the samples of a step in the order of groups and completions."""
        with self._lock:
            return _found(self._steps.get((split, step), ()))

    def every(self, split: str) -> list[Found]:
        """Return all samples of a split, by step."""
        with self._lock:
            steps = sorted(step for kind, step in self._steps if kind == split)
            return [sample for step in steps for sample in _found(self._steps[split, step])]

    @staticmethod
    def read(found: Found) -> dict[str, Any] | None:
        """Return the line of a sample; None when its file was deleted or the line is damaged."""
        data = SampleReader.read_bytes(found)
        sample = None if data is None else _parsed(data)
        return sample if isinstance(sample, dict) else None

    @staticmethod
    def containing(samples: Iterable[Found], text: str) -> Iterator[tuple[Found, dict[str, Any]]]:
        """Yield the samples in whose messages `text` occurs, upper and lower case alike, with their lines parsed.

        Only lines whose bytes may contain the text are parsed. An empty text occurs in every sample.
        """
        folded = text.casefold()
        key = max(PLAIN.findall(folded), key=len, default="").encode()
        for path, samples_of_file in groupby(samples, key=lambda sample: sample.path):
            try:
                file = path.open("rb")
            except OSError:  # deleted to make room
                continue
            with file:
                for found in samples_of_file:
                    line = os.pread(file.fileno(), found.entry.length, found.entry.offset)
                    if _may_contain(line, key):
                        sample = _parsed(line)
                        if isinstance(sample, dict) and folded in _texts(sample).casefold():
                            yield found, sample

    @staticmethod
    def read_bytes(found: Found) -> bytes | None:
        """Return the line of a sample as it lies on the disk; None when its file was deleted."""
        try:
            with found.path.open("rb") as file:
                file.seek(found.entry.offset)
                return file.read(found.entry.length)
        except OSError:
            return None


def _found(blocks: Iterable[_Block]) -> list[Found]:
    return [Found(block.path, entry) for block in blocks for entry in block.entries()]


def _entries(lines: bytes) -> Iterator[Entry]:
    """Yield the entries of lines of an index."""
    parts = lines.splitlines()
    try:
        rows = json.loads(b"[" + b",".join(parts) + b"]")
    except ValueError:
        rows = [row for part in parts if (row := _parsed(part)) is not None]
    for row in rows:
        if isinstance(row, list) and len(row) == FIELDS:
            yield Entry._make(row)


def _may_contain(line: bytes, key: bytes) -> bool:
    """Return whether the messages of a line may contain `key`, plain lower-case text. Escaped characters are not looked at."""
    begin = line.find(MESSAGES)
    messages = line[begin : line.rfind(PIECES)] if begin >= 0 else line
    return key in messages.lower() or b"\\u" in messages


def _texts(sample: Mapping[str, Any]) -> str:
    return "\n".join(str(message["content"]) for message in sample["messages"])


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def worst_first(found: Iterable[Found]) -> list[Found]:
    """Return the samples by ascending reward; those without a reward are left out."""
    rewarded = [sample for sample in found if sample.entry.reward is not None]
    return sorted(rewarded, key=lambda sample: sample.entry.reward or 0.0)
