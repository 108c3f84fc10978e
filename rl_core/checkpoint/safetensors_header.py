"""The header of a safetensors file, for writers that stream tensors into the file.

The writer of the safetensors library needs all tensors in memory at once and copies them, so checkpoints and exports write the file
themselves. Format: https://github.com/huggingface/safetensors#format
"""

import json
from collections.abc import Iterable, Mapping

import torch

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Type of a tensor -> its name in the header."""
ALIGNMENT = 8
"""The length of a header is a multiple of this many bytes."""


def header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], *, metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the bytes before the first tensor: the length of the JSON header as little-endian uint64, then the header.

    `tensors`: (name, dtype, shape) in the order in which the tensors follow in the file, without gaps. `metadata`: further entries of
    `__metadata__`, beside `format: pt`.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    start = 0
    for name, dtype, shape in tensors:
        end = start + dtype.itemsize * torch.Size(shape).numel()
        entries[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
