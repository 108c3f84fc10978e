"""`Stat`: a metric as numerator and denominator, so that parts of a step add up to the whole step's value.

Every loss and advantage reports Stats; the actor merges them over micro-batches, then ranks, and forms ratios last.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rl_core.algorithms.arguments import require_choice
from rl_core.algorithms.masking import is_all_true, zero_outside

StatKind = Literal["mean", "std", "sum", "max", "min"]
_KINDS = ("mean", "std", "sum", "max", "min")
EXTREMES = ("max", "min")
"""Kinds that have no value without data."""


class Stat:
    """One metric. `float(stat)` returns its value. Immutable.

    `kind` is one of mean (total / count), std (sample deviation), sum, max and min. `total` and `count` are float64 0-d tensors without
    gradient. They are made from what was given when they are asked for: a training step only adds them up, as numbers.
    """

    __slots__ = ("_count", "_squares", "_total", "kind")
    kind: StatKind
    """mean = total / count; std = the sample deviation; sum, max and min = total."""

    def __init__(
        self, kind: StatKind, total: Tensor | float, count: Tensor | float, squares: Tensor | float | None = None
    ) -> None:
        """Raises ValueError for another kind. `squares` is the sum of the squared values, of kind std only."""
        require_choice("Stat.kind", kind, _KINDS)
        self.kind = kind
        self._total, self._count = _detached(total), _detached(count)
        self._squares = None if squares is None else _detached(squares)

    @property
    def total(self) -> Tensor:
        """Sum, largest or smallest of the values."""
        return _scalar(self._total, None)

    @property
    def count(self) -> Tensor:
        """How many values went in; a max or min of none is dropped when merged."""
        return _scalar(self._count, self._total.device if isinstance(self._total, Tensor) else None)

    def __float__(self) -> float:
        return _finish(self.kind, *(float(part) for part in self.parts()))

    def parts(self) -> list[Tensor | float]:
        """Return what another process rebuilds it from as `Stat(kind, *parts)`: total, count and, for std, squares."""
        return [self._total, self._count] if self._squares is None else [self._total, self._count, self._squares]


def merge_stats(parts: Iterable[Mapping[str, Stat]]) -> dict[str, Stat]:
    """Return the Stats of all `parts` together; a max or min without data is left out.

    Raises ValueError when one name has two kinds.
    """
    gathered: dict[str, list[Stat]] = {}
    for part in parts:
        for name, stat in part.items():
            gathered.setdefault(name, []).append(stat)
    numbers = iter(read_scalars([part for stats in gathered.values() for stat in stats for part in stat.parts()]))
    merged = {}
    for name, stats in gathered.items():
        kinds = {stat.kind for stat in stats}
        if len(kinds) > 1:
            raise ValueError(f"metric {name!r} must have one kind in all parts, got {', '.join(sorted(kinds))}")
        kind, width = stats[0].kind, len(stats[0].parts())
        stat_numbers = list(itertools.islice(numbers, width * len(stats)))
        totals, counts, *squares = (stat_numbers[part::width] for part in range(width))
        # NumPy's max and min return NaN if there is one, those of Python may not.
        total = float({"max": np.max, "min": np.min}.get(kind, sum)(totals))
        if any(counts) or kind not in EXTREMES:
            merged[name] = Stat(kind, total, sum(counts), *map(sum, squares))
    return merged


def finish_stats(stats: Mapping[str, Stat]) -> dict[str, float]:
    """Return the finished numbers by name, with one transfer per device; a max or min without data is left out."""
    return {
        name: _finish(kind, *parts)
        for name, (kind, *parts) in read_stats(stats).items()
        if parts[1] > 0 or kind not in EXTREMES
    }


def read_stats(stats: Mapping[str, Stat]) -> dict[str, tuple[Any, ...]]:
    """Return name -> (kind, total, count[, squares]) as numbers, with one transfer per device."""
    numbers = iter(read_scalars([part for stat in stats.values() for part in stat.parts()]))
    return {name: (stat.kind, *(next(numbers) for _ in stat.parts())) for name, stat in stats.items()}


def read_scalars(scalars: Sequence[Tensor | float]) -> list[float]:
    """Return 0-d tensors and numbers as numbers, with one transfer per device."""
    numbers = [0.0] * len(scalars)
    by_device: dict[torch.device, list[int]] = {}
    for index, scalar in enumerate(scalars):
        if not isinstance(scalar, Tensor):
            numbers[index] = float(scalar)
        elif scalar.is_cpu:
            numbers[index] = float(scalar.item())
        else:
            by_device.setdefault(scalar.device, []).append(index)
    for indices in by_device.values():
        stacked = torch.stack([torch.as_tensor(scalars[index], dtype=torch.float64) for index in indices])
        for index, number in zip(indices, stacked.tolist(), strict=True):
            numbers[index] = number
    return numbers


def mean_stat(values: Tensor, mask: Tensor, count: Tensor | None = None) -> Stat:
    """Return the mean of `values` where `mask`; `count` is the number of true entries, when it is known already."""
    total = zero_outside(mask, values.detach()).sum(dtype=torch.float64)
    return Stat("mean", total, mask.sum(dtype=torch.float64) if count is None else count)


def mean_stats(values: Mapping[str, Tensor], mask: Tensor, count: Tensor) -> dict[str, Stat]:
    """Return name -> `mean_stat` of each tensor, with fewer operations than one call each.

    All tensors have the shape of `mask`, and `count` is the number of its true entries.
    """
    if is_all_true(mask):
        return {name: Stat("mean", tensor.detach().sum(dtype=torch.float64), count) for name, tensor in values.items()}
    masked = zero_outside(mask, torch.stack([tensor.detach() for tensor in values.values()]))
    totals = masked.flatten(1).sum(dim=1, dtype=torch.float64).unbind()
    return {name: Stat("mean", total, count) for name, total in zip(values, totals, strict=True)}


def std_stat(values: Tensor, mask: Tensor, count: Tensor | None = None) -> Stat:
    """Return the sample deviation of `values` where `mask`, exact over any number of parts; 0 for a single value."""
    masked = torch.where(mask, values.detach(), 0).double()
    return Stat("std", masked.sum(), mask.sum() if count is None else count, masked.square().sum())


def sum_stat(total: Tensor | float) -> Stat:
    """Return a quantity that adds up over parts."""
    return Stat("sum", total, 1.0)


def extreme_stat(kind: Literal["max", "min"], values: Tensor, mask: Tensor, count: Tensor | None = None) -> Stat:
    """Return the largest or smallest of `values` where `mask`; without any, an infinity of count 0. `count` is as for `mean_stat`."""
    fill = float("-inf") if kind == "max" else float("inf")
    masked = torch.where(mask, values.detach(), fill)
    if not masked.numel():
        masked = masked.new_full((1,), fill)
    return Stat(kind, masked.max() if kind == "max" else masked.min(), mask.sum() if count is None else count)


def extreme_stats(
    values: Tensor,
    mask: Tensor,
    count: Tensor | None = None,
    *,
    prefix: str,
    kinds: tuple[Literal["max", "min"], ...] = ("max", "min"),
) -> dict[str, Stat]:
    """Return the Stats `{prefix}max` and `{prefix}min` of `values` where `mask` is true; `kinds` may select one of them.

    `count` is the number of true entries, if it is known already. If `mask` is true nowhere, the result is {} on a CPU. On another device it
    has Stats of count 0, which `merge_stats` and `finish_stats` leave out, because to read `mask` would wait for the device.
    """
    if mask.is_cpu and not mask.any():
        return {}
    if is_all_true(mask):
        lowest, highest = values.detach().aminmax()
        size = mask.numel()
        return {f"{prefix}{kind}": Stat(kind, highest if kind == "max" else lowest, size) for kind in kinds}
    return {f"{prefix}{kind}": extreme_stat(kind, values, mask, count) for kind in kinds}


def _detached(value: Tensor | float) -> Tensor | float:
    """Return `value` without gradient and dimensions."""
    if not isinstance(value, Tensor):
        return value
    if value.requires_grad:
        value = value.detach()
    return value.reshape(()) if value.dim() else value


def _scalar(value: Tensor | float, device: torch.device | None) -> Tensor:
    """Return `value` as a float64 tensor on `device`; None keeps the device of `value`."""
    if not isinstance(value, Tensor):
        # The device itself writes the number. A copy from the host would wait for all work that was queued before.
        return torch.full((), value, dtype=torch.float64, device=device)
    return value.to(device, torch.float64)


def _finish(kind: str, total: float, count: float, squares: float = 0.0) -> float:
    if kind == "mean":
        return total / count if count else 0.0
    if kind == "std":
        return math.sqrt(max(squares - total * total / max(count, 1.0), 0.0) / max(count - 1.0, 1.0))
    return total
