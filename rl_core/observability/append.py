"""Lines appended to a file as a whole or not at all, so that a full disk leaves no torn one."""

import os
from contextlib import suppress
from pathlib import Path


class AppendFile:
    """A file that this process appends to; others may cut it meanwhile."""

    def __init__(self, path: Path) -> None:
        """Append to `path`, made where it is missing."""
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def append(self, data: bytes, *, sync: bool = False) -> None:
        """Append `data`; durable with `sync`. Raises OSError when the storage refuses; the file is then as it was."""
        end = os.fstat(self._file).st_size
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._file, left) :]
            if sync:
                os.fsync(self._file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, end)
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
