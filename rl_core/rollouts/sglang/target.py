"""`EngineTarget`: verified weights on their way from the receiver into the engine's process, through memory that both share.

The receiver's thread fills the memory and waits until the engine has taken it, as often as the model needs it.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rl_core.messages.engine import TensorPlace
from rl_core.rollouts.engine import PROVEN, UNPROVEN
from rl_core.rollouts.sglang.engine import SGLangEngine
from rl_core.rollouts.sglang.expected import Expected

BUCKET_BYTES = 64 << 20
ALIGNMENT = 64


class SharedMemory:
    """Memory of the worker and its engine: nameless, gone with the last of the two."""

    def __init__(self, nbytes: int) -> None:
        """Take `nbytes`; pages are taken as they are written."""
        self.descriptor = os.memfd_create("rljob-weights")
        os.ftruncate(self.descriptor, nbytes)
        self._map = mmap.mmap(self.descriptor, nbytes)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the object."""
        os.close(self.descriptor)


class EngineTarget:
    """Implements `WeightTarget`."""

    def __init__(
        self,
        engine: SGLangEngine,
        memory: SharedMemory,
        shapes: Mapping[str, tuple[tuple[int, ...], str]],
        seconds: float,
        *,
        provable: bool,
    ) -> None:
        """`shapes`: name -> (shape, dtype) of the model's tensors; `seconds` bound one answer of the engine.

        `provable`: whether the engine tells the checksums of its tensors.
        """
        self._engine, self._memory, self._shapes, self._seconds = engine, memory, shapes, seconds
        self._provable = provable
        self.proof = ""
        """What the last version was proven by; "" before the first."""

    async def prepare(self, deadline: float) -> None:
        """Wait until a child is up; nothing generates in it."""
        await asyncio.to_thread(self._engine.await_up, deadline)

    def names_and_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return name -> (shape, dtype) of every tensor of the model."""
        return self._shapes

    def load(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Give the engine every tensor, and compare its own with them. Raises InfrastructureError when they differ."""
        self._call("begin_weights")
        expected = Expected()
        places: list[TensorPlace] = []
        end = 0
        for name, tensor in tensors:
            if self._provable:
                expected.add(name, tensor)
            start = -(-end // ALIGNMENT) * ALIGNMENT
            if places and start + tensor.nbytes > self._memory.bytes.numel():
                self._call("load_weights", places=places)
                places, start = [], 0
            end = start + tensor.nbytes
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            self._memory.bytes[start:end].copy_(flat)
            dtype = str(tensor.dtype).removeprefix("torch.")
            places.append(TensorPlace(name=name, shape=list(tensor.shape), dtype=dtype, offset=start))
        self._call("load_weights", places=places, version=version, keep_cache=self._engine.paused == "in_place")
        checksums = self._call("end_weights")
        if self._provable:
            expected.compare(checksums)
        self.proof = PROVEN if self._provable else UNPROVEN

    async def resume(self, version: int, digest: str) -> None:
        """Generate with `version` from now on, also what was interrupted."""
        self._engine.version = version
        await self._engine.go_on(self._seconds)

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._engine.call(method, **arguments).result(self._seconds)


def memory_for(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> SharedMemory:
    """Return memory for a bucket of tensors, and for the largest one."""
    sizes = [torch.Size(shape).numel() * getattr(torch, dtype).itemsize for shape, dtype in shapes.values()]
    whole = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
    return SharedMemory(max(*sizes, min(BUCKET_BYTES, whole)))
