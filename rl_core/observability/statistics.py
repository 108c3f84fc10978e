"""Statistics over the samples of a group and over groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

SUMMED = frozenset({"total_turns", "branches", "unspliced", "masked_rows", "failures"})
"""Last components of the names of counts, which are added over groups."""


def percentile(values: Sequence[float], p: float) -> float:
    """Return percentile `p` (0 to 100) of `values` without interpolation, or 0.0 for no values.

    It is the sorted value at index `min(int(len * p / 100), len - 1)`.
    """
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return float(ordered[min(int(len(ordered) * p / 100), len(ordered) - 1)])


def summarize(values: Sequence[float], n: int | None = None) -> dict[str, Any]:
    """Return mean (sum / n), max, min, median, stddev (of the sample, NaN for one value) and histogram (raw values).

    `n` is the divisor of the mean where it is not the number of values.
    """
    numbers = [float(value) for value in values]
    count = len(numbers) if n is None else n
    if not numbers:
        return {"mean": 0.0, "max": 0.0, "min": 0.0, "median": 0.0, "stddev": math.nan, "histogram": []}
    return {
        "mean": sum(numbers) / count if count else 0.0,
        "max": max(numbers),
        "min": min(numbers),
        "median": _median(numbers),
        "stddev": _stddev(numbers),
        "histogram": list(values),
    }


def _median(values: list[float]) -> float:
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _stddev(values: list[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def prefixed(name: str, values: Sequence[float], *, percentiles: Sequence[int] = ()) -> dict[str, Any]:
    """Return `summarize(values)` under keys such as `name/mean`, and the given percentiles under keys such as `name/p95`."""
    statistics = {f"{name}/{key}": value for key, value in summarize(values).items()}
    return statistics | {f"{name}/p{p}": percentile(values, p) for p in percentiles}


def aggregate_rollout_metrics(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the metrics of several groups into one mapping.

    The last component of a metric's name, or its prefix if there is no "/", selects the rule: the minimum for `min`; the maximum for `max`,
    or the mean if it is a rate; the sum for those of SUMMED; the mean without NaN for all others. Lists are concatenated and maps of counts
    are added. Of other values that are not numbers the last one is kept.
    """
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(key for group in groups for key in group):
        values = [group[name] for group in groups if name in group]
        numbers = [float(value) for value in values if isinstance(value, Real)]
        merged[name] = _reduce(name, numbers) if len(numbers) == len(values) else _join(values)
    return merged


def _reduce(name: str, values: list[float]) -> float:
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        return math.nan
    suffix = name.rsplit("/", 1)[-1]
    suffix = name.rsplit("/", 1)[-1]
    has_no_prefix = "/" not in name
    if suffix in SUMMED:
        return sum(numbers)
    if suffix == "min" or (has_no_prefix and suffix.startswith("min_")):
        return min(numbers)
    if not suffix.endswith("_rate") and (suffix == "max" or (has_no_prefix and suffix.startswith("max_"))):
        return max(numbers)
    return math.fsum(numbers) / len(numbers)


def _join(values: list[Any]) -> Any:
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    if all(isinstance(value, Mapping) for value in values):
        return add_counts(values)
    return values[-1]


def add_counts(maps: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Return the sum of the numbers of each key over all maps."""
    total: dict[Any, Any] = {}
    for counts in maps:
        for key, value in counts.items():
            total[key] = total.get(key, 0) + value
    return total
