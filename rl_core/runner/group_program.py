"""The base of programs that run over the groups which their job declares in `spec.groups`.

    class Count(GroupProgram):
        def loop(self):
            for step in self.steps():
                with step as metrics:
                    metrics["total"] = sum(self.each("counter", "add", [1, 2, 3]))

Epochs, deadlines, failure rules, checkpoints, metrics and `/status` are those of the built-in programs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

from rl_core.api.errors import ConfigError
from rl_core.runner.device_schedule import DisaggregatedSchedule
from rl_core.runner.item_calls import call_each
from rl_core.runner.joining import WeightlessJoin
from rl_core.runner.members import Members
from rl_core.runner.program import Program
from rl_core.runner.run import Run
from rl_core.runner.saving import Saving
from rl_core.runner.status import Phase

Metrics = dict[str, float]


class GroupProgram(Program):
    """A program that uses the groups declared in `spec.groups`.

    A subclass implements `loop`. In its `__init__` it registers the objects whose state checkpoints store: `self.saving.register`.
    """

    def __init__(self, run: Run, saving: Saving, members: Members) -> None:
        """`members` lets the members of the groups join the run. The groups are in `run.groups`, by name."""
        super().__init__(run, saving)
        self.members = members

    @classmethod
    def build(cls, run: Run) -> Self:
        """Launch the groups that the job declares. Processes of actor, rollout and env, if the job has any, join and do nothing."""
        strategies = {}
        for name, planned in run.planned.items():
            group = run.launch_idle(name) if planned.config is None else run.launch(name, dict(planned.config))
            if planned.elastic:
                strategies[name] = WeightlessJoin(group)
        deadlines = run.job.spec.runtime.deadlines
        members = Members(run.cluster, strategies, run.roster, run.board, deadlines, fail=run.stops.fail)
        program = cls(run, Saving.of(run, schedule=DisaggregatedSchedule()), members)
        run.cluster.hub.add_listeners(joined=members.joined, lost=members.lost)
        return program

    def start(self) -> None:
        """Wait for the members of all groups; resume from a checkpoint if one was asked for."""
        seconds = self.run.job.spec.runtime.deadlines.wait_ready
        self.members.await_gangs(seconds, at=self.handle_requests)
        self.members.await_weightless(seconds, at=self.handle_requests)
        self.saving.restore()
        self.saving.loaded = True

    # --- what the loop calls ---------------------------------------------------------------------------------------

    def each(self, group: str, method: str, items: Sequence[Any], *, seconds: float | None = None) -> list[Any]:
        """Call `method(item)` for each item on the present members of an elastic group, and return the results in order; see `call_each`.

        `seconds` limits each call; None means `deadlines.groupMethod`. Raises Stopped when a stop of the run is requested.
        """
        deadlines, patient = self.applied.spec.runtime.deadlines, self.run.roster.patient
        with self.board.during(Phase.GENERATING, on=group):
            return call_each(
                self.run.cluster,
                group,
                method,
                items,
                seconds=deadlines.group_method if seconds is None else seconds,
                shortage=None if patient else deadlines.degraded,
                at=self.stops.check,
            )

    def steps(self) -> Iterator[AbstractContextManager[Metrics]]:
        """Yield the remaining steps of `algorithm.steps`. A step is a block `with step as metrics`; see `step`."""
        with self.board.during(Phase.GENERATING, on=""):
            while self.progress.step < self.applied.spec.algorithm.steps:
                self.handle_requests()
                yield self.step()

    @contextmanager
    def step(self) -> Iterator[Metrics]:
        """Run the block as one step. Its metrics, `reward/mean` among them, go to the trackers; a checkpoint is saved when one is due."""
        report, progress, metrics = self.report, self.progress, Metrics()
        report.begin_step()
        with report.measure("step"):
            yield metrics
        check_numbers(metrics)
        progress.step += 1
        progress.reward = metrics.get("reward/mean")
        self.board.step_took(report.seconds("step"))
        self.check_metrics(metrics)
        self.board.set(step=progress.step, reward=progress.reward)
        report.log(metrics | self.board.totals())
        report.write()
        self.saving.settle()
        if (due_step := self.saving.due()) is not None:
            with report.measure("checkpoint"):
                self.saving.try_save(due_step)
            report.trace()
        self.stops.raise_if_stop_requested()

    def close(self) -> None:
        """Let no further members join."""
        self.members.close()


def check_numbers(metrics: Mapping[str, object]) -> None:
    """Raise ConfigError for a metric that is no number."""
    for name, value in metrics.items():
        if isinstance(value, str) or not hasattr(value, "__float__"):
            raise ConfigError(f"metrics[{name!r}] of a step must be a number, got {value!r}; convert it with float()")
