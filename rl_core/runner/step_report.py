"""Reports the steps of a run: metrics to the trackers and to `/status`, timings to the trace."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rl_core.observability.trackers import Trackers
from rl_core.runner.progress import RunProgress
from rl_core.runner.status import StatusBoard
from rl_core.runner.step_state import GroupSpan
from rl_core.runner.trace import Span, Trace


@dataclass(slots=True)
class StepTimers:
    """Seconds of each part of one step, and the parts as spans of the trace."""

    seconds: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    """Parts that have ended since `take_spans` was called."""

    def next_step(self, carried: str) -> "StepTimers":
        """Return timers for the next step. The seconds of the part named `carried`, measured after this step was logged, are taken over."""
        return StepTimers({k: v for k, v in self.seconds.items() if k == f"time/{carried}"}, self.spans)

    def take_spans(self) -> list[Span]:
        """Return the parts that ended since the last call."""
        spans, self.spans = self.spans, []
        return spans

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the block's wall time to `time/<name>`."""
        start = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            self.seconds[f"time/{name}"] = self.seconds.get(f"time/{name}", 0.0) + end - start
            self.spans.append(Span(name, start, end))


@dataclass(frozen=True, slots=True)
class _Step:
    """What the trackers and the trace receive of one step."""

    number: int
    version: int
    metrics: Mapping[str, Any]
    spans: Sequence[Span]
    groups: Sequence[GroupSpan]


class StepReport:
    """Measures the parts of a step and reports its metrics. Called by the loop only."""

    def __init__(
        self, progress: RunProgress, board: StatusBoard, trackers: Trackers, trace: Trace, *, epoch: int
    ) -> None:
        self.timers = StepTimers()
        self._progress, self._board, self._trackers, self._trace, self._epoch = progress, board, trackers, trace, epoch
        self._unwritten: _Step | None = None

    def begin_step(self) -> None:
        """Begin to measure the next step."""
        self.timers = self.timers.next_step("checkpoint")

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Count the block's wall time as `time/<part>` of the step."""
        with self.timers.measure(part):
            yield

    def seconds(self, part: str) -> float:
        """Return the measured seconds of a part of the step, 0 for one that was not measured."""
        return self.timers.seconds.get(f"time/{part}", 0.0)

    def log(self, metrics: Mapping[str, Any], groups: Sequence[GroupSpan] = ()) -> None:
        """Report the metrics of the latest step, with its timings. `groups` are the prompt groups that it trained or refused.

        `/status` shows the finite numbers at once. The trackers and the trace receive them with the next `write`.
        """
        self.write()
        values = {"policy_version": self._progress.version, "epoch": self._epoch, **metrics, **self.timers.seconds}
        self._unwritten = _Step(self._progress.step, self._progress.version, values, self.timers.take_spans(), groups)
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        self._board.set(metrics={key: value for key, value in numbers.items() if math.isfinite(value)})

    def write(self) -> None:
        """Write the step that was logged to the trackers and the trace, unless it is written."""
        step, self._unwritten = self._unwritten, None
        if step is not None:
            self._trackers.log(step.number, step.metrics)
            self._trace.add(step.number, step.version, step.spans, step.groups)

    def trace(self) -> None:
        """Add to the trace the parts measured since the metrics were logged."""
        self._trace.add(self._progress.step, self._progress.version, self.timers.take_spans())
