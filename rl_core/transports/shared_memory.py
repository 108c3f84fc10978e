"""A pool of shared-memory segments in /dev/shm, for large arrays between processes of one host.

The process that creates a segment owns it. It lends the segment to holders (connections), gets it back when they release it or are lost,
and reuses it, because new pages cost more than the copy. Readers map a segment once and keep the mapping. When the store is full the caller
sends by socket instead. See `tokens` for the names of the files.
"""

import logging
import mmap
import os
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.api.errors import FrameError
from rl_core.transports import tokens
from rl_core.transports.tokens import DIRECTORY

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

THRESHOLD = 256 * 1024
"""Arrays of this many bytes and more are worth a segment; below, the socket is as fast."""
RESERVE = 64 * 2**20
"""Bytes of /dev/shm left to others (NCCL, data loaders)."""
IDLE_BYTES = (256 * 2**20, 2 * 2**30)
"""Bounds of the bytes kept in unused segments, which are a quarter of the store's capacity. `trim` deletes segments that stay unused."""
_MAX_MAPPINGS = 256
"""Largest number of segments of other processes that a reader keeps mapped."""


@dataclass(frozen=True, slots=True)
class SegmentLoan:
    """A segment and the generation under which it was lent. The generation rises with each loan."""

    segment: str
    generation: int


class LentMemory:
    """A piece of shared memory of another process, in which this process may write until it calls `release`."""

    def __init__(self, loan: SegmentLoan, map: Callable[[], Any], give_back: Callable[[bool], object]) -> None:
        """`map()` returns the memory of `loan` as a writable buffer, and `give_back(reuse)` returns it to its owner; see `release`."""
        self.loan = loan
        self._map = map
        self._give_back: Callable[[bool], object] | None = give_back
        """None once the memory was released."""

    @cached_property
    def memory(self) -> Any:
        """The memory as a writable buffer of bytes, for `numpy.frombuffer`.

        Its first use maps the memory into this process, and raises FrameError if its owner has deleted it.
        """
        return self._map()

    def offset_of(self, buffer: Any) -> int | None:
        """Return the offset in bytes of `buffer` in this memory, or None if it does not lie in it entirely. `buffer` must be contiguous."""
        import numpy as np

        whole, part = np.frombuffer(self.memory, np.uint8), np.frombuffer(buffer, np.uint8)
        offset = part.ctypes.data - whole.ctypes.data
        return offset if 0 <= offset <= whole.nbytes - part.nbytes else None

    def release(self, *, reuse: bool = True) -> None:
        """Return the memory to its owner, without waiting. Further calls have no effect.

        Arrays over the memory must not be used afterwards. Items that were put with it stay valid. Pass `reuse=False` if another process that
        could write to the memory was lost and may still do so. The owner then never lends the memory again, and deletes it once nothing uses it.
        """
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(reuse)


