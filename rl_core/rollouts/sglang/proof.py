"""`GivenTensors`: compares what the ranks of an engine hold with the tensors that they were given, by checksums of pieces (`child.layout`)."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from math import prod

from torch import Tensor

from rl_core.api.errors import InfrastructureError
from rl_core.weights import checksums
from rl_core.weights.checksums import Checksum
from rl_core.weights.manifest import WeightManifest, checksum

PROOF_VARIABLE, CONTENT = "WEIGHTS_PROOF", "content"
"""Environment variable of a rollout, and its value with which the engine's parameters are not compared."""


class GivenTensors:
    """Checksums of the tensors of one update, added while they are loaded."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[int, Checksum]] = {}
        """Name -> (elements, checksum)."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor by its Hugging Face name."""
        self._sums[name] = (tensor.numel(), checksum(tensor))

    def add_manifest(self, manifest: WeightManifest, wanted: Container[str]) -> None:
        """Add the tensors of `manifest` whose names are in `wanted`, with the manifest's checksums; nothing is read."""
        entries = (entry for entry in manifest.entries if entry.name in wanted)
        self._sums.update((entry.name, (prod(entry.shape), entry.checksum)) for entry in entries)

    def prove(self, ranks: Sequence[Mapping[str, str]], *, whole: bool) -> list[str]:
        """Compare what the ranks hold with the tensors that were added. Raises InfrastructureError when a value differs.

        Args:
            ranks: For each rank, the checksums of the pieces in its parameters, as `LoadedLayout.checksums` returns them.
            whole: Whether `ranks` covers every tensor that the engine has loaded, and not only a share of them.

        Returns the names of the added tensors of which the ranks hold no piece, because the engine's loader converts or skips them; always
        empty unless `whole`.
        """
        merged, differing = _merged(ranks)
        mismatched = sorted(
            differing | {name for name in merged.keys() & self._sums.keys() if merged[name] != self._sums[name]}
        )
        stale = sorted(merged.keys() - self._sums.keys())
        if mismatched or stale:
            raise InfrastructureError(
                f"the engine's tensors must hold the weights they were given, got {len(merged)} of which {len(mismatched)} hold something else "
                f"{mismatched[:3]} and {len(stale)} were not given {stale[:3]}; the version is not served. Where the engine rearranges its weights "
                f"after loading, set {PROOF_VARIABLE}={CONTENT} in rollout.env, to rely on the content check"
            )
        return sorted(self._sums.keys() - merged.keys()) if whole else []


def _merged(ranks: Sequence[Mapping[str, str]]) -> tuple[dict[str, tuple[int, Checksum]], set[str]]:
    """Return (name -> (elements, checksum) over all ranks, names of tensors of which two ranks hold the same piece differently)."""
    piece_sums: dict[str, str] = {}
    differing = set()
    for rank in ranks:
        for key, value in rank.items():
            if piece_sums.setdefault(key, value) != value:
                differing.add(key.split(" ", 1)[0])
    merged: dict[str, tuple[int, Checksum]] = {}
    for key, value in piece_sums.items():
        count, first, second = map(int, value.split())
        name = key.split(" ", 1)[0]
        elements, sums = merged.get(name, (0, (0, 0)))
        merged[name] = (elements + count, checksums.add(sums, (first, second)))
    return merged, differing
