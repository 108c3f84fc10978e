"""Writes the trace of a run to `traces/`: the parts of the loop, and each sample from its lease to the end of the step that trained it.

    runner          | step                                                   |   parts of the loop: rollout, train, sync, checkpoint ...
    rollout:0       | 0-7_g0: lease, generate, env, generate, env, siblings  |   one sample per slot
    actor           |              0-7: put, admit, hold, score, train       |   one group per slot, an arrow from its rollout

All times are on the runner's monotonic clock. Clocks of other hosts are not used: a rollout measures its times from the arrival of the
lease, and the trace places this arrival at the time when the runner granted the lease. The spans of a rollout are therefore too early by
the duration of one message.
"""

import concurrent.futures
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rl_core.observability.traces import TraceEvents, TraceFolder, TraceRows
from rl_core.runner.step_state import GroupSpan

logger = logging.getLogger(__name__)
MOST_WAITING = 4
"""Largest number of steps that wait to be written. Further steps are left out, so that slow storage does not fill the memory."""
CLOSE_SECONDS = 10.0
"""Seconds that the end of a run waits until the trace is written."""


class Span(NamedTuple):
    """One part of the loop. Times are in seconds on the runner's monotonic clock."""

    name: str
    began: float
    ended: float


class Trace:
    """Writes the trace on a thread of its own, so that the loop does not wait for storage."""

    def __init__(
        self,
        folder: TraceFolder,
        *,
        epoch: int,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Write to `folder`. `clock` is the clock of the times that are added; `wall()` returns seconds since 1970."""
        self._folder, self._epoch = folder, epoch
        self._rows = TraceRows()
        self._since_1970 = wall() - clock()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trace")
        self._waiting: list[Future[None]] = []
        self._num_dropped = 0

    @classmethod
    def in_folder(cls, path: Path, *, epoch: int) -> "Trace":
        """Return a trace that writes to the folder `path`."""
        return cls(TraceFolder(path), epoch=epoch)

    def add(self, step: int, version: int, parts: Sequence[Span], groups: Sequence[GroupSpan] = ()) -> None:
        """Add the `parts` of the loop in step `step` at policy `version`, and the groups that the step trained or refused.

        Called by the loop. Returns at once; a thread writes.
        """
        self._waiting = [write for write in self._waiting if not write.done()]
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(self._pool.submit(self._write, step, version, parts, groups))
        elif not self._num_dropped:
            self._num_dropped += 1
            logger.warning("the trace is written more slowly than steps end; it has gaps from step %s on", step)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write the waiting steps and close the file.

        Steps that are not written within `seconds` are left out, so that hanging storage does not delay the end of the run.
        """
        self._pool.shutdown(wait=False)
        _, unwritten = concurrent.futures.wait(self._waiting, seconds)
        if unwritten:
            self._pool.shutdown(wait=False, cancel_futures=True)
            logger.warning("the trace lacks its last %s writes: they took more than %.0f s", len(unwritten), seconds)
            return
        self._folder.close()

    def _write(self, step: int, version: int, parts: Sequence[Span], groups: Sequence[GroupSpan]) -> None:
        try:
            if self._folder.full:
                self._rows.name_again()
            events = TraceEvents(self._rows)
            shared = {"step": step, "version": version}
            loop = self._rows.row("runner", 1, "loop")
            for name, start, end in sorted(parts, key=lambda part: (part.began, -part.ended)):
                events.span(loop, name, start + self._since_1970, end + self._since_1970, shared)
            trained = {part.name: part for part in parts if part.name in ("inference", "train")}
            for group in sorted(groups, key=lambda group: group.times.given):
                self._group(events, group, trained, shared)
            self._folder.append(events.text(), name=f"e{self._epoch:04d}-s{step:07d}")
        except Exception:
            logger.exception("the trace lacks step %s; this is a bug", step)

    def _group(
        self, events: TraceEvents, group: GroupSpan, trained: Mapping[str, Span], shared: Mapping[str, Any]
    ) -> None:
        times, zero = group.times, self._since_1970
        leased = times.given + zero
        shift = leased - times.began
        sent = max(times.sent + shift, leased)
        stored = max(times.stored + shift, sent)
        decided = max(group.decided + zero, stored)
        first_row: tuple[int, int] | None = None
        for index, sample in enumerate(times.samples):
            versions = times.versions[index] if index < len(times.versions) else ()
            args = {"group": group.group_id, "sample": index, "versions": versions}
            row = self._rows.slot(times.rollout, leased, sent, of="sample")
            first_row = first_row or row
            events.span(row, f"{group.group_id}_g{index}", leased, sent, args)
            start = leased
            for place, mark in enumerate(sample):
                name = "lease" if place == 0 else "generate" if place % 2 else "env"
                ended = min(max(mark + shift, start), sent)
                events.span(row, name, start, ended)
                start = ended
            events.span(row, "siblings", start, sent)
        parts = [("put", sent, stored), ("admit", stored, decided)]
        if group.trains and trained:
            train_start = min(part.began for part in trained.values()) + zero
            parts.append(("hold", decided, train_start))
            names = (("inference", "score"), ("train", "train"))
            parts += [
                (name, trained[key].began + zero, trained[key].ended + zero) for key, name in names if key in trained
            ]
        ended = max(end for _, _, end in parts)
        span_args = {
            "group": group.group_id,
            "samples": len(times.samples),
            "trained": group.trains,
            "rank": group.rank,
            **shared,
        }
        row = self._rows.slot("actor", sent, ended, of="group")
        events.span(row, group.group_id, sent, ended, span_args)
        for name, began, end in parts:
            events.span(row, name, began, end)
        if first_row is not None:
            events.arrow(f"{self._epoch}/{group.group_id}/{times.given}", first_row, row, sent)
