"""Between one event loop and an engine elsewhere: what is posted in one moment goes over together, and so does the way back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from rl_core.rollouts.rows import Result, Row, RowQueue

_UNITS = count(1)
"""Engine batches that are kept apart, numbered over all mailboxes of the process."""

BatchKey = tuple[Any, int]
"""(name of a group, its number of rows): the rows wait for each other and run as one engine batch."""


class Mailbox:
    """Posts rows whose key is a future of the running loop, and resolves the futures."""

    def __init__(self, queue: RowQueue, *, by_group: bool) -> None:
        self._queue = queue
        self._by_group = by_group
        self._loop = asyncio.get_running_loop()
        self._posted: list[Row] = []
        self._groups: dict[Any, list[Row]] = {}

    def future(self) -> asyncio.Future[Any]:
        """Return a future to be the key of a row."""
        return self._loop.create_future()

    def post(self, rows: Sequence[Row], batch_keys: Sequence[BatchKey] | None = None) -> None:
        """Send rows at the end of this moment of the loop; those of an incomplete group wait for it."""
        if not self._by_group:
            self._send_soon(rows)
        elif batch_keys is None:
            self._send_soon(_unit(rows))
        else:
            for row, (name, size) in zip(rows, batch_keys, strict=True):
                group = self._groups.setdefault(name, [])
                group.append(row)
                if len(group) == size:
                    self._send_soon(_unit(self._groups.pop(name)))

    def withdraw(self, futures: Iterable[asyncio.Future[Any]]) -> None:
        """Forget rows whose caller left; a group that lost a row before it was complete is forgotten with it."""
        gone = set(futures)
        if not gone:
            return
        self._posted = [row for row in self._posted if row.key not in gone]
        for name in [name for name, rows in self._groups.items() if any(row.key in gone for row in rows)]:
            self._groups[name] = [row for row in self._groups[name] if row.key not in gone]
            if not self._groups[name]:
                del self._groups[name]
        self._queue.abort(gone)

    def _send_soon(self, rows: Sequence[Row]) -> None:
        if not self._posted:
            self._loop.call_soon(self._send)
        self._posted += rows

    def _send(self) -> None:
        posted, self._posted = self._posted, []
        if not posted:
            return
        try:
            self._queue.submit(posted, self._sink)
        except Exception as error:  # noqa: BLE001 - the callers wait on their futures and must hear of it
            self._resolve([(row.key, error) for row in posted])

    def _sink(self, results: list[Result]) -> None:
        """Hand results over from the engine's thread; a loop that is closed has nobody left who waits."""
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


def _unit(rows: Sequence[Row]) -> list[Row]:
    unit = next(_UNITS)
    return [replace(row, unit=unit) for row in rows]
