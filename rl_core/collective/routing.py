"""Division of a batch between two groups of unequal size: which rows go from which rank to which. Pure functions.

Each of S source ranks has the same number of consecutive rows of a batch, in the order of ranks. Each of D destination ranks gets the same
number of consecutive rows.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.plan.routing import routes

Route = list[tuple[int, int]]
"""[(rank of the other side, rows)], in row order."""


def get_dst_ranks(batch: int, sources: int, destinations: int, src: int) -> Route:
    """Return where the rows of source `src` go. Raises ValueError when `batch` rows cannot be divided equally on both sides."""
    _check(batch, sources, destinations, src=src)
    all_routes = routes(batch // sources, env_workers=sources, rollouts=destinations)
    return [(route.rollout, route.size) for route in all_routes if route.env == src]


def get_src_ranks(batch: int, sources: int, destinations: int, dst: int) -> Route:
    """Return where the rows of destination `dst` come from. It is the inverse of `get_dst_ranks`, and raises the same errors."""
    _check(batch, sources, destinations, dst=dst)
    all_routes = routes(batch // sources, env_workers=sources, rollouts=destinations)
    return [(route.env, route.size) for route in all_routes if route.rollout == dst]


def _check(batch: int, sources: int, destinations: int, *, src: int = 0, dst: int = 0) -> None:
    if sources <= 0 or destinations <= 0 or batch <= 0 or batch % sources or batch % destinations:
        raise ValueError(
            f"the rows of a batch must be divisible by both numbers of ranks, got {batch} rows, {sources} and {destinations} ranks; "
            "pad or drop rows"
        )
    for name, rank, ranks in (("src", src, sources), ("dst", dst, destinations)):
        if not 0 <= rank < ranks:
            raise ValueError(f"{name} must be in [0, {ranks}), got {rank}")


def split_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Return `batch` divided along its rows into parts of `sizes`.

    `batch` is a tensor or array (dimension 0), a list or tuple of rows, or a mapping of these, which may be nested. Tensors and arrays of the
    parts are views. Raises ValueError with the key that does not have sum(sizes) rows.
    """
    if any(size < 0 for size in sizes):
        raise ValueError(f"sizes must be 0 or more rows, got {list(sizes)}")
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)

    def cut(value: Any, start: int, stop: int, key: str) -> Any:
        if isinstance(value, Mapping):
            return {name: cut(part, start, stop, f"{key}.{name}".strip(".")) for name, part in value.items()}
        rows = _rows(value, key)
        if rows != bounds[-1]:
            raise ValueError(f"{key or 'batch'} must have {bounds[-1]} rows to be split, got {rows}")
        return value[start:stop]

    return [cut(batch, start, stop, "") for start, stop in itertools.pairwise(bounds)]


def merge_batches(batches: Sequence[Any], sizes: Sequence[int] | None = None) -> Any:
    """Return the rows of `batches` one after the other. It is the inverse of `split_batch`.

    `sizes` is the expected number of rows of each part; None takes that of its first key. Raises ValueError with key, source, expected and
    found rows, or with the keys that differ.
    """
    if not batches:
        raise ValueError("batches must hold at least one part, got none")
    if sizes is not None and len(sizes) != len(batches):
        raise ValueError(f"sizes must name one size per part, got {len(sizes)} for {len(batches)} parts")
    return _merge(list(batches), sizes or [row_count(part) for part in batches], "")


def row_count(value: Any, key: str = "") -> int | None:
    """Return the number of rows of the first tensor, array or list in `value`, or None for a mapping that holds none.

    `key` is the place of `value` in the batch, for the text of a ValueError.
    """
    if not isinstance(value, Mapping):
        return _rows(value, key)
    counts = (row_count(part, f"{key}.{name}".strip(".")) for name, part in value.items())
    return next((rows for rows in counts if rows is not None), None)


def _merge(parts: list[Any], sizes: Sequence[int | None], key: str) -> Any:
    first = parts[0]
    if isinstance(first, Mapping):
        for source, part in enumerate(parts):
            if not isinstance(part, Mapping) or part.keys() != first.keys():
                raise ValueError(
                    f"{key or 'batch'} from source {source} must have the keys {sorted(first)}, got {part!r:.80}"
                )
        return {name: _merge([part[name] for part in parts], sizes, f"{key}.{name}".strip(".")) for name in first}
    for source, part in enumerate(parts):
        rows = _rows(part, key)
        if rows != sizes[source]:
            raise ValueError(f"{key or 'batch'} from source {source} must have {sizes[source]} rows, got {rows}")
    return _joiner(first)(parts)


def _rows(value: Any, key: str) -> int:
    if isinstance(value, (list, tuple)):
        return len(value)
    shape = getattr(value, "shape", None)
    if not shape:
        raise ValueError(f"{key or 'batch'} must have rows (tensor, array or list), got {type(value).__name__}")
    return int(shape[0])


def _joiner(value: Any) -> Any:
    if isinstance(value, list):
        return lambda parts: [row for part in parts for row in part]
    if isinstance(value, tuple):
        return lambda parts: tuple(row for part in parts for row in part)
    if type(value).__module__.startswith("numpy"):
        import numpy as np

        return np.concatenate
    import torch

    return torch.cat
