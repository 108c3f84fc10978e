"""`ExpectedChecksums`: the checksums that the engine's tensors must have after a weight update.

SGLang fuses query, key and value into one matrix, and gate and up into another, and pads the vocabulary. Its checksum of a tensor in
host memory is the first 8 bytes of the SHA-256 of its data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_core.api.errors import InfrastructureError

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
VOCABULARY = frozenset({"model.embed_tokens.weight", "lm_head.weight"})
PADDING = 64
"""The engine pads the vocabulary with zero rows to a multiple of this."""


class ExpectedChecksums:
    """The checksums of one update by the engine's tensor names, computed while the tensors are loaded."""

    def __init__(self) -> None:
        self._sums: dict[str, str] = {}
        self._parts: dict[str, dict[str, Tensor]] = {}
        """Copies of the parts of fused tensors of which a part is missing."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor by its Hugging Face name."""
        base, _, kind = name.rpartition(".")
        owner, _, part = base.rpartition(".")
        if part not in FUSED:
            self._sums[name] = checksum(_padded(tensor) if name in VOCABULARY else tensor)
            return
        fused = f"{owner}.{FUSED[part]}.{kind}"
        parts = self._parts.setdefault(fused, {})
        parts[part] = tensor.clone()
        if len(parts) == len(PARTS[FUSED[part]]):
            ordered = [parts[name] for name in PARTS[FUSED[part]]]
            self._sums[fused] = checksum(torch.cat(ordered))
            del self._parts[fused]

    def compare(self, actual: Mapping[str, str]) -> None:
        """Raise InfrastructureError unless `actual`, the engine's checksums by name, are exactly the expected ones."""
        wrong = sorted(name for name in self._sums.keys() & actual.keys() if self._sums[name] != actual[name])
        stale = sorted(actual.keys() - self._sums.keys())
        lacking = sorted((self._sums.keys() | self._parts.keys()) - actual.keys())
        if wrong or stale or lacking:
            raise InfrastructureError(
                f"the engine's tensors must hold the weights they were given, got {len(actual)} of which {len(wrong)} hold something else "
                f"{wrong[:3]} and {len(stale)} were not given {stale[:3]}; {len(lacking)} are missing {lacking[:3]}"
            )


def checksum(tensor: Tensor) -> str:
    """Return the engine's checksum of a tensor in host memory."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(data)).digest()[:8].hex()


def _padded(tensor: Tensor) -> Tensor:
    missing = -tensor.shape[0] % PADDING
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor
