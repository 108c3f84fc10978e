"""Appends lines to a file completely or not at all, so that a full disk leaves no partial line."""

import os
from contextlib import suppress
from pathlib import Path


class AppendFile:
    """A file to which this process appends. Other processes may truncate it."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending and create it if it does not exist."""
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def append(self, data: bytes, *, sync: bool = False) -> None:
        """Append `data`, and flush it to disk with `sync`. Raises OSError when the storage fails; the file is then unchanged."""
        old_size = os.fstat(self._file).st_size
        try:
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[os.write(self._file, remaining) :]
            if sync:
                os.fsync(self._file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, old_size)
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