class Segment:
    """One file of the store. `generation` rises each time it is lent, so that a late release cannot end the loan of the next holder."""

    __slots__ = ("_descriptor", "_memory", "generation", "inode", "name", "path", "size", "tainted", "used")

    def __init__(self, path: Path, size: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a sparse file would end in SIGBUS when the file system is full
            self.inode = os.fstat(descriptor).st_ino
        except BaseException:
            path.unlink()
            os.close(descriptor)
            raise
        self.path, self.name, self.size, self.generation = path, path.name, size, 0
        self._descriptor: int | None = descriptor
        self._memory: mmap.mmap | None = None
        self.used = True
        """Whether it was lent since the last `trim`."""
        self.tainted = False
        """Whether a process that was lost may still write to the segment, which is therefore never lent again."""

    @property
    def memory(self) -> mmap.mmap:
        """The memory, mapped into this process at first use. The channel server lends most segments without ever reading them."""
        if self._memory is None:
            assert self._descriptor is not None, "a removed segment is not mapped"
            self._memory = mmap.mmap(self._descriptor, self.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self._close()
        return self._memory

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def is_there(self) -> bool:
        """Return whether the file still exists under its name. Other programs may have removed it from /dev/shm."""
        try:
            return os.lstat(self.path).st_ino == self.inode
        except OSError:
            return False

    def remove(self) -> None:
        """Delete the file. Its memory is freed with the last mapping."""
        if self.is_there():
            self.path.unlink(missing_ok=True)
        self._close()
        try:
            if self._memory is not None:
                self._memory.close()
        except BufferError:
            logger.debug("segment %s is still viewed; its mapping goes with the last view", self.name)


class SegmentStore:
    """The segments that this process owns. Thread-safe. `capacity` is in bytes; by default it is the size of /dev/shm less RESERVE."""

    def __init__(self, uid: str = "", *, directory: Path = DIRECTORY, capacity: int | None = None) -> None:
        self.counters: Counter[str] = Counter()
        """`full` (placements refused), `created`, `reused`."""
        self._directory = directory
        self._capacity = capacity
        if capacity is None:
            space = os.statvfs(directory)
            capacity = space.f_blocks * space.f_frsize
        self._max_idle_bytes = min(max(capacity // 4, IDLE_BYTES[0]), IDLE_BYTES[1])
        self._owner = tokens.owner_name(uid, os.getpid())
        self._number = 0
        self._idle: OrderedDict[str, Segment] = OrderedDict()
        self._lent: dict[tuple[str, int], tuple[Segment, Counter[Hashable]]] = {}
        self._total = self._idle_bytes = 0
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
            segment.used = True
            self._lent[segment.name, segment.generation] = (segment, Counter({holder: 1}))
            return segment

    def share(self, name: str, generation: int, holder: Hashable) -> bool:
        """Add a holder to a lent segment. A holder may be added several times. Returns False when the segment is not lent."""
        with self._lock:
            loan = self._lent.get((name, generation))
            if loan is None:
                return False
            loan[1][holder] += 1
            return True

    def size_held(self, name: str, generation: int, holder: Hashable) -> int:
        """Return the size of a segment in bytes; 0 when `holder` does not hold that generation."""
        with self._lock:
            segment, holders = self._lent.get((name, generation), (None, Counter()))
            return segment.size if segment is not None and holders[holder] > 0 else 0

    def release(self, name: str, generation: int, holder: Hashable, *, reuse: bool = True) -> bool:
        """End one hold of `holder` on the segment. When nobody holds it any more, it can be lent again.

        It is deleted instead if a release had `reuse` False or a holder was lost. Returns False if `holder` does not hold that generation.
        """
        with self._lock:
            loan = self._lent.get((name, generation))
            if loan is None or loan[1][holder] <= 0:
                return False
            loan[1][holder] -= 1
            loan[0].tainted |= not reuse
            self._drop_if_free((name, generation))
            return True

    def release_holder(self, holder: Hashable) -> int:
        """Release all segments of a lost holder and return how many it held.

        They are never lent again, as the holder might still write to them.
        """
        with self._lock:
            keys = [key for key, (_, holders) in self._lent.items() if holders[holder] > 0]
            for key in keys:
                segment, holders = self._lent[key]
                segment.tainted = True
                holders[holder] = 0
                self._drop_if_free(key)
            return len(keys)

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
        """Delete the segments that were not used since the last call and return their number."""
        with self._lock:
            unused = [segment for segment in self._idle.values() if not segment.used]
            for segment in unused:
                self._evict(segment)
            for segment in self._idle.values():
                segment.used = False
            return len(unused)

    def stats(self) -> dict[str, int]:
        """Return the bytes and the number of segments in the store, and its counters."""
        with self._lock:
            usage = {"bytes": self._total, "lent": len(self._lent), "idle": len(self._idle)}
            return usage | {name: self.counters[name] for name in ("created", "reused", "full")}

    def close(self) -> None:
        """Delete all segments. Readers keep the memory that they have mapped."""
        with self._lock:
            for segment in [*self._idle.values(), *(segment for segment, _ in self._lent.values())]:
                segment.remove()
            self._idle.clear()
            self._lent.clear()
            self._total = self._idle_bytes = 0

    def _take_idle(self, size: int) -> Segment | None:
        for segment in reversed(list(self._idle.values())):  # the last one used is the warmest
            if segment.size != size:
                continue
            del self._idle[segment.name]
            self._idle_bytes -= size
            if segment.is_there():
                self.counters["reused"] += 1
                return segment
            logger.warning("segment %s was removed by somebody; another one is made", segment.name)
            self._total -= size
            segment.remove()
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
        self._idle[segment.name] = segment
        self._idle_bytes += segment.size
        while self._idle_bytes > self._max_idle_bytes and len(self._idle) > 1:
            self._evict()

    def _evict(self, segment: Segment | None = None) -> bool:
        """Delete an idle segment, by default the one that was used least recently; return whether there was one."""
        if not self._idle:
            return False
        segment = self._idle.pop(next(iter(self._idle)) if segment is None else segment.name)
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
    import numpy as np

    np.copyto(np.frombuffer(memory, np.uint8, buffer.nbytes), np.frombuffer(buffer, np.uint8))


class SegmentReader:
    """Maps segments of other processes, each once. Thread-safe."""

    def __init__(self, *, directory: Path = DIRECTORY) -> None:
        self._directory = directory
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._watched: dict[int, weakref.ref[Any]] = {}
        """Keeps the references alive whose callbacks release the views."""
        self._lock = threading.Lock()
        """Guards `_maps`: two threads must not map a segment twice."""

    def view(self, name: str, offset: int, size: int, on_release: Callable[[], None] | None = None) -> memoryview:
        """Return `size` bytes of segment `name`. `on_release` is called when no array uses them any more; it must not block.

        Raises FrameError when the segment does not exist, belongs to another user, or is shorter.
        """
        import numpy as np

        memory = self._map(name)
        if offset < 0 or size < 0 or offset + size > len(memory):
            raise FrameError(f"segment {name} has {len(memory)} bytes, the message wants {size} at {offset}")
        window = np.frombuffer(memory, np.uint8, size, offset)
        if on_release is not None:
            self._watch(window, on_release)
        return window.data

    def _watch(self, window: "np.ndarray", on_release: Callable[[], None]) -> None:
        key = id(window)

        def on_finalize(_: Any) -> None:
            self._watched.pop(key, None)
            on_release()

        self._watched[key] = weakref.ref(window, on_finalize)

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
        if not tokens.SEGMENT_NAME.fullmatch(name):
            raise FrameError(f"{name!r} is not the name of a segment")
        try:
            descriptor = tokens.open_own(self._directory / name, os.O_RDWR)
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
        while len(self._maps) >= _MAX_MAPPINGS:
            self._maps.popitem(last=False)
