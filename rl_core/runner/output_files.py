"""`POST /files`: sends the files of the output folder that `rljob samples` and `rljob view` read, so that a client can keep a copy of them.

These files only grow, except that a restart truncates `metrics.jsonl`. The client sends, for each file, the size of its copy and a checksum
of the end of the copy. The answer has the bytes that follow, or the file from its beginning if the checksum differs. Files are opened only
by names that this module has found in the folder, never by names that the client sends.
"""

import base64
import hashlib
import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

ANSWER_BYTES = 1 << 18
"""Largest number of bytes of files in one answer, before compression. It keeps the call within the deadline of the control port."""
CHECKED_BYTES = 4096
"""Number of bytes at the end of a copy that its checksum covers."""
PATTERNS = {
    "": re.compile(r"metrics\.jsonl"),
    "samples": re.compile(r"[\w-]{1,100}\.(jsonl|index)", re.ASCII),
    "traces": re.compile(r"[\w-]{1,100}\.json", re.ASCII),
}
"""Files that the CLI may download: folder below the output folder -> pattern of the file names."""


def is_served(name: str) -> bool:
    """Return whether the CLI may download the file `name`, a path relative to the output folder. PATTERNS lists these files."""
    folder, _, file = name.rpartition("/")
    return folder in PATTERNS and name == _joined(folder, file) and PATTERNS[folder].fullmatch(file) is not None


def end_checksum(file: BinaryIO, size: int) -> str:
    """Return the checksum of the last CHECKED_BYTES of the first `size` bytes of a file."""
    offset = max(0, size - CHECKED_BYTES)
    file.seek(offset)
    return hashlib.sha256(file.read(size - offset)).hexdigest()


class OutputFiles:
    """Answers requests for the files of one output folder."""

    def __init__(self, output: Path, *, limit: int = ANSWER_BYTES) -> None:
        """`limit`: largest number of bytes of files in one answer."""
        self._output, self._limit = output, limit

    def read(self, body: Any) -> dict[str, Any]:
        """Return the parts that a copy lacks: `{"sizes": {name: bytes}, "parts": [{"name", "offset", "data"}]}`.

        `body` is `{"have": {name: [bytes, checksum of their end]}, "folders": [names of PATTERNS]}`. `data` is compressed with zlib and
        encoded as base64. The parts of one answer have at most `limit` bytes together; the caller asks again until it has all `sizes`.

        Raises ValueError if `body` has another form.
        """
        client_files, folders = _checked(body)
        sizes: dict[str, int] = {}
        parts: list[dict[str, Any]] = []
        budget = self._limit
        for name, file in self._files(folders):
            with file:
                size = sizes[name] = os.fstat(file.fileno()).st_size
                offset, checksum = client_files.get(name, (0, ""))
                if offset > size or (offset and end_checksum(file, offset) != checksum):
                    offset = 0
                elif offset == size and name in client_files:
                    continue
                file.seek(offset)
                data = file.read(min(budget, size - offset))
                if data or (size == 0 and name not in client_files):
                    budget -= len(data)
                    packed = base64.b64encode(zlib.compress(data, 1)).decode()
                    parts.append({"name": name, "offset": offset, "data": packed})
        return {"sizes": sizes, "parts": parts}

    def _files(self, folders: list[str]) -> Iterator[tuple[str, BinaryIO]]:
        """Yield the files of `folders` by name, opened. Symbolic links, also of the folders, and files that vanish are left out."""
        for folder in folders:
            with ExitStack() as opened:
                try:
                    flags = os.O_RDONLY | os.O_DIRECTORY | (os.O_NOFOLLOW if folder else 0)
                    directory = os.open(self._output / folder, flags)
                    opened.callback(os.close, directory)
                    names = sorted(os.listdir(directory))  # noqa: PTH208 - of the opened folder, whatever its path leads to by now
                except OSError:
                    continue
                for name in names:
                    if PATTERNS[folder].fullmatch(name) and (file := _regular(name, directory)) is not None:
                        yield _joined(folder, name), file


def _regular(name: str, directory: int) -> BinaryIO | None:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "rb")


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _checked(body: Any) -> tuple[dict[str, tuple[int, str]], list[str]]:
    fields = body if isinstance(body, dict) else {}
    client_files, folders = fields.get("have"), fields.get("folders")
    if not isinstance(client_files, dict) or not isinstance(folders, list):
        raise ValueError(f"the body must be an object with have and folders, got {sorted(fields)}; correct it")
    unknown = [folder for folder in folders if not isinstance(folder, str) or folder not in PATTERNS]
    if unknown:
        raise ValueError(f"folders must be of {', '.join(map(repr, PATTERNS))}, got {unknown[0]!r}; correct it")
    for name, part in client_files.items():
        if not (isinstance(part, list) and len(part) == 2 and type(part[0]) is int and isinstance(part[1], str)):
            raise ValueError(
                f"have must hold [bytes, checksum] by name, got {part!r:.80} for {name[:80]!r}; correct it"
            )
        if part[0] < 0:
            raise ValueError(f"the bytes of {name[:80]!r} must not be negative, got {part[0]}; correct it")
    return {name: (part[0], part[1]) for name, part in client_files.items()}, list(dict.fromkeys(folders))
