"""Puts weights into the engine's model, and tells what its own tensors hold then. In the child process.

begin -> load (as many times as it takes) -> end. The worker compares: it has the weights that were verified, while this process only
has what came through the shared memory. Every answer of the engine is looked at: a refused update is a return value there,
not an exception.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

from rl_core.messages.engine import TensorPlace


class Loader:
    """The weight updates of one engine."""

    def __init__(self, manager: Any, shared: mmap.mmap, *, device: str, ranks: int) -> None:
        """`manager` is the engine's tokenizer manager, which speaks to its schedulers; `device` is where the model lies.

        `ranks`: processes that share the model; each takes its own slices of what all are given.
        """
        self._manager = manager
        self._memory = torch.frombuffer(shared, dtype=torch.uint8)
        self._open, self._ranks = False, ranks
        self.updates = 0
        """Updates begun so far."""
        self._provable = device == "cpu"
        """On a GPU the engine's checksum is a kernel's: the weights lie in the worker's host memory and have none to compare with."""

    async def begin(self) -> None:
        """Open an update; one that was left open by a transfer that failed is closed first."""
        if self._open:
            await self._close()
        self.updates += 1
        _require(await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))
        self._open = True

    async def load(self, places: list[TensorPlace], *, version: int | None = None, keep_cache: bool = False) -> None:
        """Take the tensors that lie in the shared memory now; with the last of them comes the `version` that they are of.

        Then the caches of before are dropped, unless kept.
        """
        end = max(self._end(place) for place in places)
        # Cloned: to serialise a tensor moves its whole storage to memory of torch's own, after which nothing new would be seen here.
        # As one tensor: each is handed over by a file descriptor of its own, which takes longer than a small tensor's copy.
        bucket = {
            "flattened_tensor": self._memory[:end].clone(),
            "metadata": [self._metadata(place) for place in places],
        }
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(bucket)] * self._ranks,
            load_format="flattened_bucket",
            flush_cache=version is not None and not keep_cache,
            weight_version=None if version is None else str(version),
        )
        _require(await self._manager.update_weights_from_tensor(request, None))

    async def end(self) -> dict[str, str]:
        """Close the update; return the checksums of the engine's tensors, none of them on a GPU."""
        await self._close()
        return await self.checksums() if self._provable else {}

    async def checksums(self) -> dict[str, str]:
        """Return the checksum of each of the engine's tensors, by the engine's name for it."""
        return (await self.checksums_of_ranks())[0]

    async def checksums_of_ranks(self) -> list[dict[str, str]]:
        """Return the checksums of each rank; on a GPU they compare only with others of that GPU."""
        success, message, ranks, _ = await self._manager.check_weights(CheckWeightsReqInput(action="checksum"))
        _require((success, message))
        return [rank["checksums"] for rank in ranks]

    async def _close(self) -> None:
        _require(await self._manager.end_weight_update(EndWeightUpdateReqInput(), None))
        self._open = False

    def _metadata(self, place: TensorPlace) -> FlattenedTensorMetadata:
        start, end = place.offset, self._end(place)
        dtype = getattr(torch, place.dtype)
        return FlattenedTensorMetadata(place.name, torch.Size(place.shape), dtype, start, end, end - start)

    @staticmethod
    def _end(place: TensorPlace) -> int:
        """Return the byte after a tensor."""
        nbytes: int = torch.Size(place.shape).numel() * getattr(torch, place.dtype).itemsize
        return place.offset + nbytes


def _require(answer: tuple[bool, str]) -> None:
    success, message = answer[0], answer[1]
    if not success:
        raise RuntimeError(f"the engine refused the weights: {message}")
