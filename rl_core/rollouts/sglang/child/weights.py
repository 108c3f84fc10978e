"""`ChildWeightLoader`: loads weights into the engine, and returns checksums of what the engine holds.

An update is begin -> load (once or more) -> end, or load_source. The worker compares the checksums, because it has
the verified weights or their manifest. Every result of the engine is checked: SGLang refuses an update by its return value, not by an exception.
"""

from __future__ import annotations

import asyncio
import json
import mmap
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

from rl_core.messages.engine import SourceLoad, TensorPlace
from rl_core.rollouts.sglang.child import scheduler
from rl_core.transports import frames


class ChildWeightLoader:
    """Runs the weight updates of one engine."""

    def __init__(self, manager: Any, shared: mmap.mmap, *, ranks: int) -> None:
        """Load from the memory `shared`.

        Args:
            manager: The engine's tokenizer manager, which sends requests to its schedulers.
            shared: Memory into which the worker writes tensors.
            ranks: Number of tensor-parallel processes; each gets all tensors and takes its own slices.
        """
        self._manager = manager
        self._memory = torch.frombuffer(shared, dtype=torch.uint8)
        self._open, self._ranks = False, ranks
        self.updates = 0
        """Number of updates that were begun."""
        self.loading_source = False
        """Whether the ranks read a source: they answer nothing until they have, and the deadlines of the sync limit that."""
        self._proofs = 0
        """Number of updates after which tensors were read back."""

    async def begin(self) -> None:
        """Begin an update; first ends one that a failed transfer left open."""
        if self._open:
            await self._close()
        self.updates += 1
        _require(await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))
        self._open = True

    async def load(self, places: list[TensorPlace], *, version: int | None = None, keep_cache: bool = False) -> None:
        """Load the tensors that are in the shared memory at `places`.

        `version` comes with the last tensors of an update; then the caches of the earlier weights are dropped, unless `keep_cache`.
        """
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=self.serialized(places),
            load_format="flattened_bucket",
            flush_cache=version is not None and not keep_cache,
            weight_version=None if version is None else str(version),
        )
        _require(await self._manager.update_weights_from_tensor(request, None))

    async def load_source(self, load: SourceLoad, *, version: int, keep_cache: bool, turns: int) -> dict[str, Any]:
        """Let each rank read `version` as `load` says, and drop the caches of the earlier weights unless `keep_cache`.

        Returns what `end` does, and `reports`: the `LoadReport` of each rank.
        """
        if self._open:
            await self._close()
        self.updates += 1
        message = {scheduler.SOURCE: [bytes(part) for part in frames.encode(load)]}
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(message)] * self._ranks,
            load_format="flattened_bucket",
            flush_cache=not keep_cache,
            weight_version=str(version),
            selector="target",  # A draft model would read the source a second time.
        )
        proves_all, check = self._next_check(turns=turns, whole=load.whole)
        manager = self._manager
        self.loading_source = True
        try:
            begin_answers, loaded, end_answers, checked = await self._send_together(
                (manager.begin_weight_update_communicator, BeginWeightUpdateReqInput()),
                (manager.update_weights_from_tensor_communicator, request),
                (manager.end_weight_update_communicator, EndWeightUpdateReqInput()),
                (manager.check_weights_communicator, check),
            )
        finally:
            self.loading_source = False
        for answers in (begin_answers, end_answers, checked):
            _require(FanOutCommunicator.merge_results(answers))
        ranks = [dict(rank.checksums) for answer in checked for rank in answer.payload]
        reports = [json.loads(rank.pop(scheduler.REPORT, "{}")) for rank in ranks]
        if not any(report.get("error") for report in reports):
            _require(FanOutCommunicator.merge_results(loaded))
        return {"whole": proves_all, "ranks": ranks, "reports": reports}

    async def _send_together(self, *requests: tuple[Callable[[Any], Awaitable[list[Any]]], Any]) -> list[list[Any]]:
        """Send all requests (communicator, request) before the first is answered, and return their answers.

        The scheduler serves them in this order, and the pause waits for one exchange of messages instead of one for each request.
        """
        answers: list[list[Any]] = []

        async def send(_: None) -> list[Any]:
            answers.extend(await asyncio.gather(*(communicator(request) for communicator, request in requests)))
            return [answer for answers_of_request in answers for answer in answers_of_request]

        # SGLang's own calls take the same lock for each request: generation cannot be resumed in between.
        await self._manager._weight_update_session_call(send, None)
        return answers

    def serialized(self, places: list[TensorPlace]) -> list[bytes]:
        """Return the tensors at `places` as SGLang's flattened bucket, serialised for each rank."""
        end = max(self._end(place) for place in places)
        # Cloned, because serialising a tensor moves its storage to memory of torch's own; later writes of the worker would not be seen.
        # As one tensor, because every tensor is passed by a file descriptor of its own, which takes longer than copying a small tensor.
        bucket = {
            "flattened_tensor": self._memory[:end].clone(),
            "metadata": [self._metadata(place) for place in places],
        }
        # Serialised once per rank: the file descriptor in a serialised CPU tensor can be received only once.
        return [MultiprocessingSerializer.serialize(bucket) for _ in range(self._ranks)]

    def tensors(self, places: list[TensorPlace]) -> dict[str, torch.Tensor]:
        """Return the tensors at `places` by name: views of the shared memory."""
        return {
            place.name: self._memory[place.offset : self._end(place)]
            .view(getattr(torch, place.dtype))
            .view(place.shape)
            for place in places
        }

    async def end(self, *, turns: int, whole: bool) -> dict[str, Any]:
        """End the update and read back what the engine holds of the tensors that it was given.

        Returns `whole`: whether all tensors were read, and `ranks`: `LoadedLayout.checksums` of each rank. All are read with the argument
        `whole`, and after the first update of this engine; else one of `turns` shares, in turn.
        """
        await self._close()
        return await self.held(turns=turns, whole=whole)

    async def held(self, *, turns: int, whole: bool = False) -> dict[str, Any]:
        """Return what `end` does, without an update."""
        whole, check = self._next_check(turns=turns, whole=whole)
        return {"whole": whole, "ranks": await self._check(check)}

    def _next_check(self, *, turns: int, whole: bool) -> tuple[bool, CheckWeightsReqInput]:
        """Return whether the next proof reads all tensors, and the request for it."""
        turn, whole = self._proofs, whole or self._proofs == 0
        self._proofs += 1
        return whole, _check_request(scheduler.pieces_action(turn, 1 if whole else turns))

    async def checksums_of_ranks(self) -> list[dict[str, str]]:
        """Return the checksums of all tensors of every rank by SGLang; those of a GPU are comparable with earlier ones of that GPU only."""
        return await self._check(_check_request("checksum"))

    async def _check(self, request: CheckWeightsReqInput) -> list[dict[str, str]]:
        success, message, ranks, _ = await self._manager.check_weights(request)
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
        """Return the offset of the byte after a tensor."""
        nbytes: int = torch.Size(place.shape).numel() * getattr(torch, place.dtype).itemsize
        return place.offset + nbytes


def _check_request(action: str) -> CheckWeightsReqInput:
    return CheckWeightsReqInput(action=action, selector="target")


def _require(answer: tuple[bool, str]) -> None:
    success, message = answer[0], answer[1]
    if not success:
        raise RuntimeError(f"the engine refused the weights: {message}")
