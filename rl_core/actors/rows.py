"""The rows of a training step on one rank, their columns, and their exchange between ranks.

Legend: B rows on this rank, S padded width, K candidates of a token, N tokens of the concatenated rows.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from rl_core.actors.ranks import Ranks
from rl_core.actors.transfer import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The per-token inputs of the loss, each [B, S] or [B, S, K]. A column that the step does not need is None.

    Raises ValueError when a column has another shape or dtype. `INTEGERS` and `FLOATS` name the columns that are sent between ranks as
    int64 and as float32.
    """

    input_ids: Tensor
    """int64 token ids."""
    loss_mask: Tensor
    """bool, true on tokens that train."""
    old_log_probs: Tensor | None = None
    """float32 log-probabilities under the policy before the update."""
    advantages: Tensor | None = None
    """float32."""
    weights: Tensor | None = None
    """float32 factors that correct for rollouts that sampled from a slightly different policy."""
    ref_log_probs: Tensor | None = None
    """float32 log-probabilities under the reference policy."""
    proximal_log_probs: Tensor | None = None
    """float32 log-probabilities under the policy before the update where the old ones are the rollout's (decoupled PPO)."""
    rollout_log_probs: Tensor | None = None
    """float32 log-probabilities that the engine gave, where the old ones are the trainer's."""
    ages: Tensor | None = None
    """float32 versions by which the policy that sampled a token is older than the one in training."""
    values: Tensor | None = None
    """float32 predictions of the critic before the update."""
    returns: Tensor | None = None
    """float32 targets of the critic."""
    candidates: Tensor | None = None
    """[B, S, K] int64 tokens that the teacher finds likeliest in the place of each token."""
    teacher_log_probs: Tensor | None = None
    """[B, S, K] float32 log-probabilities of the candidates under the teacher."""

    def __post_init__(self) -> None:
        for name, column in self.present().items():
            candidate_shape = () if name not in OF_CANDIDATES or self.candidates is None else self.candidates.shape[2:]
            shape = (*self.input_ids.shape, *candidate_shape)
            if column.shape != shape or column.dtype != COLUMN_DTYPES[name]:
                raise ValueError(
                    f"column {name} must be {COLUMN_DTYPES[name]} {list(shape)}, got {column.dtype} {list(column.shape)}"
                )

    def present(self) -> dict[str, Tensor]:
        """Return the columns that are not None, by name."""
        return {name: column for name in COLUMN_NAMES if (column := getattr(self, name)) is not None}

    def each(self, change: Callable[[Tensor], Tensor]) -> "Columns":
        """Return the columns with `change` applied to every one."""
        return Columns(**{name: change(column) for name, column in self.present().items()})

    def to(self, device: torch.device) -> "Columns":
        """Return the columns, which are on the CPU, on `device`."""
        return Columns(**to_device(self.present(), device))


