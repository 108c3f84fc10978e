"""The thread that drives an engine for callers elsewhere: rows in, finished rows out.

    submit (any thread) -> inbox -> [engine thread: submit, step, step ...] -> sink(results), once per step and caller

The thread sleeps on a condition while nothing runs. A failing step fails every row in flight as GenerationUnavailable
and empties the engine; the thread goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

from rl_core.api.errors import GenerationUnavailable
from rl_core.rollouts.hf.engine import HFEngine
from rl_core.rollouts.meter import EngineLoad
from rl_core.rollouts.rows import Result, Row, Sink

logger = logging.getLogger(__name__)


class EngineLoop:
    """Owns the thread of one engine. CREATED -> running (first use) -> closed."""

    def __init__(self, engine: HFEngine, *, on_step: Callable[[int], None] | None = None) -> None:
        """`on_step(rows)` hears of every step on the engine's thread; None = nobody listens."""
        self.engine = engine
        self._on_step = on_step
        self._wake = threading.Condition()
        self._inbox: list[tuple[Row, Sink]] = []
        self._unwanted: list[Hashable] = []
        self._owners: dict[int, tuple[Hashable, Sink]] = {}
        self._tickets: dict[Hashable, int] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._holding = self._resting = self._keep_cache = False
        """Whether nothing may run, and whether nothing does."""
        self._stats = dict.fromkeys(("steps", "rows", "tokens", "busy_seconds", "row_steps"), 0.0)

    @property
    def version(self) -> int:
        """Return the version of the weights that new tokens come from."""
        return self.engine.version

    @property
    def idle(self) -> bool:
        """Return whether no row waits or runs."""
        with self._wake:
            return not (self._inbox or self._owners)

    def submit(self, rows: Sequence[Row], sink: Sink) -> None:
        """Queue `rows` together; each result reaches `sink` once. Raises GenerationUnavailable after `close`."""
        with self._wake:
            self._check_open()
            self._inbox += [(row, sink) for row in rows]
            self._start()
            self._wake.notify_all()

    def abort(self, keys: Iterable[Hashable]) -> None:
        """Drop rows whose caller does not wait any more; their sink hears nothing."""
        with self._wake:
            wanted = set(keys)
            self._inbox = [item for item in self._inbox if item[0].key not in wanted]
            self._unwanted += wanted
            self._wake.notify_all()

    def hold(self, *, keep_cache: bool = False) -> None:
        """Generate nothing until `release`: rows that run are parked and go on then, new ones wait. Blocks until nothing runs."""
        with self._wake:
            self._holding, self._keep_cache = True, keep_cache
            self._wake.notify_all()
            while self._thread is not None and not (self._resting or self._closed):
                self._wake.wait()

    def release(self) -> None:
        """Go on generating; nothing to do unless held."""
        with self._wake:
            self._holding = self._resting = False
            self._wake.notify_all()

    def statistics(self) -> dict[str, float]:
        """Return steps, rows, tokens, seconds at work and row-steps since the last `clear_statistics`."""
        return dict(self._stats)

    def load(self) -> EngineLoad:
        """Return what the engine has to do; rows that it was not handed yet wait too."""
        load = self.engine.load()
        return replace(load, waiting=load.waiting + len(self._inbox))

    def clear_statistics(self) -> None:
        """Start the statistics anew."""
        self._stats = dict.fromkeys(self._stats, 0.0)

    def close(self) -> None:
        """Stop the thread; rows in flight fail as GenerationUnavailable. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise GenerationUnavailable("the generation engine was shut down; this rollout process is ending")

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="rljob-engine", daemon=True)
            self._thread.start()

    def _main(self) -> None:
        while True:
            with self._wake:
                while not self._has_work():
                    self._wake.wait()
                if self._closed:
                    break
                holding = self._holding
                inbox, self._inbox = self._inbox, []
                unwanted, self._unwanted = self._unwanted, []
            self._forget(unwanted)
            refused = self._admit(inbox)
            if holding:
                self._rest()
            self._deliver(refused if holding else refused + self._step())
        self._fail_all(GenerationUnavailable("the generation engine was shut down"))

    def _has_work(self) -> bool:
        if self._inbox or self._unwanted or self._closed:
            return True
        return not self._resting if self._holding else bool(self._owners)

    def _rest(self) -> None:
        self.engine.park(keep_cache=self._keep_cache)
        with self._wake:
            self._resting = self._holding
            self._wake.notify_all()

    def _admit(self, inbox: list[tuple[Row, Sink]]) -> list[tuple[Sink, Result]]:
        """Hand new rows to the engine; return those it refuses."""
        refused: list[tuple[Sink, Result]] = []
        for row, sink in inbox:
            try:
                ticket = self.engine.submit(row.prompt, row.params, row.seed, unit=row.unit)
            except Exception as error:  # noqa: BLE001 - of this row alone; its caller gets it
                refused.append((sink, (row.key, error)))
            else:
                self._owners[ticket] = (row.key, sink)
                self._tickets[row.key] = ticket
        return refused

    def _step(self) -> list[tuple[Sink, Result]]:
        """Run one step; return what ended."""
        if not self._owners:
            return []
        started = time.perf_counter()
        try:
            ended = self.engine.step()
        except Exception as error:
            logger.exception("a generation step failed; %d rows in flight are lost", len(self._owners))
            failure = GenerationUnavailable(f"a generation step failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.engine.reset()
            return self._disown(list(self._owners), failure)
        stats = self._stats
        stats["busy_seconds"] += time.perf_counter() - started
        stats["steps"] += 1
        rows = self.engine.num_running + len(ended)
        stats["row_steps"] += rows
        if self._on_step is not None:
            self._on_step(rows)
        results: list[tuple[Sink, Result]] = []
        for ticket, output in ended:
            key, sink = self._owners.pop(ticket)
            self._tickets.pop(key, None)
            results.append((sink, (key, output)))
            stats["rows"] += 1
            stats["tokens"] += len(output.ids)
        return results

    def _forget(self, keys: list[Hashable]) -> None:
        tickets = [self._tickets.pop(key) for key in keys if key in self._tickets]
        for ticket in tickets:
            self._owners.pop(ticket, None)
        if tickets:
            self.engine.abort(tickets)
            if not self._owners:
                self.engine.reset()

    def _disown(self, tickets: list[int], failure: BaseException) -> list[tuple[Sink, Result]]:
        owners = [self._owners.pop(ticket) for ticket in tickets]
        for key, _ in owners:
            self._tickets.pop(key, None)
        return [(sink, (key, failure)) for key, sink in owners]

    def _fail_all(self, failure: BaseException) -> None:
        with self._wake:
            inbox, self._inbox = self._inbox, []
        waiting: list[tuple[Sink, Result]] = [(sink, (row.key, failure)) for row, sink in inbox]
        self._deliver(waiting + self._disown(list(self._owners), failure))

    @staticmethod
    def _deliver(results: list[tuple[Sink, Result]]) -> None:
        by_sink: dict[Sink, list[Result]] = {}
        for sink, result in results:
            by_sink.setdefault(sink, []).append(result)
        for sink, batch in by_sink.items():
            try:
                sink(batch)
            except Exception:
                logger.exception("results of %d rows could not be handed over", len(batch))
