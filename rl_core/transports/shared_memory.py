"""Large arrays between processes of one host: pooled segments in /dev/shm (runtime.md 4).

The process that creates a segment owns it: it lends it to holders (connections), gets it back by their release messages or
when they are gone, and uses it again, because fresh pages cost more than the copy. Readers map a segment once and
keep the mapping. A full store is not an error: the caller sends by socket.

Names are `rljob-<uid8>-<pid>-<random>-<n>`, mode 0600. The random part is the process's and nobody can guess it, so nobody
can lie in wait under a name; it is told to peers only. `rljob-<uid8>-<pid>-<random>-token` is locked while its process lives
and proves to a peer that both see the same /dev/shm. What another user put into /dev/shm is never opened for use nor removed.
"""

import errno
import fcntl
import functools
import logging
import mmap
import os
import re
import secrets
import stat
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.api.errors import FrameError
from rl_core.messages.rpc import MemoryProof

logger = logging.getLogger(__name__)

DIRECTORY = Path("/dev/shm")
THRESHOLD = 256 * 1024
"""Arrays of this many bytes and more are worth a segment; below, the socket is as fast."""
RESERVE = 64 * 2**20
"""Bytes of /dev/shm left to others (NCCL, data loaders)."""
IDLE_BYTES = 256 * 2**20
"""Most bytes kept in segments that nobody holds."""
_SEGMENT = re.compile(r"rljob-[a-z0-9]+-\d+-[0-9a-f]{16}-\d+")
_TOKEN = re.compile(r"rljob-[a-z0-9]+-\d+-[0-9a-f]{16}-token")
_OWNERLESS_SECONDS = 3_600.0
"""Age at which a segment without a token, or an empty token, is nobody's."""
_MAPPED = 256


class NotOurs(OSError):
    """The name in /dev/shm is taken by a folder, a pipe, a link, or a file of another user."""


@functools.cache
def _owner(uid: str, pid: int) -> str:
    """Return what the names of this process begin with: 8 letters and digits of the job's uid, pid and a random part."""
    short = re.sub(r"[^a-z0-9]", "", uid.lower())[:8] or "nojob"
    return f"rljob-{short}-{pid}-{secrets.token_hex(8)}"


def _open_own(path: Path, flags: int) -> int:
    """Return a descriptor of a regular file of this user. Follows no link and does not wait for the other end of a pipe.

    Raises NotOurs for anything else, and OSError as `os.open`.
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


def _is_own(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


@dataclass(frozen=True, slots=True)
class Placement:
    """A segment as it was lent: a later generation of it is somebody else's."""

    segment: str
    generation: int


