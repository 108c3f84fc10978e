"""Writes model folders from a checkpoint, without a trainer: the model or policy, or adapters as `peft` loads them."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from rl_core.actors import export, hf, lora
from rl_core.actors.checkpoint import Counters
from rl_core.actors.slices import LocalSlice
from rl_core.api.embodied import is_embodied
from rl_core.api.job import RLJobSpec
from rl_core.api.lora import LoraSpec
from rl_core.checkpoint.files import write_file
from rl_core.checkpoint.tensors import read_shards
from rl_core.policies.folder import load_policy
from rl_core.weights.manifest import is_adapter_name, wire_dtype


class CheckpointExport:
    """The model in a checkpoint: a language model, or a policy that acts in simulators. It writes, byte for byte, what `export_hf` of a trainer
    in that state writes.
    """

    def __init__(self, checkpoint: Path, spec: RLJobSpec) -> None:
        """Read the counters of `checkpoint`, whose job has the `spec`.

        Raises ConfigError for a folder at `model.path` that is no model, DataError when the checkpoint is of other adapters or of another
        base.
        """
        self._folder, self._spec, self._path = checkpoint / "model", spec, spec.model.path
        settings = spec.model.lora
        identity = None if settings is None else lora.identity(settings, base=hf.weights_digest(self._path))
        lora.check_same_adapters(Counters.read(checkpoint).lora, identity, base=self._path)
        self._model = (
            load_policy(self._path)
            if is_embodied(spec)
            else hf.build_model(hf.read_config(self._path), dtype=torch.float32)
        )
        self._aliases = hf.tied_names(self._model)
        if settings is not None:
            lora.attach_adapters(self._model, settings)
        self._stored = hf.stored_tensors(self._model)

    def write_adapters(self, target: Path) -> None:
        """Write the folder of the adapters at `target`. Raises DataError for tensors that are absent or of another shape."""
        settings = self._spec.model.lora
        assert settings is not None, "only a job with adapters has any to export"
        with export.staged(target, "the exported adapters") as staging:
            for name, data in lora.folder_files(self._adapters, settings, base=self._path).items():
                write_file(staging / Path(name).name, data)

    def write_model(self, target: Path) -> None:
        """Write the model folder at `target`, adapters merged and not in a folder of their own.

        Raises DataError for tensors that are absent or of another shape.
        """
        if self._spec.model.lora is None:
            names = list(self._stored)
            tensors: Iterator[tuple[str, Tensor]] = ((name, self._read([name])[name]) for name in names)
        else:
            names = [name for name, _, _ in hf.stored_readers(self._stored, self._model, self._path, self._aliases)]
            tensors = self._merged(self._spec.model.lora)
        plans = [
            export.TensorPlan(name=name, shape=tuple(self._stored[name].shape), dtype=self._dtype(name))
            for name in names
        ]
        export.export_folder(target, source=self._path, plans=plans, tensors=tensors)

    def _merged(self, settings: LoraSpec) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged tensors of the model, one at a time."""
        for name, stored, _ in hf.stored_readers(self._stored, self._model, self._path, self._aliases):
            # The weight is rounded before adapters are added, because the trainer rounds frozen weights too.
            weight = torch.empty_like(self._stored[name], device="cpu", dtype=self._dtype(name)).copy_(stored[:])
            (merged,) = lora.MergedSlices({name: [LocalSlice.of_whole(weight)]}, self._adapters, settings.scale)[name]
            yield name, merged.tensor

    def _dtype(self, name: str) -> torch.dtype:
        """Return the type in which the tensor `name` is exported."""
        dtype: torch.dtype = getattr(torch, wire_dtype(self._stored[name], self._spec.model.dtype))
        return dtype

    @cached_property
    def _adapters(self) -> dict[str, Tensor]:
        return self._read([name for name in self._stored if is_adapter_name(name)])

    def _read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return whole tensors of the checkpoint, by name."""
        tensors = {name: torch.empty_like(self._stored[name], device="cpu") for name in names}
        boxes = {name: [(tensor, (0,) * tensor.dim(), tuple(tensor.shape))] for name, tensor in tensors.items()}
        read_shards(self._folder, boxes)
        return tensors
