"""Runs a program: start, loop, and saving at the end. Also answers `/status` and the control calls."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_core.runner.control_actions import ControlActions, drain
from rl_core.runner.output_files import OutputFiles
from rl_core.runner.periodic import PeriodicTasks
from rl_core.runner.program import Program
from rl_core.runner.run import Run
from rl_core.runner.status import Phase
from rl_core.runner.stopping import StopKind, Stopped

logger = logging.getLogger(__name__)
RESUMABLE = frozenset({"Suspended", "Interrupted"})
"""Ends after which the run is to be resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """How a run ended."""

    status: str
    """Finished; Stopped, Suspended or Interrupted when it was asked to end early."""
    step: int
    version: int
    seconds: float
    accuracy_before: float | None
    accuracy_after: float | None


class Runner:
    """Executes the program of one run in the runner process."""

    def __init__(self, run: Run, program: Program) -> None:
        self.run, self.program = run, program

    def execute(self) -> RunSummary:
        """Run the program to its last step or until a stop is requested, save the result, and return a summary."""
        run, program = self.run, self.program
        start = time.monotonic()
        run.trackers.log_config(run.job.model_dump(mode="json", by_alias=True))
        status = "Finished"
        try:
            program.start()
            program.loop()
        except Stopped as stop:
            status = self._early_end()
            logger.info("stopping after step %s: %s", run.progress.step, stop)
        if program.saving.loaded:  # before that there is nothing to save
            with run.board.during(Phase.CHECKPOINTING):
                program.finish(resumable=status in RESUMABLE)
        accuracy = run.progress.accuracy
        return RunSummary(
            status=status,
            step=run.progress.step,
            version=run.progress.version,
            seconds=time.monotonic() - start,
            accuracy_before=accuracy[0] if accuracy else None,
            accuracy_after=accuracy[-1] if accuracy else None,
        )

    def _early_end(self) -> str:
        """Return the status of a run that ended by a request: Suspended or Interrupted if it is to be resumed, else Stopped."""
        kind, run = self.run.stops.kind, self.run
        if kind is StopKind.ROLLBACK:
            return "Interrupted"
        if kind is StopKind.FINISH or run.progress.step >= run.applied.spec.algorithm.steps:
            return "Stopped"
        return "Suspended" if kind is StopKind.SUSPEND else "Interrupted"

    def stop(self, reason: str, kind: StopKind = StopKind.FINISH) -> None:
        """Request the end of the run. May be called from any thread, but not from a signal handler."""
        self.run.stops.stop(reason, kind)

    def status(self) -> dict[str, Any]:
        """Return the answer to `GET /status`, a JSON-able dictionary."""
        return {
            **self.run.board.snapshot(),
            "disabledTrackers": self.run.trackers.disabled,
            **self.program.status(),
        }

    def actions(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return the control calls by `METHOD /path`."""
        run = self.run
        calls = ControlActions(
            run.applied,
            run.stops,
            ask_checkpoint=self.program.saving.checkpoints.request,
            drain=lambda pods: drain(pods, cluster=run.cluster, roster=run.roster),
            applied_generation=lambda: int(run.board.fact("appliedGeneration")),
        )
        return {**calls.by_path(), "POST /files": OutputFiles(run.output).read}

    def periodic_tasks(self) -> PeriodicTasks:
        """Return the tasks that are run once a second, on another thread than the loop."""
        run = self.run
        return PeriodicTasks(
            run.cluster, run.board, run.stops, channels=run.channels, also=self.program.periodic_tasks()
        )

    def close(self) -> None:
        """Stop background work."""
        self.program.close()
        self.run.close()
