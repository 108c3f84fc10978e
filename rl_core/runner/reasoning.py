"""The text program: GRPO and related algorithms, on policy. `asynchronous.py` is the variant with generation ahead of training.

`run_step` is one step at policy version v: lease prompts, receive finished prompt groups, train, acknowledge, publish version v + 1.
"""

import time
from collections.abc import Callable
from typing import Any, Self

from rl_core.api.errors import DeadlineExceeded
from rl_core.api.job import RLJobSpec
from rl_core.observability.statistics import aggregate_rollout_metrics
from rl_core.plan.slots import device_count
from rl_core.runner.device_schedule import DeviceSchedule
from rl_core.runner.dispatcher import serve_leases
from rl_core.runner.prompts import Prompts
from rl_core.runner.run import Run
from rl_core.runner.saving import Saving
from rl_core.runner.startup import Startup
from rl_core.runner.status import Phase
from rl_core.runner.step_state import StepState, reward_metrics
from rl_core.runner.sync import WeightSync
from rl_core.runner.teacher_signal import RewardSignal, TeacherSignal
from rl_core.runner.text import build_text_program
from rl_core.runner.training_program import TrainingProgram
from rl_core.workers.group import WorkerGroupFuncResult

UNBOUNDED_S = 30 * 86400.0
"""Timeout, in seconds, of a call that may have to wait for missing members in a cluster without a limit."""
SLICE_S = 1.0
"""Seconds between two checks of the members while groups are generated."""
WRITE_AFTER_S = 0.05
"""Seconds of generation after which the metrics of the step before are written. Writing earlier would delay the prompts of a short step."""


