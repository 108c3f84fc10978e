"""Runs a program from its start to its end: startup, loop, what is saved at the end, `/status` and the control calls."""

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
    """One run and its program, as the runner process drives them."""

    def __init__(self, run: Run, program: Program) -> None:
        self.run, self.program = run, program

    def execute(self) -> RunSummary:
        """Run to the last step or to a stop request; save and report in both cases."""
        run, program = self.run, self.program
        began = time.monotonic()
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
            seconds=time.monotonic() - began,
            accuracy_before=accuracy[0] if accuracy else None,
            accuracy_after=accuracy[-1] if accuracy else None,
        )

    def _early_end(self) -> str:
        """Return how a run that was asked to end is reported: Stopped, or Suspended or Interrupted when it is to be resumed."""
        kind, run = self.run.stops.kind, self.run
        if kind is StopKind.ROLLBACK:
            return "Interrupted"
        if kind is StopKind.FINISH or run.progress.step >= run.applied.spec.algorithm.steps:
            return "Stopped"
        return "Suspended" if kind is StopKind.SUSPEND else "Interrupted"

    def stop(self, reason: str, kind: StopKind = StopKind.FINISH) -> None:
        """Request the end of the run; from any thread, but not from a signal handler."""
        self.run.stops.stop(reason, kind)

    def status(self) -> dict[str, Any]:
        """Return `/status`."""
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
        """Return what is done once a second beside the loop."""
        run = self.run
        return PeriodicTasks(
            run.cluster, run.board, run.stops, channels=run.channels, also=self.program.periodic_tasks()
        )

    def close(self) -> None:
        """Stop background work."""
        self.program.close()
        self.run.close()
