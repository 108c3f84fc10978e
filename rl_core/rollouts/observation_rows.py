"""Large observations of one pipeline stage. Simulators of this host write them into shared memory, and the policy reads them in place.

    simulator -- writes --> rows [R, B, ...] -- views --> policy
                            rows -- put without a copy --> actor

Legend: R rows, which are one for each output of a simulator in a collection and FINAL_ROWS more; B simulators of the stage that this rollout
serves. A simulator has an output for each decision, and the last one of each rollout epoch.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from rl_core.api.records import EnvOutput
from rl_core.transports.shared_memory import LentMemory
from rl_core.transports.shared_rows import FINAL_ROWS, Allocate, ColumnAddress, Layout, SharedRows, final_row

LARGE_BYTES = 512
"""Smallest size in bytes of an observation that is put into shared memory. Smaller ones, such as states, are sent in messages."""


def large_observations(obs: Mapping[str, Any]) -> Layout:
    """Return a dict from name to (type, shape without B) of the observations [B, ...] of at least LARGE_BYTES per simulator."""
    arrays = {name: np.asarray(array) for name, array in obs.items() if isinstance(array, Tensor | np.ndarray)}
    return {name: (array.dtype, array.shape[1:]) for name, array in arrays.items() if array[0].nbytes >= LARGE_BYTES}


class ObservationRows:
    """The large observations of a stage, [R, B, ...]. The last FINAL_ROWS rows have the final observations of episodes that ended."""

    def __init__(self, shared: SharedRows) -> None:
        """Use `allocate`."""
        self._shared = shared
        self._rows = {name: torch.from_numpy(array) for name, array in shared.arrays.items()}
        for rows in self._rows.values():
            # The policy reads such a row of all simulators, also of those whose episode has not ended.
            rows[-FINAL_ROWS:] = 0
        self._row = -1
        """Row of the latest observations."""

    @classmethod
    async def allocate(cls, allocate: Allocate, layout: Layout, *, outputs: int, simulators: int) -> Self | None:
        """Return rows for `outputs` outputs of each of `simulators` simulators, in memory that the argument `allocate` returns.

        Returns None if `allocate` does.
        """
        shared = await SharedRows.allocate(allocate, layout, rows=outputs + FINAL_ROWS, columns=simulators)
        return None if shared is None else cls(shared)

    @property
    def lent(self) -> LentMemory:
        """The memory of the rows."""
        return self._shared.lent

    def column(self, number: int) -> ColumnAddress:
        """Return where a simulator of the stage writes."""
        return replace(self._shared.address, column=number)

    def receive(self, shards: Sequence[EnvOutput], sizes: Sequence[int], gone: Sequence[bool]) -> list[EnvOutput]:
        """Go to the next row (row 0 at the first call), and return the outputs of the env workers without their large observations.

        `shards`, `sizes` and `gone` have an entry for each env worker, in the order of the simulators: its output, the number of its simulators,
        and whether it was lost. Env workers of this host have written to the row already. Those of other hosts send large observations in
        their outputs, which are copied into the row. For the simulators of a lost env worker the previous row is copied into this one.
        """
        self._row += 1
        start, remaining = 0, []
        for shard, size, is_gone in zip(shards, sizes, gone, strict=True):
            columns = slice(start, start + size)
            for rows in self._rows.values() if is_gone else ():
                rows[self._row, columns] = rows[self._row - 1, columns]
            obs = self._copied(shard.obs, self._row, columns)
            final_obs = (
                None if shard.final_obs is None else self._copied(shard.final_obs, final_row(self._row), columns)
            )
            remaining.append(replace(shard, obs=obs, final_obs=final_obs))
            start += size
        return remaining

    def fill(self, output: EnvOutput) -> EnvOutput:
        """Return `output`, the merged outputs of all env workers, with the large observations of the current row as views of the memory.

        If an episode has ended, `final_obs` has them too. They are valid for the simulators whose episode ended with auto-reset, until the
        output after the next one is received.
        """
        final_obs = output.final_obs
        if output.rewards is not None and bool(output.dones.any()):
            final_obs = (final_obs or output.obs) | {
                name: rows[final_row(self._row)] for name, rows in self._rows.items()
            }
        obs = output.obs | {name: rows[self._row] for name, rows in self._rows.items()}
        return replace(output, obs=obs, final_obs=final_obs)

    def release(self, *, reuse: bool) -> None:
        """Give the memory back; see `LentMemory.release`. Neither this object nor what `fill` returned can be used afterwards."""
        self._rows = {}
        self.lent.release(reuse=reuse)

    def _copied(self, obs: Mapping[str, Any], row: int, columns: slice) -> dict[str, Any]:
        for name in self._rows.keys() & obs.keys():
            self._rows[name][row, columns] = torch.as_tensor(obs[name])
        return {name: array for name, array in obs.items() if name not in self._rows}


async def allocate_rows(
    allocate: Allocate, layout: Layout, *, outputs: int, simulators: Sequence[int]
) -> list[ObservationRows]:
    """Return the rows of each stage, for `outputs` outputs; `simulators` has B of each stage.

    The list is empty if `layout` is, or if there is no shared memory for all stages. What was allocated by then is given back.
    """
    rows: list[ObservationRows] = []
    with ExitStack() as on_failure:
        for count in simulators if layout else ():
            stage_rows = await ObservationRows.allocate(allocate, layout, outputs=outputs, simulators=count)
            if stage_rows is None:
                return []
            on_failure.callback(stage_rows.release, reuse=True)
            rows.append(stage_rows)
        on_failure.pop_all()
    return rows


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return `tensors`, which have equal shapes, as one tensor with a new first dimension, like `torch.stack`.

    If they are consecutive rows of one tensor, the result is a view of that tensor. Otherwise it is a copy.
    """
    first, step = tensors[0], tensors[0].numel()
    memory = first.untyped_storage().data_ptr()
    is_rows = first.is_contiguous() and all(
        tensor.untyped_storage().data_ptr() == memory
        and tensor.storage_offset() == first.storage_offset() + index * step
        and tensor.stride() == first.stride()
        and tensor.shape == first.shape
        for index, tensor in enumerate(tensors)
    )
    return (
        first.as_strided((len(tensors), *first.shape), (step, *first.stride()))
        if is_rows
        else torch.stack(list(tensors))
    )
