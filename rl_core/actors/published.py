"""Provides the weights of a trainer to the publisher and to the export. Adapters (LoRA) are merged into the weights or given separately."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from rl_core.actors import lora
from rl_core.actors.critic import is_critic_name
from rl_core.actors.ranks import Ranks
from rl_core.actors.residency import OffloadManager
from rl_core.actors.slices import Slices
from rl_core.actors.source import GatheredSource, GatheringPlan
from rl_core.api.job import RLJobSpec
from rl_core.weights.adapters import AdapterSource, sends_adapters
from rl_core.weights.manifest import is_adapter_name, wire_dtype
from rl_core.weights.version_source import SourceEntry


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor of the model, which the ranks may have in parts."""

    shape: tuple[int, ...]
    like: Tensor
    """A tensor of the same type."""


class PublishedState(ABC):
    """The weights that an actor publishes and exports. Each backend's `ModelManager` implements it."""

    cfg: RLJobSpec
    ranks: Ranks
    residency: OffloadManager
    gathering: GatheringPlan
    """The parts of the published weights that each rank sends to rank 0."""
    sync_names: list[tuple[str, str | None]]
    """Names to sync and export in the model's order: (name, the name it is tied to or None). Adapters are not among them."""

    @abstractmethod
    def _whole_shapes(self) -> Mapping[str, WholeTensor]:
        """Return shape and type of the model's whole tensors by Hugging Face name, tied ones once. Equal on all ranks."""

    @abstractmethod
    def _published_slices(self) -> Slices:
        """Return the parts of weights and adapters that this rank stores, by Hugging Face name; adapters in float32."""

    @abstractmethod
    def _written_adapters(self) -> Slices:
        """Return the float32 parts of trained tensors, adapters among them, that this rank contributes. Exactly one rank has each element."""

    def version_source(self, dtype: str, bucket_bytes: int) -> GatheredSource:
        """Return the present weights as a source for publishing; floating-point weights in `dtype`. Every rank must call its `finish`.

        Adapters are merged into the weights. Collective. Raises RuntimeError if the weights are offloaded.
        """
        self.residency.require_loaded("gathering the weights")
        slices, adapters = self._published_slices(), self.cfg.model.lora
        source_slices = (
            slices if adapters is None else lora.MergedSlices(slices, self._whole_adapters(), adapters.scale)
        )
        return GatheredSource(
            self._entries(dtype), source_slices, self.gathering, self.ranks, bucket_bytes=bucket_bytes
        )

    def publish_source(self, bucket_bytes: int, *, needs_base: bool) -> GatheredSource | AdapterSource:
        """Return the present weights as a source for the publisher. Every rank must call its `finish`. Collective.

        Without LoRA, and where the syncer cannot send adapters, the source has the weights with adapters merged into them. Otherwise it has
        the adapters, and also the frozen weights if `needs_base` is true on rank 0; that of other ranks does not matter. Raises
        RuntimeError if the weights are offloaded.
        """
        if not sends_adapters(self.cfg):
            return self.version_source(self.cfg.model.dtype, bucket_bytes)
        self.residency.require_loaded("gathering the weights")
        if not self.ranks.gather(needs_base)[0]:
            return AdapterSource(self._whole_adapters(), bucket_bytes=bucket_bytes)
        adapters = [SourceEntry(name, shape, "float32") for name, shape in self._adapter_shapes.items()]
        entries = [*self._entries(self.cfg.model.dtype), *adapters]
        return GatheredSource(entries, self._published_slices(), self.gathering, self.ranks, bucket_bytes=bucket_bytes)

    def _entries(self, dtype: str) -> list[SourceEntry]:
        """Return the entries of the weights without adapters."""
        tensors = self._whole_shapes()
        return [
            SourceEntry(name, tensors[tied or name].shape, wire_dtype(tensors[tied or name].like, dtype), tied)
            for name, tied in self.sync_names
        ]

    @cached_property
    def _adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the policy's whole adapters by name."""
        tensors = self._whole_shapes().items()
        return {name: tensor.shape for name, tensor in tensors if is_adapter_name(name) and not is_critic_name(name)}

    def _whole_adapters(self) -> dict[str, Tensor]:
        """Return the policy's adapters by name, float32; each rank gets whole ones. Collective."""
        return lora.whole_adapters(self._adapter_shapes, self._written_adapters(), self.ranks)

    def _adapter_files(self) -> dict[str, bytes]:
        """Return the files of the adapters for an export, by relative path; none without adapters. Collective."""
        adapters = self.cfg.model.lora
        return {} if adapters is None else lora.folder_files(self._whole_adapters(), adapters, base=self.cfg.model.path)
