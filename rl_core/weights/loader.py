"""Loads the bytes of a version into the engine's memory, in a thread of its own."""

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

from rl_core.api.errors import RLJobError
from rl_core.messages.weights import DeviceSource, GroupSource, MessageSource, PatchSource, SharedSource, WeightSource
from rl_core.weights import checksums
from rl_core.weights.assembly import Assembly
from rl_core.weights.compatibility import shape_and_dtype
from rl_core.weights.source_reader import SourceReader
from rl_core.weights.target import InPlaceTarget, RankTarget, WeightTarget

logger = logging.getLogger(__name__)

INLINE_BYTES = 1 << 22
"""Local models up to this size are copied on the event loop, because handing the work to a thread takes as long as the copy."""
CANCELLED = "replaced by a newer offer, or its deadline passed"


class TransferCancelled(Exception):
    """A newer offer, an abort or a deadline ended the transfer."""


class WeightLoader:
    """Feeds `target` from the sources that `reader` opens, one transfer at a time."""

    def __init__(self, target: WeightTarget, reader: SourceReader) -> None:
        """Load into `target` from the sources that `reader` opens."""
        self._target, self._reader = target, reader
        self._cancelled = threading.Event()
        """Set by `cancel`. The loading thread checks it before each tensor."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rljob-weights")
        shapes = [shape_and_dtype(expected)[0] for expected in target.names_and_shapes().values()]
        self._kernels = self._thread.submit(checksums.kernels) if checksums.has_large_tensor(shapes) else None

    def warm_up(self) -> None:
        """Wait until the compiled kernels are loaded, if the model is large enough to need them."""
        if self._kernels is not None:
            self._kernels.result()

    @property
    def ranks(self) -> int:
        """Return the number of processes that read a source: those of an engine that does so itself, else this one."""
        return self._target.ranks if isinstance(self._target, RankTarget) else 1

    @property
    def group(self) -> str:
        """Return the key of the usable process group; "" if there is none."""
        return self._target.group if isinstance(self._target, RankTarget) else self._reader.group

    def group_ended(self, source: WeightSource) -> bool:
        """Return whether the last transfer, from `source`, failed because of its process group or mapping.

        The version can then be offered in another way.
        """
        if isinstance(self._target, RankTarget) and isinstance(source, DeviceSource | GroupSource):
            return self._target.group_ended
        return self._reader.group_ended(source)

    def opened(self, source: WeightSource) -> tuple[int, ...]:
        """Return the numbers of the handles of `source` that were opened in the last transfer, from `source`."""
        if not isinstance(source, DeviceSource):
            return ()
        if isinstance(self._target, RankTarget):
            return self._target.opened
        return (0,) if self._reader.opened else ()

    @property
    def is_cancelled(self) -> bool:
        """Return whether `cancel` was called since the last `reset`."""
        return self._cancelled.is_set()

    def reset(self) -> None:
        """Clear the effect of `cancel`, before a new transfer."""
        self._cancelled.clear()
        self._reader.ready()

    def cancel(self) -> None:
        """End the transfer in progress, if there is one."""
        self._cancelled.set()
        self._reader.interrupt()

    def check(self) -> None:
        """Raise TransferCancelled if `cancel` was called."""
        if self._cancelled.is_set():
            raise TransferCancelled

    async def load(self, assembly: Assembly, source: WeightSource) -> str:
        """Load the tensors of `source` and return "", or the reason why that failed.

        If this call is cancelled, it first waits until the thread no longer writes to the engine's memory.
        """
        data = source.data if isinstance(source, PatchSource) else source
        local = isinstance(self._target, InPlaceTarget) and isinstance(data, SharedSource | MessageSource)
        if local and assembly.manifest.total_bytes <= INLINE_BYTES:
            return self._load(assembly, source)
        loading = asyncio.get_running_loop().run_in_executor(self._thread, self._load, assembly, source)
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            self.cancel()
            await asyncio.wait([loading])
            raise

    def _load(self, assembly: Assembly, source: WeightSource) -> str:
        try:
            if (
                isinstance(self._target, RankTarget)
                and isinstance(source, SharedSource | DeviceSource | GroupSource)
                and not assembly.is_needed_here
            ):
                self._target.load_source(source, assembly)
                return ""
            with self._reader.open(source, assembly) as tensors:
                self._target.load(tensors, assembly.manifest.version)
                unread = next(tensors, None)
            if unread is not None:
                return f"{type(self._target).__name__}.load must take every tensor, it left {unread[0]!r}"
        except TransferCancelled:
            return CANCELLED
        except RLJobError as error:
            return f"{type(error).__name__}: {error}"
        except Exception as error:  # the engine's code: whatever it raises, it does not serve this version
            logger.exception("the engine failed to load version %s", assembly.manifest.version)
            return f"{type(error).__name__}: {error}"
        return ""

    async def close(self) -> None:
        """Wait for the thread to end. Call `cancel` first."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
