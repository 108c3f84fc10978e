"""Packed rows: the real tokens of several rows in one, without padding between them.

Legend: B rows, S columns of the padded layout, R chosen rows, L packed tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    """Rows laid end to end, with what attention needs to keep them apart."""

    input_ids: Tensor
    """[1, L]; 0 on padding."""
    position_ids: Tensor
    """[1, L] int64: from 0 in each row and on over its padding."""
    cu_seqlens: Tensor
    """[R + 1] int32, cumulative *padded* lengths."""
    lengths: Tensor
    """[R] int64, real tokens."""
    padded_lengths: list[int]
    """[R] tokens with each row's own padding."""
    max_length: int
    """Real tokens of the longest row."""
    rows: list[int]
    """[R] the chosen rows of the padded layout, in packed order."""
    source: Tensor
    """[L] int64 index into the flattened [B * S] layout; -1 on padding."""
    shape: tuple[int, int]
    """(B, S) of the layout that was packed."""


def pack_rows(
    input_ids: Tensor,
    lengths: Sequence[int] | Tensor,
    *,
    rows: Sequence[int] | None = None,
    multiple: int = 1,
) -> PackedRows:
    """Return the first `lengths[r]` tokens of each chosen row of `input_ids` [B, S], laid end to end.

    `rows` None = all. Each row is padded to `multiple`.
    Raises ValueError when a shape or row is wrong, or a length is outside [1, S].
    """
    if input_ids.dim() != 2 or len(lengths) != input_ids.shape[0]:
        raise ValueError(
            f"lengths must hold one entry per row of input_ids {tuple(input_ids.shape)}, got {len(lengths)}"
        )
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1, got {multiple}")
    height, width = input_ids.shape
    device = input_ids.device
    row_numbers = list(range(height)) if rows is None else [int(row) for row in rows]
    all_lengths = [int(length) for length in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
    for row in row_numbers:
        if not 0 <= row < height:
            raise ValueError(f"rows must be in [0, {height - 1}], got {row}")
        if not 1 <= all_lengths[row] <= width:
            raise ValueError(f"lengths[{row}] must be in [1, width {width}], got {all_lengths[row]}")
    real = [all_lengths[row] for row in row_numbers]
    padded = [length + -length % multiple for length in real]
    starts = torch.tensor([0, *padded], dtype=torch.int64).cumsum(0)
    size = int(starts[-1])
    segment = torch.repeat_interleave(torch.arange(len(padded)), torch.tensor(padded, dtype=torch.int64))
    position = torch.arange(size) - starts[segment]
    origin = torch.tensor([*row_numbers, 0], dtype=torch.int64) * width
    limit = torch.tensor([*real, 0], dtype=torch.int64)
    source = torch.where(position < limit[segment], origin[segment] + position, -1).to(device)
    flat = input_ids.reshape(-1)
    packed = torch.where(source >= 0, flat[source.clamp(min=0)], 0) if size else flat[:0]
    return PackedRows(
        input_ids=packed[None],
        position_ids=position.to(device)[None],
        cu_seqlens=starts.to(device=device, dtype=torch.int32),
        lengths=torch.tensor(real, dtype=torch.int64, device=device),
        padded_lengths=padded,
        max_length=max(real, default=0),
        rows=row_numbers,
        source=source,
        shape=(height, width),
    )


def pack_values(values: Tensor, packed: PackedRows) -> Tensor:
    """Return per-token `values` [B, S, ...] in the layout of `packed`, [1, L, ...]; 0 (False) on padding. Differentiable.

    Raises ValueError when `values` has another [B, S] than the packed ids had.
    """
    if tuple(values.shape[:2]) != packed.shape:
        raise ValueError(
            f"values must have the shape of the packed input_ids {packed.shape}, got {tuple(values.shape)}"
        )
    return _gather(values.reshape(-1, *values.shape[2:]), packed.source)[None]


def unpack_rows(values: Tensor, packed: PackedRows, *, width: int) -> Tensor:
    """Return packed per-token `values` [1, L, ...] as [R, width, ...] in the order of `packed.rows`; zeros elsewhere.

    Differentiable; values on padding are dropped, NaN included, and get zero gradient.
    Raises ValueError when `values` is not of length L or `width` is below the longest row.
    """
    size = packed.source.shape[0]
    if values.dim() < 2 or tuple(values.shape[:2]) != (1, size):
        raise ValueError(f"values must have shape (1, {size}, ...), got {tuple(values.shape)}")
    if width < packed.max_length:
        raise ValueError(f"width must hold the longest packed row of {packed.max_length} tokens, got {width}")
    count = len(packed.rows)
    column = torch.arange(width, device=values.device).expand(count, width)
    starts = packed.cu_seqlens[:count].to(torch.int64)
    index = torch.where(column < packed.lengths[:, None], starts[:, None] + column, -1).reshape(-1)
    return _gather(values[0], index).reshape(count, width, *values.shape[2:])


def _gather(flat: Tensor, index: Tensor) -> Tensor:
    """Return flat[index], zeros where index is -1 (also for NaN and without gradient there)."""
    if not flat.shape[0]:
        return flat.new_zeros(index.shape[0], *flat.shape[1:])
    is_real = (index >= 0).reshape(-1, *[1] * (flat.dim() - 1))
    return torch.where(is_real, flat[index.clamp(min=0)], flat.new_zeros(()))
