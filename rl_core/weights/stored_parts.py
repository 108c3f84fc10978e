"""`StoredPart`: maps the tensors of a model folder to parameters of the model, for models in which the two differ.

transformers keeps all experts of a layer in one parameter, but a model folder has one tensor per expert; some modules have other names in
the folder. Trainers and engines exchange weights by the names and tensors of the folder, which SGLang's loader reads too. The mapping is
found by having transformers convert a small model with known values as it does when it saves a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_core.api.errors import ConfigError

_PROBE = 4
"""Size to which `stored_parts` reduces the dimensions of a parameter, except the first, if it divides them."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A tensor of a model folder that is a rectangular part of a parameter."""

    parameter: str
    """Name of the parameter in the model."""
    box: tuple[tuple[int, int], ...]
    """Half-open interval of the parameter in each of its dimensions."""
    kept: tuple[int, ...]
    """Dimensions of the parameter that the stored tensor has. The others have one element in `box`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stored tensor."""
        return tuple(self.box[dim][1] - self.box[dim][0] for dim in self.kept)

    def view(self, parameter: Tensor) -> Tensor:
        """Return the part of `parameter`, sharing memory."""
        return parameter[tuple(slice(*interval) for interval in self.box)].view(self.shape)


def stored_parts(model: Any) -> dict[str, StoredPart]:
    """Return name in the folder -> part of a parameter, for each tensor of the folder that is not a whole parameter of the same name.

    `model` is a transformers model that is not wrapped, on any device; it may have further submodules. Raises ConfigError for a parameter
    that a folder does not have as rectangular parts.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    if not get_model_conversion_mapping(model, add_legacy=False):
        return {}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    # Each element of a probe is its own index, so that the results show what was taken from where. They are small, and cut in the same
    # proportions as the parameters.
    sizes = {
        name: (*shape[:1], *(_PROBE if size % _PROBE == 0 else size for size in shape[1:]))
        for name, shape in shapes.items()
    }
    starts: dict[str, int] = {}
    end = 0
    for name, size in sizes.items():
        starts[name] = end
        end += torch.Size(size).numel()
    names = list(starts)
    bounds = torch.tensor([*starts.values(), end])
    probes = {name: torch.arange(starts[name], bounds[i + 1]).view(sizes[name]) for i, name in enumerate(names)}
    parts: dict[str, StoredPart] = {}
    covered = dict.fromkeys(names, 0)
    for stored, values in revert_weight_conversion(model, dict(probes)).items():
        owner = names[int(torch.bucketize(values.reshape(-1)[0], bounds, right=True)) - 1]
        covered[owner] += values.numel()
        box = _box(probes[owner], values, starts[owner])
        if box is None:
            raise ConfigError(
                f"a model folder must have rectangular parts of each parameter, got {stored}, which {type(model).__name__} makes of {owner} in "
                "another way; choose another model"
            )
        scale = [full_size // size for full_size, size in zip(shapes[owner], sizes[owner], strict=True)]
        dims = _stored_dims(tuple(stop - start for start, stop in box), tuple(values.shape))
        part = StoredPart(
            owner,
            tuple((start * factor, stop * factor) for (start, stop), factor in zip(box, scale, strict=True)),
            dims,
        )
        if stored != owner or part.shape != shapes[owner]:
            parts[stored] = part
    if incomplete := [name for name, count in covered.items() if count != probes[name].numel()]:
        raise ConfigError(
            f"a model folder must have all of each parameter, {type(model).__name__} leaves out parts of {incomplete}"
        )
    return parts


def _box(probe: Tensor, values: Tensor, start: int) -> tuple[tuple[int, int], ...] | None:
    """Return the box of `probe` that equals `values`, as one interval per dimension; None if there is none in this order.

    The elements of both are consecutive indices, of which that of the first element of `probe` is `start`.
    """
    index = torch.stack(torch.unravel_index(values.reshape(-1) - start, probe.shape))
    box = tuple((int(low), int(high) + 1) for low, high in zip(index.amin(1), index.amax(1), strict=True))
    part = probe[tuple(slice(*interval) for interval in box)]
    squeezed = [size for size in part.shape if size != 1]
    is_equal = squeezed == [size for size in values.shape if size != 1] and torch.equal(
        part.reshape(-1), values.reshape(-1)
    )
    return box if is_equal else None


def _stored_dims(sizes: tuple[int, ...], stored: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dimensions of a part with shape `sizes` that the stored tensor, of shape `stored`, has too.

    These are all dimensions, or those with more than one element.
    """
    return tuple(range(len(sizes))) if len(sizes) == len(stored) else tuple(i for i, n in enumerate(sizes) if n != 1)


def in_folder(names: Iterable[str], parts: Mapping[str, StoredPart]) -> list[str]:
    """Return the names that the parameters and buffers `names` have in the folder, in the same order."""
    stored_names: dict[str, list[str]] = {}
    for stored, part in parts.items():
        stored_names.setdefault(part.parameter, []).append(stored)
    return [stored for name in names for stored in stored_names.get(name, [name])]


def views(tensors: Mapping[str, Tensor], parts: Mapping[str, StoredPart]) -> dict[str, Tensor]:
    """Return the tensors of the folder by name, sharing memory with the whole parameters and buffers `tensors`."""
    names = in_folder(tensors, parts)
    return {
        name: parts[name].view(tensors[parts[name].parameter]) if name in parts else tensors[name] for name in names
    }
