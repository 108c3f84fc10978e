"""The rows of a training step on one rank, and their way to the rank that trains them.

Legend: B rows held here, S padded width, N tokens of rows laid end to end.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.actors.ranks import Ranks

INTEGER_COLUMNS = ("input_ids", "loss_mask")
FLOAT_COLUMNS = ("old_log_probs", "advantages", "weights", "ref_log_probs")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """What the loss needs of each row, on the CPU."""

    numbers: list[int]
    """[B] numbers of the rows in the whole step, equal on all ranks whatever arrived where."""
    lengths: list[int]
    """[B] real tokens."""
    columns: dict[str, Tensor]
    """[B, S]: input_ids int64, loss_mask bool, old_log_probs, advantages and, where used, weights, ref_log_probs float32."""

    def take(self, indices: Sequence[int]) -> "StepRows":
        """Return the rows at `indices` of this rank, in that order, no wider than the longest."""
        lengths = [self.lengths[index] for index in indices]
        width = max(lengths, default=1)
        chosen = torch.tensor(list(indices), dtype=torch.int64)
        return StepRows(
            numbers=[self.numbers[index] for index in indices],
            lengths=lengths,
            columns={name: column[:, :width].index_select(0, chosen) for name, column in self.columns.items()},
        )

    @classmethod
    def masked_row(cls, like: "StepRows") -> "StepRows":
        """Return one row of one token that trains nothing: what a rank runs while others have a micro-batch and it has none."""
        columns = {name: torch.zeros(1, 1, dtype=column.dtype) for name, column in like.columns.items()}
        return cls(numbers=[-1], lengths=[1], columns=columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLayout:
    """All rows of the step over all ranks, in an order that does not depend on arrival."""

    lengths: list[int]
    """Length of each row by number."""
    owner: list[int]
    """Rank that received each row."""


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key under which group "0-9" comes before "0-10"."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]


def lay_out(
    ranks: Ranks, group_texts: Sequence[str], row_groups: Sequence[int], lengths: Sequence[int]
) -> tuple[StepLayout, list[int]]:
    """Return the layout of the step and the numbers of this rank's rows; collective.

    `row_groups` [B]: index into `group_texts` of each row. Rows of a group keep their order; groups are ordered by name.
    """
    held = ranks.gather([[group_texts[group] for group in row_groups], list(lengths)])
    rows = [
        (natural_key(text), rank, index, length)
        for rank, (texts, row_lengths) in enumerate(held)
        for index, (text, length) in enumerate(zip(texts, row_lengths, strict=True))
    ]
    rows.sort(key=lambda row: row[:3])
    own = {index: number for number, (_, rank, index, _) in enumerate(rows) if rank == ranks.rank}
    layout = StepLayout(lengths=[row[3] for row in rows], owner=[row[1] for row in rows])
    return layout, [own[index] for index in range(len(own))]


def move_rows(ranks: Ranks, rows: StepRows, destination: Sequence[int]) -> StepRows:
    """Return the rows whose `destination` (rank by row number) is this rank, by ascending number; collective.

    Raises RuntimeError when what arrives is not exactly what was planned.
    """
    if ranks.size == 1:
        return _ascending(rows)
    order = sorted(range(len(rows.numbers)), key=lambda index: (destination[rows.numbers[index]], rows.numbers[index]))
    going = [[index for index in order if destination[rows.numbers[index]] == rank] for rank in range(ranks.size)]
    row_counts = [len(part) for part in going]
    token_counts = [sum(rows.lengths[index] for index in part) for part in going]
    heads = torch.tensor([[rows.numbers[i], rows.lengths[i]] for i in order], dtype=torch.int64).view(-1, 2)
    arrived = ranks.exchange(heads, row_counts)
    integers, floats = (
        ranks.exchange(_flat(rows, order, names), token_counts) for names in (INTEGER_COLUMNS, _floats(rows))
    )
    received = _unflat(arrived, integers, floats, _floats(rows))
    expected = sorted(number for number, rank in enumerate(destination) if rank == ranks.rank)
    if sorted(received.numbers) != expected:
        raise RuntimeError(f"rows {expected} were planned for rank {ranks.rank}, got {received.numbers}; this is a bug")
    return _ascending(received)


def _ascending(rows: StepRows) -> StepRows:
    order = sorted(range(len(rows.numbers)), key=rows.numbers.__getitem__)
    return rows if order == list(range(len(order))) else rows.take(order)


def _floats(rows: StepRows) -> tuple[str, ...]:
    return tuple(name for name in FLOAT_COLUMNS if name in rows.columns)


def _flat(rows: StepRows, order: Sequence[int], names: Sequence[str]) -> Tensor:
    """Return [N, columns]: the real tokens of the rows in `order`, without padding."""
    chosen = torch.tensor(order, dtype=torch.int64)
    real_BS = _real(torch.tensor(rows.lengths, dtype=torch.int64)[chosen], rows.columns["input_ids"].shape[1])
    dtype = torch.int64 if names == INTEGER_COLUMNS else torch.float32
    return torch.stack([rows.columns[name].index_select(0, chosen)[real_BS].to(dtype) for name in names], dim=1)


def _unflat(heads: Tensor, integers: Tensor, floats: Tensor, float_names: Sequence[str]) -> StepRows:
    lengths = heads[:, 1]
    width = int(lengths.max()) if len(lengths) else 1
    real_BS = _real(lengths, width)

    def column(values: Tensor) -> Tensor:
        padded = values.new_zeros(real_BS.shape)
        padded[real_BS] = values
        return padded

    columns = {name: column(integers[:, i]) for i, name in enumerate(INTEGER_COLUMNS)}
    columns["loss_mask"] = columns["loss_mask"].bool()
    columns |= {name: column(floats[:, i]) for i, name in enumerate(float_names)}
    return StepRows(numbers=heads[:, 0].tolist(), lengths=lengths.tolist(), columns=columns)


def _real(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width) < lengths[:, None]
