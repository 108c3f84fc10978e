"""`EnvPool`: the child processes of one env worker, and the distribution of rows over them.

Batching. The rows of all concurrent calls wait in one queue. A free process takes its share of the rows of one task, so that one call of
user code scores many rows. Rows of a failed batch are tried once more, each alone:

    the batch raises               -> a row that raises alone fails with RolloutDataFailure
    the batch misses its deadline  -> the process is killed and replaced; a row that does so alone fails with RolloutTimeout, the second
                                      time with RolloutDataFailure
    the process dies               -> it is replaced; a row that does so alone fails with InfrastructureError, the third time with
                                      RolloutDataFailure

A sample that failed alone is not put into a batch again until it succeeds, so one bad row fails no other. The cost is bounded: a row takes
part in at most two calls; after three calls in succession that missed their deadline the environment itself is considered hanging, and rows
that wait to be tried alone are answered at once; and a row without an answer `answer_seconds` after its arrival is answered with
RolloutTimeout in any case.

Affinity. The rows of a key go to the process that served the key before, until the episode ends or the process is replaced. The state of an
episode is in the metadata that the environment returns; state in the process is a cache.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from rl_core.api.errors import (
    ConfigError,
    DeadlineExceeded,
    InfrastructureError,
    RLJobError,
    RolloutDataFailure,
    RolloutTimeout,
    error_types,
)
from rl_core.envs.process import CallMember, EnvProcess
from rl_core.envs.waiting import REMEMBERED, Suspects, WaitingRow, pop_batch
from rl_core.messages.envs import EnvAnswer, EnvFailure, EnvRow, EnvSettings

MAX_BATCH = 256
"""Rows of one call of user code."""
HANGING_CALLS = 3
"""Number of calls in succession past their deadline after which the environment, not a single row, is considered hanging."""
MAX_START_SECONDS = 30.0
"""Longest time for the start of a process in `EnvPool.answer_seconds`; less if starts were observed to be quick."""
RETRY_START_SECONDS = (0.1, 0.5, 2.0, 5.0)
CLOSED = "the env worker was closed before the row was answered"

logger = logging.getLogger(__name__)
Event = Callable[[str, int, int], None]
"""f("started" | "ended", pid, index of the process in the pool)."""
Waiting = Callable[[str], AbstractContextManager[None]]
"""Reports a wait for a process, by its name in the pool, while the block runs."""


@dataclass(eq=False, slots=True)
class _Slot:
    """A place for one process: STARTING -> IDLE <-> BUSY -> STARTING (replaced)."""

    index: int
    process: EnvProcess | None = None
    own: deque[WaitingRow] = field(default_factory=deque)
    """Rows whose key this process has served before."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    busy_since: float | None = None
    starts: int = 0


class EnvPool:
    """Runs an environment in several child processes. Every row is answered, by a result or by a typed error."""

    def __init__(
        self,
        source: EnvSettings,
        *,
        processes: int = 1,
        step_deadline: float,
        start_deadline: float,
        on_event: Event | None = None,  # None if processes are not reported
        waiting: Waiting = lambda process: nullcontext(),
        call_member: CallMember | None = None,
    ) -> None:
        """Prepare a pool of `processes` children; `start` starts them.

        - `source`: the environment that each child builds.
        - `step_deadline`: seconds of one call of the environment.
        - `start_deadline`: seconds in which a child must have built it.
        - `on_event`: called when a child starts and ends; None calls nothing.
        - `waiting`: declares a wait for a process while a block runs.
        - `call_member`: serves calls of the environment's code to groups of the job; None refuses them.
        """
        self._source = source
        self._step_deadline, self._start_deadline = step_deadline, start_deadline
        self._on_event, self._waiting_for, self._call_member = on_event, waiting, call_member
        self._slots = [_Slot(index) for index in range(processes)]
        self._shared: deque[WaitingRow] = deque()
        self._sticky: OrderedDict[str, tuple[_Slot, int]] = OrderedDict()
        self._suspects = Suspects()
        self._tasks: list[asyncio.Task[None]] = []
        self._start_seconds = 0.0
        self._timeouts_in_a_row = 0
        self.counters: Counter[str] = Counter()

    @property
    def answer_seconds(self) -> float:
        """Seconds after which a row is answered in any case: two steps and the start of a process."""
        return 2 * self._step_deadline + min(MAX_START_SECONDS, 5.0 + 2 * self._start_seconds)

    async def start(self) -> None:
        """Start all processes. Raises the error of the first that fails: ConfigError, DeadlineExceeded or InfrastructureError."""
        results = await asyncio.gather(*(self._start_process(slot) for slot in self._slots), return_exceptions=True)
        failure = next((result for result in results if isinstance(result, BaseException)), None)
        if failure is not None:
            await self.close()
            raise failure
        self._tasks = [asyncio.create_task(self._serve(slot), name=f"env process {slot.index}") for slot in self._slots]

    async def close(self) -> None:
        """Kill all processes. Rows that wait are answered with InfrastructureError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._fail_queued(CLOSED)
        for slot in self._slots:
            await self._end_process(slot)

    def status(self) -> dict[str, Any]:
        """Return the processes (pid, seconds in the present call, starts), the number of queued rows and the counters."""
        now = time.monotonic()
        processes = [
            {
                "pid": slot.process.pid if slot.process else None,
                "busy_seconds": None if slot.busy_since is None else round(now - slot.busy_since, 3),
                "starts": slot.starts,
            }
            for slot in self._slots
        ]
        queued = len(self._shared) + sum(len(slot.own) for slot in self._slots)
        return {"processes": processes, "queued": queued, "counters": dict(self.counters)}

    async def step_rows(self, rows: Iterable[EnvRow]) -> list[EnvAnswer | EnvFailure]:
        """Return one answer per row, in order; the failure of a row does not affect others."""
        waiting = [self._waiting(row) for row in rows]
        if not waiting:
            return []
        self.counters["rows"] += len(waiting)
        self._enqueue(waiting)
        try:
            await asyncio.wait([entry.answer for entry in waiting], timeout=self.answer_seconds)
            for entry in waiting:
                if entry.is_open:
                    entry.fail(RolloutTimeout, self._no_answer())
        finally:
            for entry in waiting:
                entry.answer.cancel()  # Drops the rows of a cancelled caller; answered rows are not affected.
        return [entry.answer.result() for entry in waiting]

    def _waiting(self, row: EnvRow) -> WaitingRow:
        return WaitingRow(row=row, alone=row.key in self._suspects, answer=asyncio.get_running_loop().create_future())

    def _enqueue(self, rows: Iterable[WaitingRow]) -> None:
        for row in rows:
            slot, starts = self._sticky.get(row.key, (None, 0))
            served_before = slot is not None and slot.process is not None and slot.starts == starts
            (slot.own if slot is not None and served_before else self._shared).append(row)
        for slot in self._slots:
            slot.wake.set()

    def _no_answer(self) -> str:
        busy = sum(1 for slot in self._slots if slot.busy_since is not None)
        return (
            f"{self._source.label} must answer a row within {self.answer_seconds:g} s (twice runtime.deadlines.envStep and a "
            f"start), got nothing while {busy} of {len(self._slots)} processes were busy; raise env.processes or envStep"
        )

    async def _serve(self, slot: _Slot) -> None:
        """Serve rows with one process after another until cancelled."""
        failures = 0
        while True:
            if slot.process is None:
                try:
                    await self._start_process(slot)
                except (ConfigError, DeadlineExceeded, InfrastructureError) as error:
                    logger.error("env process %d could not be replaced: %s", slot.index, error)
                    if all(other.process is None for other in self._slots):
                        self._fail_queued(f"no process could be started: {error}")
                    await asyncio.sleep(RETRY_START_SECONDS[min(failures, len(RETRY_START_SECONDS) - 1)])
                    failures += 1
                    continue
            failures = 0
            batch = await self._take(slot)
            if batch:
                await self._call(slot, batch)

    async def _take(self, slot: _Slot) -> list[WaitingRow]:
        """Wait for rows and return a batch of one task; empty if the process ended while idle, which also removes it from the slot."""
        process = slot.process
        assert process is not None, "bug: a slot without a process takes rows"
        while process.alive:
            batch = pop_batch(slot.own, MAX_BATCH) or pop_batch(self._shared, self._share())
            if batch:
                slot.busy_since = time.monotonic()
                return batch
            slot.wake.clear()
            await process.ended_or(slot.wake)
        logger.warning("env process %d (pid %d) ended while idle; it is replaced", slot.index, process.pid)
        self.counters["deaths"] += 1
        await self._end_process(slot)
        return []

    def _share(self) -> int:
        idle = sum(1 for slot in self._slots if slot.process is not None and slot.busy_since is None)
        return min(MAX_BATCH, -(-len(self._shared) // max(1, idle)))

    async def _call(self, slot: _Slot, batch: list[WaitingRow]) -> None:
        """Call the slot's process with `batch` and answer, or queue again, all rows of the batch."""
        process = slot.process
        assert process is not None, "bug: a slot without a process calls"
        self.counters["calls"] += 1
        try:
            with self._waiting_for(f"child-{slot.index}"):
                answer = await process.call([waiting.row for waiting in batch], deadline=self._step_deadline)
        except RolloutTimeout as error:
            self._timeouts_in_a_row += 1
            self._broke(slot, batch, "timeouts", str(error), self._suspects.timed_out)
        except InfrastructureError as error:
            self._broke(slot, batch, "deaths", str(error), self._suspects.died)
        except asyncio.CancelledError:
            for row in batch:
                row.fail(InfrastructureError, f"{self._source.label}: {CLOSED}")
            raise
        except (TypeError, ValueError) as error:
            self._failed(
                batch, RolloutDataFailure, f"{self._source.label}: metadata cannot travel to the process: {error}"
            )
        else:
            self._timeouts_in_a_row = 0
            if isinstance(answer, EnvFailure):
                self._failed(batch, error_types().get(answer.type, RolloutDataFailure), answer.message)
            else:
                self._succeeded(slot, batch, answer)
        finally:
            slot.busy_since = None
            if not process.alive:
                await self._end_process(slot)

    def _succeeded(self, slot: _Slot, batch: list[WaitingRow], answers: list[EnvAnswer]) -> None:
        for row, answer in zip(batch, answers, strict=True):
            self._suspects.clear(row.key)
            self._sticky.pop(row.key, None)
            if row.key and not answer.terminated:
                self._sticky[row.key] = (slot, slot.starts)
                if len(self._sticky) > REMEMBERED:
                    self._sticky.popitem(last=False)
            row.resolve(answer)

    def _failed(self, batch: list[WaitingRow], kind: type[RLJobError], message: str) -> None:
        """Handle a call that returned an error: a single row fails, several are tried alone.

        An infrastructure error, such as of a group that the code calls, is no row's fault: all rows fail with it.
        """
        if issubclass(kind, InfrastructureError):
            for row in batch:
                row.fail(kind, message)
            return
        if len(batch) > 1:
            self._try_alone(batch)
            return
        self.counters["data_failures"] += 1
        batch[0].fail(kind, message)

    def _broke(
        self,
        slot: _Slot,
        batch: list[WaitingRow],
        counter: str,
        message: str,
        strike: Callable[[WaitingRow, str], None],
    ) -> None:
        """Handle a call that ended the process: a single row fails, several are tried alone."""
        self.counters[counter] += 1
        logger.warning("env process %d is replaced: %s", slot.index, message)
        if len(batch) > 1:
            self._try_alone(batch)
        else:
            strike(batch[0], message)
        if self._timeouts_in_a_row >= HANGING_CALLS:
            self._fail_suspects(message)

    def _fail_suspects(self, message: str) -> None:
        """Fail the rows that wait to be tried alone, because the environment hangs."""
        for row in self._shared:
            if row.alone:
                row.fail(RolloutTimeout, f"{message}; so did the {self._timeouts_in_a_row - 1} calls before it")

    def _try_alone(self, batch: list[WaitingRow]) -> None:
        for row in batch:
            row.alone = True
        self._enqueue(row for row in batch if row.is_open)

    async def _start_process(self, slot: _Slot) -> None:
        start = time.monotonic()
        slot.process = await EnvProcess.start(
            self._source, deadline=self._start_deadline, call_member=self._call_member
        )
        self._start_seconds = max(self._start_seconds, time.monotonic() - start)
        slot.starts += 1
        self.counters["starts"] += 1
        if self._on_event is not None:
            self._on_event("started", slot.process.pid, slot.index)

    async def _end_process(self, slot: _Slot) -> None:
        """End the slot's process; rows that waited for it may go to any process."""
        process, slot.process = slot.process, None
        if process is not None:
            await process.kill()
            if self._on_event is not None:
                self._on_event("ended", process.pid, slot.index)
        orphans, slot.own = list(slot.own), deque()
        self._enqueue(orphans)

    def _fail_queued(self, message: str) -> None:
        for queue in (self._shared, *(slot.own for slot in self._slots)):
            while queue:
                queue.popleft().fail(InfrastructureError, f"{self._source.label}: {message}")
