"""`KVCache`: the keys and values of the running rows in one static buffer.

Every step writes one column, the same for all rows. The tokens of a row end at that column (rows are left-padded), so writes are plain
slices, and a new prompt of any length is placed just left of the next column. The running rows are rows 0..n-1 of the buffer: the last row
takes the place of one that ended. When the columns are used up, the live window is moved to the left edge. The buffer doubles its size when
rows need more, up to the most they can need.

Legend: n running rows, K key-value heads, W live window of columns, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SLACK = 64
"""Columns in addition to the longest window, so that the window is moved rarely."""
FIRST_ROWS = 8
FIRST_COLUMNS = 128


class KVCache:
    """Static keys and values of all layers, [layers, 2, rows, K, columns, D]."""

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device, max_columns: int
    ) -> None:
        """`max_columns` is the longest sequence a row may have."""
        self._shape = (layers, kv_heads, head_dim)
        self._dtype, self._device = dtype, device
        self._limit = max_columns + SLACK
        self.rows = 0
        """Running rows."""
        self.end = 0
        """The next column to be written."""
        self.starts = np.zeros(0, dtype=np.int64)
        """First column of every row slot."""
        self._window_start = 0
        self._ragged = False
        self.data = self._zeros(0, 0)
        self._mask = torch.zeros(0, 0, dtype=dtype, device=device)

    @property
    def low(self) -> int:
        """Return the first column of the live window."""
        return self._window_start

    def positions(self) -> np.ndarray:
        """Return [n] int64, the sequence position of the next column in every row."""
        return self.end - self.starts[: self.rows]

    def mask(self) -> Tensor | None:
        """Return the attention mask [n, K, W] up to and including the next column: 0, or -inf left of a row's first token; None if all are 0."""
        if not self._ragged:
            return None
        count, kv_heads = self.rows, self._shape[1]
        return self._mask[:count, None, self._window_start : self.end + 1].expand(count, kv_heads, -1)

    def window(self) -> Sequence[Tensor]:
        """Return per layer a view [2, n, K, W, D] up to and including the next column."""
        return list(self.data[:, :, : self.rows, :, self._window_start : self.end + 1].unbind(0))

    def column(self) -> Sequence[Tensor]:
        """Return per layer a view [2, n, K, D] of the next column, which this step writes."""
        return list(self.data[:, :, : self.rows, :, self.end].unbind(0))

    def begin_step(self) -> None:
        """Make room for the next column; call this before `column` and `window`."""
        if self.end >= self.data.shape[4]:
            self._place(self.rows, self.end + 1 - self._window_start, grow=True)

    def advance(self) -> None:
        """Move on to the next column, after the present one was written."""
        self.end += 1

    def add_rows(self, lengths: np.ndarray, padded: int) -> Sequence[Tensor]:
        """Append rows of `lengths` tokens that end at the current column; return per layer [2, new, K, padded, D]."""
        if not self.rows:
            self.end = self._window_start = 0
        count = self.rows + len(lengths)
        window = max(self.end - self._window_start, padded)
        if count > self.data.shape[2] or self.end < padded:
            self._place(count, window, grow=False)
        first_row, self.rows = self.rows, count
        self.starts[first_row:count] = self.end - lengths
        # Attention multiplies masked columns by 0, and 0 x inf is NaN, so values that an earlier row left there must be finite.
        self.data[:, :, first_row:count, :, : self.end - padded] = 0
        self._set_mask(first_row, count)
        self._refresh()
        return list(self.data[:, :, first_row:count, :, self.end - padded : self.end].unbind(0))

    def keep(self, count: int, moves: list[tuple[int, int]]) -> None:
        """Keep `count` rows; every (source, target) move fills a free place below `count` with a row from above it."""
        live = slice(self._window_start, self.end)
        for source, target in moves:
            self.data[:, :, target, :, live] = self.data[:, :, source, :, live]
            self.starts[target] = self.starts[source]
            self._mask[target] = self._mask[source]
        self.rows = count
        self._refresh()

    def clear(self) -> None:
        """Drop all rows."""
        self.keep(0, [])

    def release(self) -> None:
        """Drop all rows and free the buffer; it is allocated again for the next rows."""
        self.clear()
        self.end = 0
        self.starts = np.zeros(0, dtype=np.int64)
        self.data = self._zeros(0, 0)
        self._mask = torch.zeros(0, 0, dtype=self._dtype, device=self._device)

    def _refresh(self) -> None:
        """Update the live window, which starts at the first column of the longest row."""
        starts = self.starts[: self.rows]
        self._window_start = int(starts.min()) if self.rows else 0
        self._ragged = bool((starts != self._window_start).any())

    def _place(self, rows: int, window: int, *, grow: bool) -> None:
        """Move the live window so that `window` columns end at the new `end`, and enlarge the buffer if needed.

        With `grow` the window is moved to the left edge, which leaves room to its right; without it, to the right.
        """
        live = self.end - self._window_start
        have_rows, have_columns = self.data.shape[2], self.data.shape[4]
        num_needed = window + (1 if grow else 0)
        columns = have_columns if num_needed + SLACK // 2 <= have_columns else self._columns(num_needed)
        capacity = have_rows if rows <= have_rows else max(rows, 2 * have_rows, FIRST_ROWS)
        end = live if grow else max(window, min(self.end, columns))
        if (capacity, columns) == (have_rows, have_columns):
            source = self.data[:, :, : self.rows, :, self._window_start : self.end].clone()
            self.data[:, :, : self.rows, :, end - live : end] = source
        else:
            data = self._zeros(capacity, columns)
            data[:, :, : self.rows, :, end - live : end] = self.data[
                :, :, : self.rows, :, self._window_start : self.end
            ]
            self.data = data
        starts = np.zeros(capacity, dtype=np.int64)
        starts[: self.rows] = self.starts[: self.rows] + (end - self.end)
        self.starts, self.end = starts, end
        self._mask = torch.zeros(capacity, columns, dtype=self._dtype, device=self._device)
        self._set_mask(0, self.rows)
        self._refresh()

    def _columns(self, num_needed: int) -> int:
        columns: int = max(FIRST_COLUMNS, self.data.shape[4])
        while columns < num_needed + SLACK // 2:
            columns *= 2
        return max(min(columns, self._limit), num_needed)

    def _set_mask(self, first_row: int, end_row: int) -> None:
        if first_row == end_row:
            return
        starts = torch.from_numpy(self.starts[first_row:end_row]).to(self._device)
        columns = torch.arange(self._mask.shape[1], device=self._device)
        part = self._mask[first_row:end_row]
        part.zero_()
        part.masked_fill_(columns < starts[:, None], float("-inf"))

    def _zeros(self, rows: int, columns: int) -> Tensor:
        layers, kv_heads, head_dim = self._shape
        shape = (layers, 2, rows, kv_heads, columns, head_dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)
