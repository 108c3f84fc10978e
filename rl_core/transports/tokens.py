"""Names of files in /dev/shm, tokens that prove a shared /dev/shm, and the removal of files that dead processes left.

Names are `rljob-<uid8>-<pid>-<random>-<n>`, mode 0600, with `-s<n>` for the sockets of direct connections. The random part is one per
process and is sent to peers only, so that no other user can create a file of that name in advance. `rljob-<uid8>-<pid>-<random>-token` is
locked while its process lives, and proves to a peer that both see the same /dev/shm. Files of other users are never opened or removed.

A library that names a file of its own after what it is given, as SGLang does, is given the name of an owner. Its file is then removed
with those of this owner.
"""

import errno
import fcntl
import functools
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from rl_core.messages.rpc import MemoryProof

logger = logging.getLogger(__name__)

DIRECTORY = Path("/dev/shm")
SEGMENT_NAME = re.compile(r"rljob-[a-z0-9]+-\d+-[0-9a-f]{16}-\d+")
_SOCKET_NAME = re.compile(r"rljob-[a-z0-9]+-\d+-[0-9a-f]{16}-s\d+")
_TOKEN_NAME = re.compile(r"rljob-[a-z0-9]+-\d+-[0-9a-f]{16}-token")
_ENGINE_FILE = re.compile(r"sglang_loads_(rljob-[a-z0-9]+-\d+-[0-9a-f]{16})_\w+\.shm")
"""What an SGLang engine shares with its scheduler; the group is the owner."""
_OWNERLESS_SECONDS = 3_600.0
"""Age, in seconds, from which a segment without a token, or an empty token, counts as left behind."""


class NotOurs(OSError):
    """The name in /dev/shm belongs to a folder, a pipe, a link, or a file of another user."""


@functools.cache
def owner_name(uid: str, pid: int) -> str:
    """Return the prefix of this process's file names: 8 characters of the job's uid, the pid, and a random part."""
    short = re.sub(r"[^a-z0-9]", "", uid.lower())[:8] or "nojob"
    return f"rljob-{short}-{pid}-{secrets.token_hex(8)}"


def open_own(path: Path, flags: int) -> int:
    """Open a regular file of this user and return its descriptor. Does not follow links and does not block on a named pipe.

    Raises NotOurs for any other kind of file, and OSError as `os.open` does.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.EACCES, errno.ENXIO):
            raise NotOurs(error.errno, f"{path} is no file of this user") from error
        raise
    if not _is_own(os.fstat(descriptor)):
        os.close(descriptor)
        raise NotOurs(errno.EPERM, f"{path} is no file of this user")
    return descriptor


def _is_own(status: os.stat_result, is_kind: Callable[[int], bool] = stat.S_ISREG) -> bool:
    return is_kind(status.st_mode) and status.st_uid == os.geteuid()


class Token:
    """A file that proves that two processes of one user see the same /dev/shm. It is locked while this process lives."""

    def __init__(self, uid: str = "", *, directory: Path = DIRECTORY) -> None:
        self.owner = owner_name(uid, os.getpid())
        """Prefix of the names of the files that go with this token."""
        self._path = directory / f"{self.owner}-token"
        self._secret = secrets.token_bytes(32)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        # Written after the file is locked: a token that is not empty and not locked belongs to a dead process.
        os.write(self._descriptor, self._secret)

    @property
    def proof(self) -> MemoryProof:
        """Return the record that a peer passes to `shares_memory`."""
        return MemoryProof(file=self._path.name, digest=blake2b(self._secret).digest())

    def close(self) -> None:
        """Delete the file and its lock."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def shares_memory(proof: MemoryProof | None, *, directory: Path = DIRECTORY) -> bool:
    """Return whether this process can read the segments of the peer that sent `proof`."""
    try:
        if proof is None or not _TOKEN_NAME.fullmatch(proof.file):
            return False
        with os.fdopen(open_own(directory / proof.file, os.O_RDONLY), "rb") as file:
            return bool(blake2b(file.read(64)).digest() == proof.digest)
    except (OSError, TypeError, ValueError):
        return False


def remove_orphans(*, directory: Path = DIRECTORY, now: Callable[[], float] = time.time) -> list[str]:
    """Delete the segments and tokens of dead processes of this user, of any job, and return their names.

    When all processes of a run are killed none is left to clean up, so each start calls this. `now` is the clock that file times are
    compared with.
    """
    files_of_owners, foreign = _entries(directory)
    removed: list[str] = []
    for owner, files in files_of_owners.items():
        if not _lives(directory / f"{owner}-token", now() - max(files.values())):
            for name in files:
                (directory / name).unlink(missing_ok=True)
            removed += files
    if foreign:
        logger.info("left alone in %s what is not of this user or program: %s", directory, ", ".join(sorted(foreign)))
    return removed


def remove_engine_files(owner: str, *, directory: Path = DIRECTORY) -> None:
    """Delete the file that a killed engine of `owner` has left."""
    for file in directory.glob(f"sglang_loads_{owner}_*"):
        file.unlink(missing_ok=True)


def _entries(directory: Path) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return this user's segments and tokens, owner -> name -> time of the last change, and all other names with our prefix."""
    files_of_owners: dict[str, dict[str, float]] = {}
    foreign = []
    with os.scandir(directory) as entries:
        for entry in entries:
            engine_match = _ENGINE_FILE.fullmatch(entry.name)
            if engine_match is None and (not entry.name.startswith("rljob-") or entry.name.startswith("rljob-host-")):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # its owner removed it meanwhile
                continue
            is_file = engine_match or SEGMENT_NAME.fullmatch(entry.name) or _TOKEN_NAME.fullmatch(entry.name)
            if _is_own(status, stat.S_ISREG if is_file else stat.S_ISSOCK) and (
                is_file or _SOCKET_NAME.fullmatch(entry.name)
            ):
                owner = engine_match.group(1) if engine_match else entry.name.rpartition("-")[0]
                files_of_owners.setdefault(owner, {})[entry.name] = status.st_mtime
            else:
                foreign.append(entry.name)
    return files_of_owners, foreign


def _lives(token: Path, age: float) -> bool:
    """Return whether the process that owns files lives, which is so if its token is locked. Pids differ between containers.

    `age`: seconds since any of them changed.
    """
    try:
        descriptor = open_own(token, os.O_RDONLY)
    except FileNotFoundError:  # no lock to ask
        return age < _OWNERLESS_SECONDS
    except OSError as error:
        logger.info("left alone what belongs to %s: %s", token.name, error)
        return True
    try:
        if os.fstat(descriptor).st_size == 0:  # made, but not locked yet
            return age < _OWNERLESS_SECONDS
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@functools.cache
def host_token(*, directory: Path = DIRECTORY) -> str:
    """Return a text that is equal for exactly those processes of one user that share this host's /dev/shm.

    When another user holds the file's name, each process gets a different text, and weights are sent by stream.
    """
    path = directory / f"rljob-host-{os.geteuid()}"
    try:
        if not os.path.lexists(path):
            _write_host_token(path)
        with os.fdopen(open_own(path, os.O_RDONLY)) as file:
            return file.read(64)
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be used (%s): weights go by stream on this host; remove what lies there", path, error)
        return secrets.token_hex(16)


def _write_host_token(path: Path) -> None:
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secrets.token_hex(16).encode())
        os.link(draft, path)  # whoever links first wins; the content is never half written
    except FileExistsError:
        return
    finally:
        os.close(descriptor)
        draft.unlink()