class ReasoningRunner(TrainingProgram):
    """The program that trains a language model on its completions, with one or more turns. Training is on policy."""

    def __init__(
        self,
        run: Run,
        saving: Saving,
        *,
        startup: Startup,
        schedule: DeviceSchedule,
        sync: WeightSync,
        prompts: Prompts,
    ) -> None:
        """`prompts` leases prompt groups and moves their records, `sync` publishes weights to the rollouts."""
        super().__init__(run, saving, startup=startup, schedule=schedule, sync=sync)
        self.prompts = prompts
        self.steps, self.workload = prompts.steps, prompts.workload
        self.teacher_signal, self.reward_signal = TeacherSignal(), RewardSignal()
        self._trained: tuple[int, int] | None = None
        """(step, policy version) of the last training step, until its samples were requested; None afterwards."""
        saving.register("ledger", prompts.steps)

    @classmethod
    def build(cls, run: Run) -> Self:
        """Create the program for the prompts, worker groups and placement of the job, and register its calls with the hub."""
        program, hub = build_text_program(cls, run), run.cluster.hub
        hub.add_listeners(joined=program.sync.members.joined, lost=program.sync.members.lost)
        serve_leases(hub, program.prompts.dispatcher)
        return program

    @property
    def validates(self) -> bool:
        """Whether the job has a validation split."""
        return self.prompts.validation is not None

    def run_step(self) -> None:
        """One step: generate -> admit -> train -> acknowledge -> publish -> validate, log, checkpoint."""
        report = self.report
        report.begin_step()
        self.workload.begin_step()
        with report.measure("step"):
            self.startup.await_rollouts(at=self._while_short)
            received = self.generate()
            trained = self.train()
            step = self.acknowledge()
            self.publish()
        usage = self.workload.of_step().metrics()
        report.timers.seconds["time/reward"] = received.get("rollout/env_seconds_per_sample/mean", 0.0)
        metrics = reward_metrics(list(step.admitted.values())) | received | trained | self.steps.metrics() | usage
        self.board.step_took(report.seconds("step"))
        self.teacher_signal.observe(metrics)
        self.reward_signal.observe(metrics)
        self.check_metrics(metrics)
        spec = self.applied.spec
        is_last = self.progress.step == spec.algorithm.steps
        try:
            if is_last or self.progress.step % spec.validation.every_steps == 0:
                metrics |= self.evaluate()
        finally:  # also when the validation is interrupted
            report.log(metrics | self._rates(step), step.spans)
        self.save_if_due()
        self.stops.raise_if_stop_requested()

    def generate(self) -> dict[str, float]:
        """Lease the step's prompts and wait until the data ranks have received its groups; return `rollout/*` over all ranks."""
        spec, step = self.applied.spec, self.progress.step + 1
        per_rank = spec.algorithm.prompts_per_step // spec.actor.data_parallel
        limit = spec.runtime.deadlines.rollout
        seconds = UNBOUNDED_S if self.run.roster.patient else limit
        waiting = self.workload.trainer_waiting()
        with self.board.during(Phase.GENERATING), self.schedule.generating(), self.report.measure("rollout"), waiting:
            receiving = self.actor.within(seconds).recv_batch(self.prompts.trajectories, per_rank, step, seconds)
            self.open_step()
            self._ask_for_samples()
            if not self.stops.wait_done(receiving, WRITE_AFTER_S):
                self.report.write()
            received = self._receive(receiving, limit)
            self.cancel_rest()
        if self.sync.check is not None:
            with self.report.measure("check"):
                self.sync.check.confirm()
        return aggregate_rollout_metrics([metrics for metrics in received if metrics])

    def write_last_step(self) -> None:
        """Write the metrics and the trace of the last step and request its samples, unless this was done already."""
        self.report.write()
        self._ask_for_samples()

    def _ask_for_samples(self) -> None:
        step = self.progress.step
        self._keep_failed(step)
        if (trained := self._trained) is not None:
            self._trained = None
            actor = self.actor.within(self.applied.spec.runtime.deadlines.rpc)
            self.prompts.samples.add_step(*trained, actor.take_samples)
        self._keep_filtered(step)

    def _keep_failed(self, step: int) -> None:
        self.prompts.samples.add_failed(step, self.progress.version, self.steps.take_failed())

    def _keep_filtered(self, step: int) -> None:
        """Write the samples of groups that dynamic sampling discarded up to `step`. Call it after the samples of trained groups."""
        groups = self.steps.take_filtered(step)
        tokens = {group.token: group.group_id for group in groups}
        actor = self.actor.within(self.applied.spec.runtime.deadlines.rpc)
        self.prompts.samples.add_filtered(groups, lambda: actor.read_samples(self.prompts.trajectories, tokens))

    def _while_short(self) -> None:
        """Write the last step and handle requests. Called while too few rollouts serve the weights."""
        self.write_last_step()
        self.handle_requests()

    def cancel_rest(self) -> None:
        """Have the rollouts cancel surplus groups of the step. A rollout that misses the call cancels them when it renews its leases."""
        seconds = self.applied.spec.runtime.deadlines.rpc
        for name, tokens in self.steps.cancel_rest().items():
            self.run.cluster.submit(name, "drop_groups", (tokens,), {}, timeout=seconds)

    def open_step(self) -> None:
        """Open the next step, which leases its prompts. Then start the scheduled content check, so that it does not delay the prompts."""
        self.steps.open(self.progress.step + 1, self.progress.version)
        if self.sync.check is not None:
            self.sync.check.begin()

    def _receive(self, receiving: WorkerGroupFuncResult, limit: float) -> list[dict[str, float]]:
        """Wait until all data ranks have their groups; return the metrics by rank. Raises DeadlineExceeded after `limit` seconds.

        In a cluster, times with too few members are the phase Degraded and do not count. The limit then starts again, because lost groups
        are generated again.
        """
        roster = self.run.roster
        if not roster.patient:
            return self.stops.wait(receiving, limit)
        deadline = time.monotonic() + limit
        complete = False
        while not complete and (remaining := deadline - time.monotonic()) > 0:
            if roster.short():
                with self.board.during(Phase.DEGRADED):
                    while not complete and roster.short():
                        complete = self.stops.wait_done(receiving, SLICE_S)
                        self.handle_requests()
                deadline = time.monotonic() + limit
            else:
                complete = self.stops.wait_done(receiving, min(SLICE_S, remaining))
        if not complete:
            try:
                return self.stops.wait(receiving, 0.0)
            except DeadlineExceeded as error:
                raise DeadlineExceeded(
                    f"a step's groups must arrive within deadlines.rollout {limit:.0f} s: {error}"
                ) from error
        return self.stops.wait(receiving, 0.0)

    def train(self) -> dict[str, float]:
        """Train as `TrainingProgram.train` does, and remember the step, so that its samples are requested later."""
        metrics = super().train()
        self._trained = self.progress.step + 1, self.progress.version
        return metrics

    def acknowledge(self) -> StepState:
        """Write the step's groups to the ledger file as trained. After this call the step is final."""
        with self.board.during(Phase.TRAINING):  # a stop waits until the ledger is written
            step = self.steps.close()
            lines = [
                {
                    "step": step.step,
                    "group_id": group.group_id,
                    "prompt_index": self.steps.prompt(group.prompt_index)["idx"],
                    "attempt": group.attempt,
                    "epoch": self.run.epoch,
                    "policy_version_min": step.admitted[group.group_id].v_min,
                    "policy_version_max": step.admitted[group.group_id].v_max,
                }
                for group in self.steps.acknowledge(step.step)
            ]
            self.prompts.ledger_file.write(lines)
            self.progress.step, self.progress.version = step.step, step.version + 1
            self.progress.reward = reward_metrics(list(step.admitted.values())).get("reward/mean")
        return step

    def evaluate(self) -> dict[str, float]:
        """Validate the current weights on the validation split; return `val/*`, empty without such a split."""
        if self.prompts.validation is None:
            return {}
        with self.board.during(Phase.VALIDATING), self.schedule.generating(), self.report.measure("validation"):
            metrics = self.prompts.validation.measure(
                self.progress.version,
                cancelled=lambda: self.stops.stop_requested or self.stops.failed,
                short=self.run.roster.short,
            )
            self.stops.check()
        self.prompts.samples.add_validation(self.progress.step, self.progress.version, self.prompts.validation.kept)
        if "val/accuracy" in metrics:
            self.progress.accuracy.append(metrics["val/accuracy"])
        return metrics

    def _rates(self, step: StepState) -> dict[str, float]:
        spec = self.applied.spec
        tokens = sum(entry.tokens for entry in step.admitted.values())
        seconds = self.report.seconds("step")
        ages = [step.version - entry.v_min for entry in step.admitted.values()]
        sampling = spec.algorithm.dynamic_sampling.enabled
        return {
            "train/staleness_mean": sum(ages) / max(len(ages), 1),
            "train/staleness_max": float(max(ages, default=0)),
            "rollout/filtered_groups": float(step.filtered),
            **(step.sampling_metrics(spec.algorithm.prompts_per_step) if sampling else {}),
            "data/dropped_overlong": float(self.prompts.dropped_overlong),
            "rollout/stale_groups": float(step.stale),
            "rollout/cancelled_groups": float(step.cancelled),
            "perf/tokens_per_second": tokens / seconds,
            "perf/tokens_per_second_per_device": tokens / seconds / device_count(spec),
            **self.sync.metrics(),
            **self.schedule.metrics(),
            **self.idle(),
            **self.board.totals(),
        }

    # --- what the runner process calls -------------------------------------------------------------------------------

    def apply(self, spec: RLJobSpec, before: RLJobSpec) -> None:
        """Apply a changed learning rate and number of steps to the actors, and changed algorithm settings to the prompt groups."""
        super().apply(spec, before)
        self.steps.adopt(spec.algorithm)

    def finish(self, *, resumable: bool) -> None:
        """Save the results of the run, after the content check of the last version."""
        if not resumable and self.sync.check is not None:
            self.sync.check.confirm()
        super().finish(resumable=resumable)

    def status(self) -> dict[str, Any]:
        """Return the ledger, the workload and the shared devices for `/status`."""
        return self.prompts.status() | super().status()

    def periodic_tasks(self) -> tuple[Callable[[], None], ...]:
        """Return the expiry of leases and the repetition of failed record moves."""
        return (self.prompts.dispatcher.tick, self.prompts.mover.retry)

    def close(self) -> None:
        """Stop the joins and the content check, and close the files of ledger and samples."""
        super().close()
        self._keep_failed(self.progress.step + 1)
        self._keep_filtered(self.progress.step + 1)
        self.prompts.samples.close()
        if self.sync.check is not None:
            self.sync.check.close()
        self.prompts.ledger_file.close()
