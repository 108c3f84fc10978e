"""`EngineLoop`: the thread that steps an `HFEngine` for callers on other threads.

    submit (any thread) -> inbox -> [engine thread: submit, step, step ...] -> sink(results), once per step and caller

The thread sleeps on a condition while there is nothing to run. A step that fails fails every row in flight as GenerationUnavailable and
empties the engine; the thread continues.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from rl_core.api.errors import GenerationUnavailable
from rl_core.rollouts.hf.engine import HFEngine
from rl_core.rollouts.meter import EngineLoad
from rl_core.rollouts.rows import OnTokens, Result, Row, Sink

logger = logging.getLogger(__name__)


class EngineLoop:
    """Owns the thread of one engine. CREATED -> running (first use) -> closed."""

    def __init__(self, engine: HFEngine, *, on_tokens: Callable[[int], Any] | None = None) -> None:
        """`on_tokens(tokens)` is called on the engine's thread after every step, with the number of new tokens."""
        self.engine = engine
        self._on_tokens = on_tokens
        self._condition = threading.Condition()
        """Guards the attributes up to `_at_rest`; notified when one of them changes."""
        self._inbox: list[tuple[Row, Sink]] = []
        self._aborted: list[Hashable] = []
        self._thread: threading.Thread | None = None
        self._closed = False
        self._paused = False
        self._keep_cache = False
        """Whether rows that are paused keep their keys and values."""
        self._at_rest = False
        """Whether the engine's thread has paused all rows."""
        self._owners: dict[int, tuple[Hashable, Sink]] = {}
        """Key and sink of every row in the engine, by its ticket. Used on the engine's thread only, as is `_tickets`."""
        self._tickets: dict[Hashable, int] = {}
        self._watched: dict[int, tuple[OnTokens, int]] = {}
        """Who receives the tokens of a running row, and how many it has received, by ticket. Used on the engine's thread only."""

    @property
    def version(self) -> int:
        """Version of the weights that generate new tokens."""
        return self.engine.version

    @property
    def idle(self) -> bool:
        """Return whether no row waits or runs."""
        with self._condition:
            return not (self._inbox or self._owners)

    def submit(self, rows: Sequence[Row], sink: Sink) -> None:
        """Queue `rows` together; `sink` gets each result once. Raises GenerationUnavailable after `close`."""
        with self._condition:
            if self._closed:
                raise GenerationUnavailable("the generation engine was shut down; this rollout process is ending")
            self._inbox += [(row, sink) for row in rows]
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="rljob-engine", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def abort(self, keys: Iterable[Hashable]) -> None:
        """Drop the rows with these keys; their sinks get no result."""
        with self._condition:
            dropped = set(keys)
            self._inbox = [item for item in self._inbox if item[0].key not in dropped]
            self._aborted += dropped
            self._condition.notify_all()

    def pause(self, *, keep_cache: bool = False) -> None:
        """Pause generation; blocks until nothing runs or `resume` is called. Running and queued rows continue when `resume` is called.

        `keep_cache`: running rows continue with the keys and values they have; otherwise these are recomputed. It has no effect if
        generation is paused already.
        """
        with self._condition:
            if not self._paused:
                self._paused, self._keep_cache = True, keep_cache
            self._condition.notify_all()
            while self._thread is not None and self._paused and not (self._at_rest or self._closed):
                self._condition.wait()

    def resume(self) -> None:
        """Continue generation; does nothing if it is not paused."""
        with self._condition:
            self._paused = self._at_rest = False
            self._condition.notify_all()

    def load(self) -> EngineLoad:
        """Return how busy the engine is, including rows that it was not given yet. This does not load weights."""
        load = self.engine.load()
        return replace(load, waiting=load.waiting + len(self._inbox))

    def close(self) -> None:
        """Stop the thread; rows in flight fail as GenerationUnavailable. Idempotent."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _main(self) -> None:
        while True:
            with self._condition:
                while not self._has_work():
                    self._condition.wait()
                if self._closed:
                    break
                paused = self._paused
                inbox, self._inbox = self._inbox, []
                aborted, self._aborted = self._aborted, []
            self._drop(aborted)
            refused = self._admit(inbox)
            if paused:
                self._rest()
            self._deliver(refused if paused else refused + self._step())
        self._fail_all(GenerationUnavailable("the generation engine was shut down"))

    def _has_work(self) -> bool:
        if self._inbox or self._aborted or self._closed:
            return True
        return not self._at_rest if self._paused else bool(self._owners)

    def _rest(self) -> None:
        self.engine.interrupt(keep_cache=self._keep_cache)
        with self._condition:
            self._at_rest = self._paused
            self._condition.notify_all()

    def _admit(self, inbox: list[tuple[Row, Sink]]) -> list[tuple[Sink, Result]]:
        """Submit new rows to the engine; return the results of those that it refuses."""
        refused: list[tuple[Sink, Result]] = []
        for row, sink in inbox:
            try:
                ticket = self.engine.submit(row.prompt, row.params, row.seed, batch=row.batch)
            except Exception as error:  # noqa: BLE001 - concerns this row alone; its caller gets it
                refused.append((sink, (row.key, error)))
            else:
                self._owners[ticket] = (row.key, sink)
                self._tickets[row.key] = ticket
                if row.on_tokens is not None:
                    self._watched[ticket] = (row.on_tokens, 0)
        return refused

    def _step(self) -> list[tuple[Sink, Result]]:
        """Run one step of the engine; return the rows that ended."""
        if not self._owners:
            return []
        try:
            finished = self.engine.step()
        except Exception as error:
            logger.exception("a generation step failed; %d rows in flight are lost", len(self._owners))
            failure = GenerationUnavailable(f"a generation step failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.engine.reset()
            return self._fail(list(self._owners), failure)
        if self._on_tokens is not None:
            self._on_tokens(self.engine.num_running + len(finished))
        results: list[tuple[Sink, Result]] = []
        for ticket, output in finished:
            key, sink = self._remove(ticket)
            self._tickets.pop(key, None)
            results.append((sink, (key, output)))
        if self._watched:
            self._report_tokens()
        return results

    def _report_tokens(self) -> None:
        """Report new tokens to the callbacks of watched rows. The last tokens of a row are only in its output."""
        for ticket, ids in self.engine.new_ids(
            {ticket: num_reported for ticket, (_, num_reported) in self._watched.items()}
        ).items():
            on_tokens, num_reported = self._watched[ticket]
            if ids:
                self._watched[ticket] = (on_tokens, num_reported + len(ids))
                on_tokens(ids)

    def _remove(self, ticket: int) -> tuple[Hashable, Sink]:
        """Forget a row that left the engine; return its key and sink."""
        self._watched.pop(ticket, None)
        return self._owners.pop(ticket)

    def _drop(self, keys: list[Hashable]) -> None:
        """Drop rows from the engine whose callers have left."""
        tickets = [self._tickets.pop(key) for key in keys if key in self._tickets]
        for ticket in tickets:
            self._remove(ticket)
        if tickets:
            self.engine.abort(tickets)
            if not self._owners:
                self.engine.reset()

    def _fail(self, tickets: list[int], failure: BaseException) -> list[tuple[Sink, Result]]:
        owners = [self._remove(ticket) for ticket in tickets]
        for key, _ in owners:
            self._tickets.pop(key, None)
        return [(sink, (key, failure)) for key, sink in owners]

    def _fail_all(self, failure: BaseException) -> None:
        with self._condition:
            inbox, self._inbox = self._inbox, []
        queued: list[tuple[Sink, Result]] = [(sink, (row.key, failure)) for row, sink in inbox]
        self._deliver(queued + self._fail(list(self._owners), failure))

    @staticmethod
    def _deliver(results: list[tuple[Sink, Result]]) -> None:
        by_sink: dict[Sink, list[Result]] = {}
        for sink, result in results:
            by_sink.setdefault(sink, []).append(result)
        for sink, batch in by_sink.items():
            try:
                sink(batch)
            except Exception:
                logger.exception("results of %d rows could not be delivered", len(batch))
