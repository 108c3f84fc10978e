"""`ChildAdapters`: loads adapters (LoRA) into the engine, and says which of them a row is generated with.

    load   put the adapter of a new version into the engine, under a name of its own, beside the one in use
    serve  use it for new rows; the previous adapter is unloaded when no row runs with it any more

A name is never used twice, because the keys of SGLang's prefix cache and of its slots are names of adapters.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput, UnloadLoRAAdapterReqInput

from rl_core.messages.engine import TensorPlace
from rl_core.rollouts.sglang.adapters import digest
from rl_core.rollouts.sglang.child.weights import ChildWeightLoader


class Adapter(NamedTuple):
    """An adapter that was loaded."""

    name: str
    """SGLang's name of it."""
    version: int
    """Version of the weights that it belongs to."""


class ChildAdapters:
    """The adapters of one engine, two at most. In an engine without adapters no row waits for one."""

    def __init__(self, manager: Any, loader: ChildWeightLoader, *, enabled: bool) -> None:
        """Load the adapters in the memory of `loader` into the engine of the tokenizer manager `manager`."""
        self._manager, self._loader, self.enabled = manager, loader, enabled
        self._served: Adapter | None = None
        self._offered: Adapter | None = None
        """The adapter that is loaded but not served yet."""
        self._count = 0
        self._paused = False
        self._open = asyncio.Event()
        """Set while a row may begin: an adapter is served, and generation is not paused."""
        self._unloading: asyncio.Task[None] | None = None
        self._update()

    async def load(
        self, places: list[TensorPlace], *, version: int, config: dict[str, Any], digests: dict[str, str]
    ) -> None:
        """Load the adapter of `version`, whose tensors are in the shared memory at `places`.

        `digests` has the SHA-256 of each tensor by its name, and `config` is the adapter's configuration as in `adapter_config.json` of peft.
        Raises RuntimeError, without loading anything, when a tensor is missing, unknown, or has another digest.
        """
        if self._unloading is not None:
            await self._unloading
        uncommitted, self._offered = self._offered, None
        if uncommitted is not None:  # The adapter of a version that was never committed.
            await self._unload(uncommitted)
        # SGLang compares as well, after the tensors were sent to its processes, but a difference ends them.
        tensors = self._loader.tensors(places)
        mismatched = sorted(name for name in digests.keys() | tensors.keys() if not _holds(tensors, digests, name))
        if mismatched:
            raise RuntimeError(
                f"the tensors of an adapter must have the digests that were sent with them, {len(mismatched)} have others: {mismatched[:3]}"
            )
        self._count += 1
        adapter = Adapter(f"version-{version}-{self._count}", version)
        result = await self._manager.load_lora_adapter_from_tensors(
            LoadLoRAAdapterFromTensorsReqInput(
                lora_name=adapter.name,
                config_dict=config,
                serialized_named_tensors=self._loader.serialized(places),
                load_format="flattened_bucket",
                expected_checksums=digests,
            ),
            None,
        )
        if not result.success:
            raise RuntimeError(f"the engine refused the adapter: {result.error_message}")
        self._offered = adapter

    async def serve(self, version: int) -> None:
        """Let rows that begin use the adapter of `version`. Raises RuntimeError unless it is the one that was loaded last, or is served."""
        if self._offered is None and self._served is not None and self._served.version == version:
            return
        if self._offered is None or self._offered.version != version:
            raise RuntimeError(
                f"the adapter of version {version} must be loaded before it is served, got {self._offered}"
            )
        await self._manager.get_internal_state()  # A scheduler that has died since the load does not answer.
        previous, self._served, self._offered = self._served, self._offered, None
        self._update()
        if previous is not None:
            self._unloading = asyncio.ensure_future(self._unload(previous))

    def pause(self) -> None:
        """Let no row begin until `resume`, so that rows which are aborted now and requested again use the adapter that is served then."""
        self._paused = True
        self._update()

    def resume(self) -> None:
        """Let rows begin."""
        self._paused = False
        self._update()

    async def for_row(self) -> Adapter | None:
        """Wait until an adapter is served and return it, for a row that starts now. Returns None in an engine without adapters."""
        if not self.enabled:
            return None
        await self._open.wait()
        return self._served

    def serves(self, adapter: Adapter | None) -> bool:
        """Return whether rows that begin use `adapter`."""
        return adapter is self._served

    def _update(self) -> None:
        if self._served is not None and not self._paused:
            self._open.set()
        else:
            self._open.clear()

    async def _unload(self, adapter: Adapter) -> None:
        """Unload `adapter` once no row runs with it."""
        result = await self._manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=adapter.name), None)
        if not result.success:
            raise RuntimeError(f"the engine did not unload the adapter {adapter.name}: {result.error_message}")
        # Otherwise SGLang would keep the name of each adapter that was ever loaded.
        self._manager.lora_ref_cache.pop(adapter.name, None)


def _holds(tensors: dict[str, Any], digests: dict[str, str], name: str) -> bool:
    return name in tensors and digest(tensors[name]) == digests.get(name)
