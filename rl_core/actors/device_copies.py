"""Copies of new weights on the GPUs of trainer ranks other than 0. Inference engines on the same GPU read them in place (CUDA IPC).

Rank 0 holds the complete tensors of each bucket. It broadcasts them in the trainer's process group, and each rank whose device has an engine
keeps them in a `DeviceBuffer`. Rank 0 then gets handles of the buffers, and its publisher gives them to the engines.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.actors.ranks import Ranks
from rl_core.weights.bucket import Bucket, Layout
from rl_core.weights.device_buffer import DeviceBuffer, Handle, write
from rl_core.weights.weight_transport import Place


class DeviceCopies:
    """The copies of one version. Every rank creates one; all methods but `free` are collective."""

    def __init__(
        self, ranks: Ranks, layout: Layout, places: Sequence[Place], handle_counts: Sequence[int], *, seconds: float
    ) -> None:
        """Allocate memory for a version of `layout` on each device from which handles are wanted.

        `places` and `handle_counts`: device of each rank and number of its handles. `seconds`: longest time of a weight sync. A device without
        enough free memory gets no copy and no handles.
        """
        self._ranks, self._places, self._num_handles, self._seconds = ranks, places, handle_counts[ranks.rank], seconds
        self._buffer = DeviceBuffer(optional=True)
        if self._num_handles:
            self._buffer.allocate(layout.nbytes, str(ranks.device))
        self._unused: list[Handle] = []
        """Handles of this rank's copy that no engine has opened."""
        self._complete = False
        self.handles: dict[Place, list[Handle]] = {}
        """Handles of the copy on each device, once all buckets were broadcast. The publisher removes those that engines open."""

    def broadcast(self, bucket: Bucket, tensors: Iterable[Tensor]) -> None:
        """Copy `bucket` to the devices. `tensors` are those of the bucket on rank 0, and are not used elsewhere."""
        own_copy = self._buffer.part(bucket) if self._buffer.is_allocated else None
        memory = (
            torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._ranks.device) if own_copy is None else own_copy
        )
        if self._ranks.rank == 0:
            write(tensors, bucket, memory)
        dist.broadcast(memory, 0)

    def collect_handles(self) -> None:
        """Collect the handles of all copies in `handles`, once all buckets were broadcast."""
        if self._buffer.is_allocated:
            self._unused = [self._buffer.handle() for _ in range(self._num_handles)]
        for place, packed in zip(self._places, self._ranks.gather(_packed(self._unused)), strict=True):
            if packed:
                self.handles[place] = _unpacked(packed)
        self._complete = True

    def await_end(self) -> None:
        """Wait until rank 0 has finished publishing the version, so that no engine maps the copies any more."""
        if not self._complete:
            return
        with self._ranks.collectives_within(self._seconds):
            unopened = self._ranks.gather([_packed(self.handles.get(place, ())) for place in self._places])[0]
        self._unused = _unpacked(unopened[self._ranks.rank])

    def free(self) -> None:
        """Free this rank's copy of the weights on its device. Other ranks need not call it."""
        self._buffer.free(unused=self._unused)


def _packed(handles: Iterable[Handle]) -> list[list[int | str | bool]]:
    """Return `handles` as JSON can hold them."""
    return [[element.hex() if isinstance(element, bytes) else element for element in handle] for handle in handles]


def _unpacked(handles: list[list[int | str | bool]]) -> list[Handle]:
    return [
        tuple(bytes.fromhex(element) if isinstance(element, str) else element for element in handle)
        for handle in handles
    ]
