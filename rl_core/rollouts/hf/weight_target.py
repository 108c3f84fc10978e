"""`HFWeightTarget`: writes new weights into the HF engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from torch import Tensor

from rl_core.api.errors import DeadlineExceeded
from rl_core.rollouts.adapters import AdapterMerge
from rl_core.rollouts.hf.loop import EngineLoop
from rl_core.weights.storage_alias import storage_alias


class HFWeightTarget:
    """Implements `WeightTarget` and `InPlaceTarget` over an engine in which no row runs while weights change."""

    def __init__(self, loop: EngineLoop, adapters: AdapterMerge | None = None) -> None:
        """Write into the engine of `loop`. `adapters`: those of a job with LoRA, which are merged into its weights."""
        self._loop, self._engine = loop, loop.engine
        self._adapters = adapters

    async def prepare(self, deadline: float) -> None:
        """Pause generation: a row whose caller has left may run until the end of its step. Raises DeadlineExceeded after `deadline` seconds."""
        try:
            await asyncio.wait_for(asyncio.to_thread(self._loop.pause), deadline)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the generation step must end within {deadline:g} s, it is still running"
            ) from error

    def names_and_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return name -> (shape, dtype) of every tensor of the model."""
        adapters = self._adapters.adapters if self._adapters is not None else {}
        return self._engine.shapes_and_dtypes() | {
            name: (tuple(tensor.shape), "float32") for name, tensor in adapters.items()
        }

    def destinations(self) -> Mapping[str, Tensor]:
        """Return the parameters that may be written in place: on a CPU, those that are stored in the layout of their name.

        They are aliases, so that the storages of the parameters themselves can still be resized.
        """
        destinations = self._engine.destinations()
        if self._adapters is not None and self._engine.device.type == "cpu":
            destinations |= self._adapters.tensors()
        return {name: storage_alias(tensor) for name, tensor in destinations.items()}

    def load(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Write every tensor; names and shapes were compared with the manifest before."""
        self._engine.write_weights(tensors if self._adapters is None else self._adapters.merged(tensors))

    async def resume(self, version: int, digest: str) -> None:
        """Generate with the weights as `version`; paused rows continue."""
        self._engine.serve(version)
        self._loop.resume()