COLUMN_NAMES = tuple(column.name for column in fields(Columns))
OF_CANDIDATES = ("candidates", "teacher_log_probs")
"""The columns with a dimension K."""
INTEGERS = ("input_ids", "loss_mask", "candidates")
FLOATS = tuple(name for name in COLUMN_NAMES if name not in INTEGERS)
COLUMN_DTYPES = {
    **dict.fromkeys(INTEGERS, torch.int64),
    "loss_mask": torch.bool,
    **dict.fromkeys(FLOATS, torch.float32),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """Rows to score or to train, on the CPU."""

    numbers: list[int]
    """[B] numbers of the rows within the whole step. They are the same on all ranks."""
    lengths: list[int]
    """[B] number of tokens of each row without padding."""
    columns: Columns
    """Their per-token values."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [B, ...]: what a policy that is no language model takes in place of tokens; empty for a language model."""

    def take(self, indices: Sequence[int]) -> "StepRows":
        """Return the rows at the positions `indices`, in that order. The columns are cut to the longest of these rows.

        The result is this object itself if nothing would change.
        """
        lengths = list(map(self.lengths.__getitem__, indices))
        width, present = max(lengths, default=1), self.columns.input_ids.shape[1]
        if width == present and len(indices) == len(self.numbers) and list(indices) == list(range(len(indices))):
            return self
        index_tensor = torch.from_numpy(np.array(indices, np.int64))
        return StepRows(
            numbers=list(map(self.numbers.__getitem__, indices)),
            lengths=lengths,
            columns=self.columns.each(
                lambda column: (column if width == present else column[:, :width]).index_select(0, index_tensor)
            ),
            inputs={name: tensor.index_select(0, index_tensor) for name, tensor in self.inputs.items()},
        )

    def masked_row(self) -> "StepRows":
        """Return one row in which no token trains. A rank without a micro-batch runs it while other ranks have one.

        It has one token. A row of a policy that is no language model has as many as the others, because the policy returns that many scores.
        """
        width = self.columns.input_ids.shape[1] if self.inputs else 1
        columns = self.columns.each(lambda column: torch.zeros(1, width, *column.shape[2:], dtype=column.dtype))
        inputs = {name: tensor.new_zeros(1, *tensor.shape[1:]) for name, tensor in self.inputs.items()}
        return StepRows(numbers=[-1], lengths=[width], columns=columns, inputs=inputs)


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that compares numbers in names as numbers: group "0-9" comes before "0-10"."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text) if part)


def number_rows(
    ranks: Ranks, group_texts: Sequence[str], row_groups: Sequence[int], lengths: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Number the rows of the step over all data ranks, from 0. Collective.

    `row_groups` [B] is the index of each row's group in `group_texts`, the names of this rank's groups. `lengths` [B] are the rows' lengths.
    Returns the lengths of all rows of the step, in the order of their numbers, and the numbers of this rank's rows. Groups are ordered by
    `natural_key` of their names, so that the numbers do not depend on the order in which groups arrived. Rows of one group are ordered by
    data rank and then by position.
    """
    gathered = ranks.gather_over_data_ranks([list(group_texts), list(row_groups), list(lengths)])
    keys = [[natural_key(text) for text in texts] for texts, _, _ in gathered]
    positions = {key: position for position, key in enumerate(sorted({key for rank_keys in keys for key in rank_keys}))}
    row_positions = [
        np.array([positions[key] for key in rank_keys], np.int64)[np.array(groups, np.int64)]
        for rank_keys, (_, groups, _) in zip(keys, gathered, strict=True)
    ]
    order = np.argsort(np.concatenate(row_positions), kind="stable")
    numbers = np.argsort(order)
    begin = sum(len(row_lengths) for _, _, row_lengths in gathered[: ranks.data_rank])
    all_lengths = np.concatenate([np.array(row_lengths, np.int64) for _, _, row_lengths in gathered])[order]
    return all_lengths.tolist(), numbers[begin : begin + len(lengths)].tolist()


def move_rows(ranks: Ranks, rows: StepRows, destination: Sequence[int]) -> StepRows:
    """Send each row to the data rank that trains it; return the rows for this rank, by ascending number. Collective.

    `destination` gives the data rank of each row by number. Raises RuntimeError when other rows arrive than were planned.
    """
    if ranks.data_size == 1:
        return _ascending(rows)
    order = sorted(range(len(rows.numbers)), key=lambda index: (destination[rows.numbers[index]], rows.numbers[index]))
    outgoing = [
        [index for index in order if destination[rows.numbers[index]] == rank] for rank in range(ranks.data_size)
    ]
    row_counts = [len(indices) for indices in outgoing]
    token_counts = [sum(rows.lengths[index] for index in indices) for indices in outgoing]
    row_headers = torch.tensor([[rows.numbers[i], rows.lengths[i]] for i in order], dtype=torch.int64).view(-1, 2)
    present = rows.columns.present()
    received_headers = ranks.exchange_over_data_ranks(row_headers, row_counts)
    columns: dict[str, Tensor] = {}
    for names, dtype in ((INTEGERS, torch.int64), (FLOATS, torch.float32)):
        shapes = {name: present[name].shape[2:] for name in names if name in present}
        tokens = ranks.exchange_over_data_ranks(_flat(rows, order, list(shapes), dtype), token_counts)
        columns |= _unflat(received_headers[:, 1], tokens, shapes)
    order_tensor = torch.tensor(order, dtype=torch.int64)
    inputs = {
        name: ranks.exchange_over_data_ranks(tensor.index_select(0, order_tensor), row_counts)
        for name, tensor in sorted(rows.inputs.items())
    }
    numbers, lengths = received_headers.unbind(1)
    received = StepRows(numbers=numbers.tolist(), lengths=lengths.tolist(), columns=Columns(**columns), inputs=inputs)
    expected = sorted(number for number, rank in enumerate(destination) if rank == ranks.data_rank)
    if sorted(received.numbers) != expected:
        raise RuntimeError(
            f"rows {expected} were planned for data rank {ranks.data_rank}, got {received.numbers}; this is a bug"
        )
    return _ascending(received)


def _ascending(rows: StepRows) -> StepRows:
    if rows.numbers == sorted(rows.numbers):
        return rows
    return rows.take(sorted(range(len(rows.numbers)), key=rows.numbers.__getitem__))


def _flat(rows: StepRows, order: Sequence[int], names: Sequence[str], dtype: torch.dtype) -> Tensor:
    """Return [N, values]: the columns `names` at the real tokens of the rows in `order`, side by side."""
    order_tensor, present = torch.tensor(order, dtype=torch.int64), rows.columns.present()
    real_BS = _real(torch.tensor(rows.lengths, dtype=torch.int64)[order_tensor], rows.columns.input_ids.shape[1])
    values = [present[name].index_select(0, order_tensor)[real_BS].to(dtype) for name in names]
    return torch.cat([value if value.dim() == 2 else value[:, None] for value in values], dim=1)


def _unflat(lengths: Tensor, tokens: Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return the columns of `shapes`, each [B, S, *shape], from their values side by side at the tokens [N, values] of rows of `lengths`."""
    real_BS = _real(lengths, int(lengths.max()) if len(lengths) else 1)
    columns = {}
    for (name, shape), values in zip(
        shapes.items(), tokens.split([math.prod(shape) for shape in shapes.values()], dim=1), strict=True
    ):
        padded = tokens.new_zeros(*real_BS.shape, *shape)
        padded[real_BS] = values.reshape(len(values), *shape)
        columns[name] = padded.to(COLUMN_DTYPES[name])
    return columns


def _real(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width) < lengths[:, None]
