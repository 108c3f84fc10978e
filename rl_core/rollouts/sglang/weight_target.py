"""`SGLangWeightTarget`: gives weights to the engine's child process.

What the engine's own processes can read they read themselves, from shared memory, from memory of the device or in a process group. Other
tensors, of streams, patches and adapters, are passed through memory that this process shares with the child: the receiver's thread fills
it and waits until the engine has loaded them, as many times as the model needs.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rl_core.api.errors import InfrastructureError
from rl_core.messages.engine import SourceLoad, TensorPlace
from rl_core.messages.weights import DeviceSource, GroupSource, SharedSource
from rl_core.rollouts.engine import PROVEN, UNPROVEN
from rl_core.rollouts.sglang.adapters import ALIGNMENT, AdapterTensors, digest
from rl_core.rollouts.sglang.engine import SGLangEngine
from rl_core.rollouts.sglang.proof import CONTENT, PROOF_VARIABLE, GivenTensors
from rl_core.weights.assembly import Assembly
from rl_core.weights.manifest import is_adapter_name

logger = logging.getLogger(__name__)
BUCKET_BYTES = 64 << 20


class WeightBuffer:
    """Memory shared with the engine's child process. It has no name, and is freed when both processes have ended."""

    def __init__(self, nbytes: int) -> None:
        """Reserve `nbytes`; pages are allocated when they are first written."""
        self.descriptor = os.memfd_create("rljob-weights")
        os.ftruncate(self.descriptor, nbytes)
        self._map = mmap.mmap(self.descriptor, nbytes)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def close(self) -> None:
        """Close the descriptor; the mapping ends with the object."""
        os.close(self.descriptor)


