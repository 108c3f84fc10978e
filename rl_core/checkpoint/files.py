"""Writes files durably and computes their digests. Everything in a checkpoint is written through this module. Imports no torch."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import blake3

from rl_core.api.errors import InfrastructureError, StorageFull

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of a full disk, an exhausted quota and an exceeded file size limit."""


def write_file(path: Path, data: bytes) -> str:
    """Write `data` to `path` and sync it to the disk; return its digest. The folder entry is synced by the store."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return blake3.blake3(data).hexdigest()


def sync_folder(path: Path) -> None:
    """Sync a folder's entries, so that a rename or a new file survives a power cut."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """Return the BLAKE3 digest of a file in hexadecimal. It is computed on all cores, because checkpoints are checked while others wait."""
    digest = blake3.blake3(max_threads=blake3.blake3.AUTO)
    digest.update_mmap(path)
    return digest.hexdigest()


def relative_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (path relative to `folder` with "/", path) of every file below it, sorted."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


FEWER = "free space, or lower checkpoint.keep, checkpoint.keepBest or raise checkpoint.everySteps"
"""The way out of a full disk with checkpoints on it."""


def write_failure(what: str, path: Path, error: OSError, *, way_out: str = FEWER) -> InfrastructureError:
    """Return the exception for a failed write, which names the file, the cause and the free space; StorageFull if there is none left.

    `way_out` is what to do about a full disk.
    """
    if error.errno not in NO_ROOM:
        return InfrastructureError(f"{what} could not be written to {path}: {error}; check the storage")
    return StorageFull(
        f"{what} could not be written to {path}: {os.strerror(error.errno or 0)}, {_free_bytes(path)} bytes free; {way_out}"
    )


def _free_bytes(path: Path) -> str:
    for folder in (path, *path.parents):
        if folder.is_dir():
            stat = os.statvfs(folder)
            return str(stat.f_bavail * stat.f_frsize)
    return "unknown"
