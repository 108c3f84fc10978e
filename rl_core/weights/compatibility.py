"""Checks whether an offered version fits the model of a receiver, before anything is paused or transferred."""

from collections.abc import Mapping
from typing import Any

from rl_core.weights.manifest import WeightManifest


def incompatibility(manifest: WeightManifest, expected: Mapping[str, Any]) -> str:
    """Return why `manifest` does not fit a model with tensors `expected` (name -> shape, or (shape, dtype)); "" if it fits."""
    offered = {entry.name: entry for entry in manifest.entries}
    problems = [f"missing {name}" for name in expected if name not in offered]
    sent_names = {entry.alias_of or entry.name for entry in manifest.entries if entry.name in expected}
    for entry in manifest.entries:
        expectation = expected.get(entry.name)
        if expectation is None:
            if entry.alias_of is None and entry.name not in sent_names:
                problems.append(f"unknown {entry.name}")
            continue
        shape, dtype = shape_and_dtype(expectation)
        dtype = dtype or entry.dtype
        if (tuple(shape), dtype) != (entry.shape, entry.dtype):
            problems.append(f"{entry.name} must be {dtype} {list(shape)}, got {entry.dtype} {list(entry.shape)}")
    more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
    return f"weights do not fit the model: {'; '.join(problems[:5])}{more}" if problems else ""


def shape_and_dtype(expectation: Any) -> tuple[tuple[int, ...], str | None]:
    """Return (shape, dtype) of a tensor of a target, which may give the shape alone; the dtype is None then."""
    return expectation if len(expectation) == 2 and isinstance(expectation[1], str) else (expectation, None)
