"""GRPO and its relatives, on policy: one step after the other. `asynchronous.py` is the same with generation ahead of training.

One step at policy version v reads as `run_step` reads: give prompts out, receive finished groups, train, acknowledge, publish v + 1.
"""

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from rl_core.api.errors import DeadlineExceeded
from rl_core.observability.statistics import aggregate_rollout_metrics
from rl_core.plan.slots import device_count
from rl_core.runner.base import Runner
from rl_core.runner.parts import Parts
from rl_core.runner.status import Phase
from rl_core.runner.stopping import Stopped
from rl_core.runner.training_account import GroupSpan, StepState, reward_metrics
from rl_core.runner.validation import Validation
from rl_core.workers.group import WorkerGroupFuncResult

logger = logging.getLogger(__name__)
UNBOUNDED_S = 30 * 86400.0
"""Seconds of a call that may outlast any shortage of members."""
SLICE_S = 1.0
"""Seconds between two looks while groups are generated."""


class ReasoningRunner(Runner):
    """Trains on single- or multi-turn completions of language models."""

    def __init__(self, parts: Parts, validation: Validation | None, *, dropped_overlong: int = 0) -> None:
        """`validation`: None without a validation split; `dropped_overlong`: training prompts left out for their length."""
        super().__init__(parts)
        self.validation, self.dropped_overlong = validation, dropped_overlong
        self.dispatcher, self.sync = parts.dispatcher, parts.sync

    def loop(self) -> None:
        """Measure the starting weights, then step after step."""
        if self.progress.step == 0 and self.applied.spec.validation.before_training and self.validation is not None:
            self._log(self.evaluate())
        self.handle_requests()
        # STARTING has no stall bound and the operator takes it for asleep, so the run counts as generating between two phases.
        with self.board.during(Phase.GENERATING):
            while self.progress.step < self.applied.spec.algorithm.steps:
                self.run_step()
                self.handle_requests()

    def run_step(self) -> None:
        """One step: generate -> admit -> train -> acknowledge -> publish -> validate, log, checkpoint."""
        self.timers = self.timers.next_step("checkpoint")
        self.dispatcher.begin_usage()
        with self.timers.measure("step"):
            self.parts.startup.await_rollouts(at=self.handle_requests)
            received = self.generate()
            trained = self.train()
            taken = self.acknowledge()
            self.publish()
        usage = self.dispatcher.usage()
        self.timers.seconds["time/reward"] = received.get("rollout/env_seconds_per_sample/mean", 0.0)
        metrics = reward_metrics(list(taken.admitted.values())) | received | trained | self.dispatcher.metrics() | usage
        self.board.step_took(self.timers.seconds["time/step"])
        self.watch_numbers(metrics)
        spec = self.applied.spec
        last = self.progress.step == spec.algorithm.steps
        try:
            if last or self.progress.step % spec.validation.every_steps == 0:
                metrics |= self.evaluate()
        finally:  # also when validation is left, and before the checkpoint: a resume from it must find the line
            self._log(metrics | self._rates(taken))
            self._trace(taken.spans)
        self.saving.settle()
        if (due := self.saving.due()) is not None:
            with self.timers.measure("checkpoint"):
                self.saving.try_save(due)
            self._trace()
        self.stops.leave_if_asked()

    def generate(self) -> dict[str, float]:
        """Give the step's prompts out and wait until the data ranks hold its groups; return `rollout/*` over all ranks."""
        spec, step = self.applied.spec, self.progress.step + 1
        per_rank = spec.algorithm.prompts_per_step // spec.actor.data_parallel
        limit = spec.runtime.deadlines.rollout
        seconds = UNBOUNDED_S if self.parts.roster.patient else limit
        waiting = self.dispatcher.trainer_waits()
        with self.board.during(Phase.GENERATING), self.schedule.generating(), self.timers.measure("rollout"), waiting:
            receiving = self.actor.within(seconds).recv_batch(self.parts.trajectories, per_rank, step, seconds)
            self.open_step()
            received = self._receive(receiving, limit)
            self.cancel_rest()
        if self.parts.check is not None:
            with self.timers.measure("check"):
                self.parts.check.confirm()
        return aggregate_rollout_metrics([metrics for metrics in received if metrics])

    def cancel_rest(self) -> None:
        """Have the rollouts drop what they generate beyond the step's groups; a rollout that does not hear of it drops it when it renews."""
        seconds = self.applied.spec.runtime.deadlines.rpc
        for name, tokens in self.dispatcher.cancel_rest().items():
            self.parts.cluster.submit(name, "drop_groups", (tokens,), {}, timeout=seconds)

    def open_step(self) -> None:
        """Give out the prompts of the next step; then, as engines would answer it first, begin the content check that is due."""
        self.dispatcher.open(self.progress.step + 1, self.progress.version)
        if self.parts.check is not None:
            self.parts.check.begin()

    def _receive(self, receiving: WorkerGroupFuncResult, limit: float) -> list[dict[str, float]]:
        """Return each data rank's metrics once all hold their groups, within `limit` seconds.

        In a cluster times of shortage are Degraded and do not count; afterwards the limit begins anew, as the groups do.
        """
        if not self.parts.roster.patient:
            return self.stops.wait(receiving, limit)
        deadline = time.monotonic() + limit
        while True:
            if self.parts.roster.short():
                with self.board.during(Phase.DEGRADED):
                    while self.parts.roster.short() and not receiving.done():
                        self._look(receiving, SLICE_S)
                        self.handle_requests()
                deadline = time.monotonic() + limit
            if receiving.done() or (left := deadline - time.monotonic()) <= 0:
                break
            self._look(receiving, min(SLICE_S, left))
        try:
            return self.stops.wait(receiving, 0.0)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"a step's groups must arrive within deadlines.rollout {limit:.0f} s: {error}"
            ) from error

    def _look(self, receiving: WorkerGroupFuncResult, seconds: float) -> None:
        """Wait for the groups a moment. Raises what a rank raised, its own DeadlineExceeded included."""
        began = time.monotonic()
        try:
            self.stops.wait(receiving, seconds)
        except DeadlineExceeded:
            if receiving.done() or time.monotonic() - began < seconds:  # not the end of this moment
                raise

    def train(self) -> dict[str, float]:
        """Advantages, loss and optimizer steps on the received groups; return `train/*` and `perf/*`. Raises Stopped when it was cancelled."""
        algorithm = self.applied.spec.algorithm
        with self.board.during(Phase.TRAINING), self.schedule.training():
            self.stops.leave_if_asked()  # a stop requested before TRAINING could not cancel it; honour it now
            if algorithm.needs_scoring:
                with self.timers.measure("inference"):
                    self.stops.wait(self.actor.compute_log_probs())
                self.stops.leave_if_asked()
            with self.timers.measure("train"):
                # Both are sent at once; a rank runs them in this order.
                preparing = self.actor.compute_advantages_and_returns()
                training = self.actor.run_training(self.progress.step + 1)
                self.stops.wait(preparing)
                metrics = self.stops.wait(training)[0]
        if metrics is None:
            raise Stopped(f"{self.stops.reason}, in the training of step {self.progress.step + 1}")
        return {
            f"train/{key.removeprefix('actor/')}" if key.startswith("actor/") else key: value
            for key, value in metrics.items()
        }

    def acknowledge(self) -> StepState:
        """Write the step's groups to the ledger as trained; the step is final from here on."""
        with self.board.during(Phase.TRAINING):  # a stop waits until the ledger is written
            taken = self.dispatcher.close()
            lines = [
                {
                    "step": taken.step,
                    "group_id": group.group_id,
                    "prompt_index": self.dispatcher.prompt(group.prompt_index)["idx"],
                    "attempt": group.attempt,
                    "epoch": self.parts.epoch,
                    "policy_version_min": taken.admitted[group.group_id].v_min,
                    "policy_version_max": taken.admitted[group.group_id].v_max,
                }
                for group in self.dispatcher.acknowledge(taken.step)
            ]
            self.parts.ledger_file.write(lines)
            self.progress.step, self.progress.version = taken.step, taken.version + 1
            self.progress.reward = reward_metrics(list(taken.admitted.values())).get("reward/mean")
        return taken

    def publish(self) -> None:
        """Send the new version to the rollouts; generation resumes with it."""
        progress = self.progress
        with self.board.during(Phase.SYNCING), self.schedule.syncing(), self.timers.measure("sync"):
            self.sync.publish(progress.version)
        self.board.set(step=progress.step, policyVersion=progress.version, reward=progress.reward)

    def evaluate(self) -> dict[str, float]:
        """Measure the served weights on the validation split; empty without one."""
        if self.validation is None:
            return {}
        with self.board.during(Phase.VALIDATING), self.schedule.generating(), self.timers.measure("validation"):
            metrics = self.validation.measure(
                self.progress.version,
                cancelled=lambda: self.stops.asked or self.stops.failed,
                short=self.parts.roster.short,
            )
            self.stops.check()
        if "val/accuracy" in metrics:
            self.progress.accuracy.append(metrics["val/accuracy"])
        return metrics

    def _rates(self, taken: StepState) -> dict[str, float]:
        spec = self.applied.spec
        tokens = sum(entry.tokens for entry in taken.admitted.values())
        seconds = self.timers.seconds["time/step"]
        ages = [taken.version - entry.v_min for entry in taken.admitted.values()]
        sampling = spec.algorithm.dynamic_sampling.enabled
        return {
            "train/staleness_mean": sum(ages) / max(len(ages), 1),
            "train/staleness_max": float(max(ages, default=0)),
            "rollout/filtered_groups": float(taken.filtered),
            **(taken.sampling_metrics(spec.algorithm.prompts_per_step) if sampling else {}),
            "data/dropped_overlong": float(self.dropped_overlong),
            "rollout/stale_groups": float(taken.stale),
            "rollout/cancelled_groups": float(taken.cancelled),
            "perf/tokens_per_second": tokens / seconds,
            "perf/tokens_per_second_per_device": tokens / seconds / device_count(spec),
            **self.sync.metrics(),
            **self.schedule.metrics(),
            **self.idle(),
            **self.board.totals(),
        }

    def idle(self) -> dict[str, float]:
        """Return what each side waited for the other: on policy a trainer idles while rollouts generate, and the reverse."""
        seconds = self.timers.seconds
        busy_actor = [seconds.get(f"time/{part}", 0.0) for part in ("inference", "train", "sync")]
        return {"time/idle_actor": seconds["time/rollout"], "time/idle_rollout": sum(busy_actor)}

    def _trace(self, groups: Sequence[GroupSpan] = ()) -> None:
        """Show what the loop did since the last call, and the groups of its step."""
        self.parts.trace.add(self.progress.step, self.progress.version, self.timers.take_spans(), groups)

    def _log(self, metrics: dict[str, Any]) -> None:
        values = {"policy_version": self.progress.version, "epoch": self.parts.epoch, **metrics, **self.timers.seconds}
        self.parts.trackers.log(self.progress.step, values)
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        self.board.set(metrics={key: value for key, value in numbers.items() if math.isfinite(value)})


GRPORunner = ReasoningRunner