class Segment:
    """One file of the store; `generation` rises each time it is lent, so that a late release cannot hit the next holder."""

    __slots__ = ("generation", "memory", "name", "path", "size", "tainted")

    def __init__(self, path: Path, size: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a sparse file would end in SIGBUS when the file system is full
            self.memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        self.path, self.name, self.size, self.generation = path, path.name, size, 0
        self.tainted = False
        """A holder was lost; if it lives after all (stopped, cut off), it may still read or write here: never used again."""

    def remove(self) -> None:
        """Delete the file; memory goes when the last mapping does."""
        self.path.unlink(missing_ok=True)
        try:
            self.memory.close()
        except BufferError:
            logger.debug("segment %s is still viewed; its mapping goes with the last view", self.name)


class SegmentStore:
    """The segments this process owns. Thread-safe. `capacity` None = all of /dev/shm but RESERVE."""

    def __init__(self, uid: str = "", *, directory: Path = DIRECTORY, capacity: int | None = None) -> None:
        self.counters: Counter[str] = Counter()
        """`full` (placements refused), `created`, `reused`."""
        self._directory = directory
        self._capacity = capacity
        self._owner = _owner(uid, os.getpid())
        self._number = 0
        self._idle: OrderedDict[str, Segment] = OrderedDict()
        self._lent: dict[tuple[str, int], tuple[Segment, Counter[Hashable]]] = {}
        self._total = self._idle_bytes = self._kept_since_trim = 0
        self._lock = threading.Lock()
        """Guards all of the above: the I/O thread frees what other threads lend."""

    def lend(self, size: int, holder: Hashable) -> Segment | None:
        """Return a segment of at least `size` bytes lent to `holder`; None when the store is full."""
        size = _size_class(size)
        with self._lock:
            segment = self._take_idle(size)
            if segment is None:
                segment = self._create(size)
            if segment is None:
                self.counters["full"] += 1
                return None
            segment.generation += 1
            self._lent[segment.name, segment.generation] = (segment, Counter({holder: 1}))
            return segment

    def share(self, name: str, generation: int, holder: Hashable) -> bool:
        """Add a holder to a lent segment (one more time, if it holds it already); False when it is not lent."""
        with self._lock:
            entry = self._lent.get((name, generation))
            if entry is None:
                return False
            entry[1][holder] += 1
            return True

    def release(self, name: str, generation: int, holder: Hashable) -> bool:
        """End one hold; the last one makes the segment free. False when `holder` does not hold that generation."""
        with self._lock:
            entry = self._lent.get((name, generation))
            if entry is None or entry[1][holder] <= 0:
                return False
            entry[1][holder] -= 1
            self._drop_if_free((name, generation))
            return True

    def holds(self, name: str, generation: int, holder: Hashable, nbytes: int) -> bool:
        """Return whether `holder` holds that generation of a segment of at least `nbytes`."""
        with self._lock:
            entry = self._lent.get((name, generation))
            return entry is not None and entry[1][holder] > 0 and entry[0].size >= nbytes

    def release_holder(self, holder: Hashable) -> int:
        """End all holds of `holder`, which is lost, and return how many segments it held; they are never used again."""
        with self._lock:
            held = [key for key, (_, holders) in self._lent.items() if holders[holder] > 0]
            for key in held:
                segment, holders = self._lent[key]
                segment.tainted = True
                holders[holder] = 0
                self._drop_if_free(key)
            return len(held)

    def _drop_if_free(self, key: tuple[str, int]) -> None:
        segment, holders = self._lent[key]
        if any(holders.values()):
            return
        del self._lent[key]
        if segment.tainted:
            self._total -= segment.size
            segment.remove()
        else:
            self._keep(segment)

    def trim(self) -> int:
        """Delete segments that were not used since the last `trim` and return how many."""
        with self._lock:
            unused = max(0, len(self._idle) - self._kept_since_trim)
            for _ in range(unused):
                self._evict()
            self._kept_since_trim = 0
            return unused

    def stats(self) -> dict[str, int]:
        """Return bytes and segments held, and the counters."""
        with self._lock:
            held = {"bytes": self._total, "lent": len(self._lent), "idle": len(self._idle)}
            return held | {name: self.counters[name] for name in ("created", "reused", "full")}

    def close(self) -> None:
        """Delete every segment; readers keep what they have mapped."""
        with self._lock:
            for segment in [*self._idle.values(), *(segment for segment, _ in self._lent.values())]:
                segment.remove()
            self._idle.clear()
            self._lent.clear()
            self._total = self._idle_bytes = 0

    def _take_idle(self, size: int) -> Segment | None:
        for segment in reversed(self._idle.values()):  # the last one used is the warmest
            if segment.size == size:
                del self._idle[segment.name]
                self._idle_bytes -= size
                self.counters["reused"] += 1
                return segment
        return None

    def _create(self, size: int) -> Segment | None:
        while self._capacity is not None and self._total + size > self._capacity:
            if not self._evict():
                return None
        while True:
            space = os.statvfs(self._directory)
            if space.f_bavail * space.f_frsize < size + (RESERVE if self._capacity is None else 0):
                if self._evict():
                    continue
                return None
            self._number += 1
            try:
                segment = Segment(self._directory / f"{self._owner}-{self._number}", size)
            except FileExistsError:  # another store of this process has the number
                continue
            except OSError as error:
                logger.warning("no shared memory for %d bytes: %s", size, error)
                return None
            self._total += size
            self.counters["created"] += 1
            return segment

    def _keep(self, segment: Segment) -> None:
        self._kept_since_trim += 1
        self._idle[segment.name] = segment
        self._idle_bytes += segment.size
        while self._idle_bytes > IDLE_BYTES and len(self._idle) > 1:
            self._evict()

    def _evict(self) -> bool:
        if not self._idle:
            return False
        _, segment = self._idle.popitem(last=False)
        self._idle_bytes -= segment.size
        self._total -= segment.size
        segment.remove()
        return True


def _size_class(size: int) -> int:
    """Return `size` rounded up to one of four classes per power of two, at least THRESHOLD, whole pages."""
    step = max(THRESHOLD, 1 << (max(size, 1) - 1).bit_length()) // 8
    return -(-max(size, THRESHOLD) // step) * step


def copy_into(memory: Any, buffer: memoryview) -> None:
    """Copy `buffer` to the start of `memory` (a writable buffer), without the GIL."""
    np.copyto(np.frombuffer(memory, np.uint8, buffer.nbytes), np.frombuffer(buffer, np.uint8))


class SegmentReader:
    """Segments of other processes, mapped once. Thread-safe; views run `on_release` when the last of them dies."""

    def __init__(self, *, directory: Path = DIRECTORY) -> None:
        self._directory = directory
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._watched: dict[int, weakref.ref[Any]] = {}
        """Keeps the references alive whose callbacks release the views."""
        self._lock = threading.Lock()
        """Guards `_maps`: two threads must not map a segment twice."""

    def view(self, name: str, offset: int, size: int, on_release: Callable[[], None] | None = None) -> memoryview:
        """Return `size` bytes of segment `name`. `on_release` runs when no array uses them; it must not block.

        Raises FrameError when the segment does not exist, is not ours to read or is shorter.
        """
        memory = self._map(name)
        if offset < 0 or size < 0 or offset + size > len(memory):
            raise FrameError(f"segment {name} has {len(memory)} bytes, the message wants {size} at {offset}")
        window = np.frombuffer(memory, np.uint8, size, offset)
        if on_release is not None:
            self._watch(window, on_release)
        return window.data

    def _watch(self, window: np.ndarray, on_release: Callable[[], None]) -> None:
        key = id(window)

        def gone(_: Any) -> None:
            self._watched.pop(key, None)
            on_release()

        self._watched[key] = weakref.ref(window, gone)

    def _map(self, name: str) -> mmap.mmap:
        with self._lock:
            memory = self._maps.get(name)
            if memory is not None:
                self._maps.move_to_end(name)
                return memory
            self._forget_removed()
            memory = self._maps[name] = self._open(name)
            return memory

    def _open(self, name: str) -> mmap.mmap:
        if not _SEGMENT.fullmatch(name):
            raise FrameError(f"{name!r} is not the name of a segment")
        try:
            descriptor = _open_own(self._directory / name, os.O_RDWR)
        except OSError as error:
            raise FrameError(f"segment {name} cannot be opened: {error.strerror}; its owner may be gone") from error
        try:
            return mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except (OSError, ValueError) as error:
            raise FrameError(f"segment {name} cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)

    def _forget_removed(self) -> None:
        """Drop mappings whose files their owners removed, and the oldest beyond a bound: a mapping pins its memory."""
        for name in [name for name in self._maps if not (self._directory / name).exists()]:
            del self._maps[name]
        while len(self._maps) >= _MAPPED:
            self._maps.popitem(last=False)


class Token:
    """Proof that two processes see the same /dev/shm as the same user; its lock tells that this process lives."""

    def __init__(self, uid: str = "", *, directory: Path = DIRECTORY) -> None:
        self._path = directory / f"{_owner(uid, os.getpid())}-token"
        self._secret = secrets.token_bytes(32)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        os.write(
            self._descriptor, self._secret
        )  # after the lock: a token that is not empty and not locked is a dead one's

    @property
    def proof(self) -> MemoryProof:
        """Return what a peer needs for `readable`."""
        return MemoryProof(file=self._path.name, digest=blake2b(self._secret).digest())

    def close(self) -> None:
        """Delete the file and its lock."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def readable(proof: MemoryProof | None, *, directory: Path = DIRECTORY) -> bool:
    """Return whether the peer that showed `proof` has its segments where this process can read them."""
    try:
        if proof is None or not _TOKEN.fullmatch(proof.file):
            return False
        with os.fdopen(_open_own(directory / proof.file, os.O_RDONLY), "rb") as file:
            return bool(blake2b(file.read(64)).digest() == proof.digest)
    except (OSError, TypeError, ValueError):
        return False


def remove_orphans(*, directory: Path = DIRECTORY, now: Callable[[], float] = time.time) -> list[str]:
    """Delete segments and tokens of this user's dead processes, of any job, and return their names.

    Whoever kills all processes of a run leaves nobody to clean up after them, so every start does it. `now`: the time of files.
    """
    found, foreign = _entries(directory)
    removed: list[str] = []
    for owner, files in found.items():
        if not _lives(directory / f"{owner}-token", now() - max(files.values())):
            for name in files:
                (directory / name).unlink(missing_ok=True)
            removed += files
    if foreign:
        logger.info("left alone in %s what is not of this user or program: %s", directory, ", ".join(sorted(foreign)))
    return removed


def _entries(directory: Path) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return this user's segments and tokens, owner -> name -> time of the last change, and what else lies under our prefix."""
    found: dict[str, dict[str, float]] = {}
    foreign = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if not entry.name.startswith("rljob-") or entry.name.startswith("rljob-host-"):
                continue
            try:
                about = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # its owner removed it meanwhile
                continue
            if _is_own(about) and (_SEGMENT.fullmatch(entry.name) or _TOKEN.fullmatch(entry.name)):
                found.setdefault(entry.name.rpartition("-")[0], {})[entry.name] = about.st_mtime
            else:
                foreign.append(entry.name)
    return found, foreign


def _lives(token: Path, age: float) -> bool:
    """Return whether the owner of files lives: its token is locked. Pids would not tell: other containers have their own.

    `age`: seconds since any of them changed.
    """
    try:
        descriptor = _open_own(token, os.O_RDONLY)
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
    """Return a text that is equal in exactly the processes (of one user) that share this host's /dev/shm.

    Where its name is taken by what is not ours each process gets a text of its own: weights then go by stream.
    """
    path = directory / f"rljob-host-{os.geteuid()}"
    try:
        if not os.path.lexists(path):
            _write_host_token(path)
        with os.fdopen(_open_own(path, os.O_RDONLY)) as file:
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