class SGLangWeightTarget:
    """Implements `WeightTarget` and `RankTarget`."""

    def __init__(
        self,
        engine: SGLangEngine,
        buffer: WeightBuffer,
        shapes: Mapping[str, tuple[tuple[int, ...], str]],
        seconds: float,
        *,
        turns: int,
        adapter_turns: int,
        ranks: int,
        collective_seconds: float,
        adapters: AdapterTensors | None = None,
    ) -> None:
        """Write into `engine` through `buffer`.

        Args:
            engine: The engine.
            buffer: Memory that the engine's child process shares.
            shapes: Name -> (shape, dtype) of the model's tensors.
            seconds: Deadline of one call of the engine.
            turns: After the first version every `turns`-th tensor is read back from the engine at each update, in turn.
            adapter_turns: The same of the base, where an update has adapters only.
            ranks: Number of tensor-parallel processes of the engine.
            collective_seconds: Deadline of one operation of a process group.
            adapters: Those of a job with LoRA that sends them.
        """
        self._engine, self._buffer, self._shapes, self._seconds = engine, buffer, shapes, seconds
        self._turns, self._adapter_turns, self._adapters = turns, adapter_turns, adapters
        self._base = GivenTensors()
        """The base that the engine was given last."""
        self.ranks, self._collective_seconds = ranks, collective_seconds
        self._group: tuple[str, list[int]] = ("", [])
        """Key of the process group of the engine's processes, and their ids: those of another engine are in no group."""
        self.group_ended = False
        """See `RankTarget`."""
        self.opened: tuple[int, ...] = ()
        """See `RankTarget`."""
        self._prove_all = True
        """Whether the next update is proven by all tensors: the last one was not proven."""
        self.proof = ""
        """How the last version was proven (`Engine.weights_proof`); "" before the first."""

    async def prepare(self, deadline: float) -> None:
        """Wait until the engine's child process is ready, for `deadline` seconds at most."""
        await asyncio.to_thread(self._engine.await_ready, deadline)

    def names_and_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return name -> (shape, dtype) of every tensor of the model and of its adapters."""
        return {**self._shapes, **(self._adapters.shapes if self._adapters is not None else {})}

    @property
    def group(self) -> str:
        """Return the key of the process group that the engine's processes are in; see `RankTarget`."""
        key, pids = self._group
        return key if pids == self._engine.pids else ""

    def load_source(self, source: SharedSource | DeviceSource | GroupSource, assembly: Assembly) -> None:
        """Let each process of the engine read the version from `source`; see `RankTarget`."""
        manifest, shapes = assembly.manifest, self._shapes
        assembly.touched, self.group_ended, self.opened = True, False, ()
        prove_all, self._prove_all = self._prove_all, True
        load = SourceLoad(
            source=source,
            manifest=manifest.packed,
            bucket_bytes=assembly.layout.bucket_bytes,
            wanted=list(shapes),
            whole=prove_all or self._turns == 1,
            collective_seconds=self._collective_seconds,
        )
        keep_cache = self._engine.paused == "in_place"
        answer = self._call(
            "load_source", load=load, version=manifest.version, keep_cache=keep_cache, turns=self._turns
        )
        reports = answer["reports"]
        keys = {report["group"] for report in reports}
        self.opened = tuple(rank for rank, report in enumerate(reports) if report["opened"])
        self._group = (keys.pop() if len(keys) == 1 else "", self._engine.pids)
        assembly.bad += sorted({name for report in reports for name in report["bad"]})
        failed = {rank: report for rank, report in enumerate(reports) if report["error"]}
        if failed:
            self.group_ended = all(report["ended"] for report in failed.values())
            raise InfrastructureError("; ".join(f"rank {rank}: {report['error']}" for rank, report in failed.items()))
        if not assembly.bad:
            tensors = GivenTensors()
            tensors.add_manifest(manifest, shapes)
            self._prove(tensors, answer)

    def load(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Load every tensor into the engine. Raises InfrastructureError if the engine's tensors then differ from the given ones.

        Without a tensor of the base, the engine keeps the base that it has, and a share of it is read.
        """
        adapters: dict[str, Tensor] = {}
        base = self._without_adapters(tensors, adapters)
        first_tensor = next(base, None)
        if first_tensor is not None:
            self._load_base(chain([first_tensor], base), version)
        if self._adapters is not None:
            self._load_adapters(self._adapters, adapters, version)
            if first_tensor is None:
                self._prove_all = True
                self._prove(self._base, self._call("held_weights", turns=self._adapter_turns))

    def _without_adapters(
        self, tensors: Iterator[tuple[str, Tensor]], adapters: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield `tensors` but for those of adapters, of which copies are put into `adapters`."""
        for name, tensor in tensors:
            if is_adapter_name(name):
                adapters[name] = tensor.clone()
            else:
                yield name, tensor

    def _load_adapters(self, adapter_tensors: AdapterTensors, adapters: Mapping[str, Tensor], version: int) -> None:
        tensors = adapter_tensors.complete(adapters)
        places: list[TensorPlace] = []
        end = 0
        for name, tensor in tensors.items():
            place, end = self._write(name, tensor, end)
            places.append(place)
        digests = {name: digest(tensor) for name, tensor in tensors.items()}
        self._call("load_adapter", places=places, version=version, config=adapter_tensors.config, digests=digests)

    def _write(self, name: str, tensor: Tensor, end: int) -> tuple[TensorPlace, int]:
        """Write `tensor` into the buffer behind byte `end`; return its place and its last byte + 1."""
        start = _aligned(end)
        end = start + tensor.nbytes
        self._buffer.bytes[start:end].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        dtype = str(tensor.dtype).removeprefix("torch.")
        return TensorPlace(name=name, shape=list(tensor.shape), dtype=dtype, offset=start), end

    def _load_base(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        prove_all, self._prove_all = self._prove_all, True
        self._call("begin_weights")
        proven = GivenTensors()
        places: list[TensorPlace] = []
        end = 0
        for name, tensor in tensors:
            proven.add(name, tensor)
            if places and _aligned(end) + tensor.nbytes > self._buffer.bytes.numel():
                self._call("load_weights", places=places)
                places, end = [], 0
            place, end = self._write(name, tensor, end)
            places.append(place)
        self._call("load_weights", places=places, version=version, keep_cache=self._engine.paused == "in_place")
        self._prove(proven, self._call("end_weights", turns=self._turns, whole=prove_all or self._turns == 1))

    def _prove(self, tensors: GivenTensors, answer: Mapping[str, Any]) -> None:
        """Compare what the engine holds, as `ChildWeightLoader.end` returns it, with `tensors`, which it was given.

        Raises InfrastructureError where they differ.
        """
        if os.environ.get(PROOF_VARIABLE) == CONTENT:
            self.proof = UNPROVEN
            return
        unknown = tensors.prove(answer["ranks"], whole=answer["whole"])
        self._base, self._prove_all = tensors, False
        if answer["whole"]:
            self.proof = UNPROVEN if unknown else PROVEN
        if unknown:
            logger.warning(
                "%d tensors are converted or skipped by the engine and are left to the content check: %s",
                len(unknown),
                unknown[:3],
            )

    async def resume(self, version: int, digest: str) -> None:
        """Generate with the weights as `version`; paused rows continue."""
        if self._adapters is not None:
            answer = self._engine.call("serve_adapter", version=version)
            await asyncio.wait_for(asyncio.wrap_future(answer), self._seconds)
        self._engine.version = version
        await self._engine.resume(self._seconds)

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._engine.call(method, **arguments).result(self._seconds)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def weight_buffer(
    shapes: Mapping[str, tuple[tuple[int, ...], str]], adapters: AdapterTensors | None = None
) -> WeightBuffer:
    """Return shared memory for BUCKET_BYTES of tensors, or all `adapters`; more if one tensor is larger, less if the whole model is smaller."""
    sizes = [torch.Size(shape).numel() * getattr(torch, dtype).itemsize for shape, dtype in shapes.values()]
    total = sum(map(_aligned, sizes))
    return WeightBuffer(max(*sizes, min(BUCKET_BYTES, total), adapters.nbytes if adapters is not None else 0))
