"""Writes kept samples: `<name>.jsonl` holds the lines, `<name>.index` an entry for each. One thread at a time.

A line is written before its entry, so that a reader never meets an entry without its line; a reader indexes lines without an entry
itself. A folder holds at most `limit` bytes: the oldest pair of files is deleted first.
"""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rl_core.observability.append import AppendFile
from rl_core.samples.lines import Entry, index_line

logger = logging.getLogger(__name__)
DATA, INDEX = ".jsonl", ".index"
FILES = 8
"""Files that a full folder consists of, so that an eighth of the samples is deleted at once."""


class SampleWriter:
    """The samples of one process of a run."""

    def __init__(self, folder: Path, *, limit: int) -> None:
        """Write below `folder`, which is made with the first sample, at most `limit` bytes."""
        self._folder, self._limit = folder, limit
        self._data: AppendFile | None = None
        self._index: AppendFile | None = None
        self._path = folder
        self._written = 0
        self._total = 0
        self._complaint = ""
        """The last failure, so that the same one is logged once."""

    def write(self, lines: Sequence[tuple[bytes, Entry]], *, name: str) -> bool:
        """Append `lines`, to a file `name` where one begins; return whether it succeeded.

        A failure of the storage is logged, once as long as it stays the same.
        """
        try:
            if self._data is None or self._written >= self._limit // FILES:
                self._begin(name)
            assert self._data is not None and self._index is not None
            offset, entries = self._written, []
            for line, entry in lines:
                entries.append(index_line(entry._replace(offset=offset)))
                offset += len(line)
            index = b"".join(entries)
            self._data.append(b"".join(line for line, _ in lines))
            self._written = offset
            self._total += sum(len(line) for line, _ in lines) + len(index)
            self._index.append(index)
            self._delete_oldest()
        except OSError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.warning("samples cannot be kept in %s, training goes on without: %s", self._folder, error)
            return False
        self._complaint = ""
        return True

    def close(self) -> None:
        """Close the files."""
        for file in (self._data, self._index):
            if file is not None:
                file.close()
        self._data = self._index = None

    def _begin(self, name: str) -> None:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / f"{name}{DATA}"
        _end_last_line(self._path)
        self._data, self._index = AppendFile(self._path), AppendFile(self._path.with_suffix(INDEX))
        self._written = self._path.stat().st_size
        self._total = sum(path.stat().st_size for path in self._folder.iterdir() if path.suffix in (DATA, INDEX))
        self._delete_oldest()

    def _delete_oldest(self) -> None:
        """Delete the oldest files until the folder is within its limit; the file that is being written stays."""
        if self._total <= self._limit:
            return
        for path in sorted(self._folder.glob(f"*{DATA}")):
            if self._total <= self._limit or path == self._path:
                return
            for file_path in (path.with_suffix(INDEX), path):
                with suppress(FileNotFoundError):
                    self._total -= file_path.stat().st_size
                    file_path.unlink()


def _end_last_line(path: Path) -> None:
    """End a line that a crash cut, so that the next one begins on its own."""
    with suppress(FileNotFoundError), path.open("rb+") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
