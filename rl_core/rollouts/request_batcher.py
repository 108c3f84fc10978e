"""`RequestBatcher`: rows that one event loop requests in the same iteration reach the engine in one call, and results return in one call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from rl_core.rollouts.rows import GenerationOutput, OnTokens, Result, Row, RowQueue

_BATCH_NUMBERS = count(1)
"""Numbers of the engine batches that must stay apart, over all batchers of the process."""

RowGroup = tuple[str, int]
"""(name of a group, its number of rows): the rows of a group wait for each other and run as one engine batch."""


class RequestBatcher:
    """Submits rows to a `RowQueue` for the coroutines of one event loop."""

    def __init__(self, queue: RowQueue, *, by_group: bool) -> None:
        """Submit rows to `queue`. Must be created on the event loop that uses it.

        `by_group` runs every prompt group as an engine batch of its own.
        """
        self._queue = queue
        self._by_group = by_group
        self._loop = asyncio.get_running_loop()
        self._pending: list[Row] = []
        """Rows to be submitted at the end of this iteration of the event loop."""
        self._incomplete: dict[str, list[Row]] = {}
        """Rows of groups of which not all rows have been requested yet, by the group's name."""

    async def generate(self, row: Row, group: RowGroup | None = None) -> GenerationOutput:
        """Return the output of `row`, whose key is replaced; raises the row's failure.

        A row of a `group` starts when all rows of the group have been requested (if batches are per group). If the caller is
        cancelled the engine drops the row. `row.on_tokens` is called on the event loop, and not after the row has its output.
        """
        future: asyncio.Future[GenerationOutput] = self._loop.create_future()
        on_tokens = None if row.on_tokens is None else self._on_loop(row.on_tokens, future)
        self._request(replace(row, key=future, on_tokens=on_tokens), group)
        try:
            return await future
        finally:
            if future.cancelled():
                self._withdraw(future)

    def _on_loop(self, on_tokens: OnTokens, future: asyncio.Future[GenerationOutput]) -> OnTokens:
        """Return `on_tokens` for the engine's thread."""

        def call(ids: list[int]) -> None:
            if not future.done():
                on_tokens(ids)

        def from_thread(ids: list[int]) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(call, ids)

        return from_thread

    def _request(self, row: Row, group: RowGroup | None) -> None:
        if not self._by_group:
            self._submit_soon([row])
        elif group is None:
            self._submit_soon(_as_batch([row]))
        else:
            name, size = group
            rows = self._incomplete.setdefault(name, [])
            rows.append(row)
            if len(rows) == size:
                self._submit_soon(_as_batch(self._incomplete.pop(name)))

    def _withdraw(self, future: asyncio.Future[GenerationOutput]) -> None:
        """Drop the row of a caller that was cancelled, wherever the row is."""
        self._pending = [row for row in self._pending if row.key is not future]
        for name, rows in list(self._incomplete.items()):
            self._incomplete[name] = [row for row in rows if row.key is not future]
            if not self._incomplete[name]:
                del self._incomplete[name]
        self._queue.abort([future])

    def _submit_soon(self, rows: Sequence[Row]) -> None:
        if not self._pending:
            self._loop.call_soon(self._submit)
        self._pending += rows

    def _submit(self) -> None:
        rows, self._pending = self._pending, []
        if not rows:
            return
        try:
            self._queue.submit(rows, self._receive)
        except Exception as error:  # noqa: BLE001 - the callers wait for their futures and must get any failure
            self._resolve([(row.key, error) for row in rows])

    def _receive(self, results: list[Result]) -> None:
        """Pass results from the engine's thread to the event loop. If the loop is closed, they are dropped."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._resolve, results)

    @staticmethod
    def _resolve(results: list[Result]) -> None:
        for future, result in results:
            if future.done():
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)


def _as_batch(rows: Sequence[Row]) -> list[Row]:
    batch_number = next(_BATCH_NUMBERS)
    return [replace(row, batch=batch_number) for row in rows]
