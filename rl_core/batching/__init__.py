"""Batching: which tokens share a pass, which rows share a rank, and how records become tensors (algorithms.md 9).

Pure functions: no process group, clock or global state. A number that must be agreed over ranks is agreed by a callable
argument. Public names are fetched on first use, so that the length arithmetic needs no torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "packing": (
        "PackedRows",
        "pack_lengths",
        "pack_rows",
        "pack_values",
        "padding_multiple",
        "padding_waste",
        "unpack_rows",
    ),
    "balance": (
        "inverse_permutation",
        "karmarkar_karp",
        "load_ratio",
        "longest_first",
        "sequence_costs",
        "split_evenly",
    ),
    "microbatch": ("fixed_microbatches", "plan_microbatches"),
    "collate": ("TrainingBatch", "collate_groups"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
