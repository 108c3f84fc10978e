"""GRPO and its relatives, on policy: the loop of design.md section 6.

One step at policy version v reads as `run_step` reads: give prompts out, receive finished groups, train, acknowledge, publish v + 1.
"""

import logging
import math
import time
from typing import Any

from rl_core.observability.statistics import aggregate_rollout_metrics
from rl_core.runner.base import RESUMABLE, Runner, RunSummary, StepTimers, Stopped
from rl_core.runner.intake import StepState, reward_metrics
from rl_core.runner.status import Phase
from rl_core.runner.sync import sync_metrics
from rl_core.runner.waiting import PATIENCE

logger = logging.getLogger(__name__)


class ReasoningRunner(Runner):
    """Trains on single- or multi-turn completions of language models."""

    def run(self) -> RunSummary:
        """Run to the last step, or to a stop request; save, export and report in both cases."""
        began = time.monotonic()
        self.trackers.log_config(self.job.model_dump(mode="json", by_alias=True))
        status = "Finished"
        try:
            self.init_workers()
            if self.step == 0 and self.spec.validation.before_training and self.validation is not None:
                self._log(self.evaluate())
            self.take_changes()
            with self.board.during(
                Phase.GENERATING
            ):  # also between two phases: nothing starts there, and a hang is a stall
                while self.step < self.spec.algorithm.steps:
                    self.run_step()
                    self.take_changes()
        except Stopped as stop:
            status = self.ended_early()
            logger.info("stopping after step %s: %s", self.step, stop)
        with self.board.during(Phase.CHECKPOINTING):
            self.finish(resumable=status in RESUMABLE)
        return RunSummary(
            status=status,
            step=self.step,
            version=self.version,
            seconds=time.monotonic() - began,
            accuracy_before=self.accuracy[0] if self.accuracy else None,
            accuracy_after=self.accuracy[-1] if self.accuracy else None,
        )

    def run_step(self) -> None:
        """One step: generate -> admit -> train -> acknowledge -> publish -> validate, checkpoint, log."""
        self.timers = StepTimers(self.timers.carried("checkpoint"))
        with self.timers.measure("step"):
            self.await_rollouts()
            received = self.generate()
            trained = self.train()
            taken = self.acknowledge()
            self.publish()
        self.timers.seconds["time/reward"] = received.get("rollout/env_seconds_per_sample/mean", 0.0)
        metrics = reward_metrics(list(taken.admitted.values())) | received | trained | self.intake.metrics()
        self.board.step_took(self.timers.seconds["time/step"])
        self.watch_numbers(metrics)
        last = self.step == self.spec.algorithm.steps
        try:
            if last or self.step % self.spec.validation.every_steps == 0:
                metrics |= self.evaluate()
        finally:  # also of a validation that was left, and before the checkpoint: a resume from it must find the line
            self._log(metrics | self._rates(taken))
        if self.checkpoint_due():
            self.try_checkpoint()
        self.leave_if_stopping()

    def generate(self) -> dict[str, float]:
        """Give the step's prompts out and wait until the data ranks hold its groups; return `rollout/*` over all ranks."""
        with self.board.during(Phase.GENERATING), self.timers.measure("rollout"):
            per_rank = self.spec.algorithm.prompts_per_step // self.spec.actor.data_parallel
            limit = self.spec.runtime.deadlines.rollout
            seconds = PATIENCE if self.attendance.patient else limit
            receiving = self.actor.within(seconds).recv_batch(self.trajectories, per_rank, self.step + 1, seconds)
            self.intake.open(self.step + 1, self.version)
            self.sync.begin_check()  # not earlier: the engines would answer it before the prompts
            received = self.attendance.await_groups(receiving, self.await_result, limit)
        self.sync.confirm()
        return aggregate_rollout_metrics([told for told in received if told])

    def train(self) -> dict[str, float]:
        """Advantages, loss and optimizer steps on the received groups; return `train/*` and `perf/*`. Raises Stopped when it was cancelled."""
        with self.board.during(Phase.TRAINING):
            self.leave_if_stopping()  # who asked before could not reach the actors
            if self.spec.algorithm.recompute_log_probs or self.spec.algorithm.needs_reference:
                with self.timers.measure("inference"):
                    self.await_result(self.actor.compute_log_probs())
                self.leave_if_stopping()
            with self.timers.measure("train"):
                # Both are sent at once; a rank runs them in this order.
                preparing, training = (
                    self.actor.compute_advantages_and_returns(),
                    self.actor.run_training(self.step + 1),
                )
                self.await_result(preparing)
                metrics = self.await_result(training)[0]
        if metrics is None:
            raise Stopped(f"{self.stop_reason}, in the training of step {self.step + 1}")
        return {
            f"train/{key.removeprefix('actor/')}" if key.startswith("actor/") else key: value
            for key, value in metrics.items()
        }

    def acknowledge(self) -> StepState:
        """Write the step's groups to the ledger as trained; the step is final from here on."""
        with self.board.during(Phase.TRAINING):  # which is not left half done
            return self._acknowledge()

    def _acknowledge(self) -> StepState:
        taken = self.intake.close()
        lines = [
            {
                "step": taken.step,
                "group_id": group_id,
                "prompt_index": self.intake.ledger.dataset[index]["idx"],
                "attempt": attempt,
                "epoch": self.epoch,
                "policy_version_min": taken.admitted[group_id].v_min,
                "policy_version_max": taken.admitted[group_id].v_max,
            }
            for group_id, index, attempt in self.intake.acknowledge(taken.step)
        ]
        if self.ledger_file is not None:
            self.ledger_file.write(lines)
        self.step, self.version = taken.step, taken.version + 1
        self.reward = reward_metrics(list(taken.admitted.values())).get("reward/mean")
        return taken

    def publish(self) -> None:
        """Send the new version to the rollouts; generation resumes with it."""
        with self.board.during(Phase.SYNCING), self.timers.measure("sync"):
            report = self.sync.publish(self.version)
        self.sync_metrics = sync_metrics(report)
        self.board.set(step=self.step, policyVersion=self.version, reward=self.reward)

    def _rates(self, taken: StepState) -> dict[str, float]:
        tokens = sum(entry.tokens for entry in taken.admitted.values())
        seconds = self.timers.seconds["time/step"]
        ages = [taken.version - entry.v_min for entry in taken.admitted.values()]
        devices = self.spec.actor.world_size + self.spec.rollout.replicas
        sampling = self.spec.algorithm.dynamic_sampling.enabled
        return {
            "train/staleness_mean": sum(ages) / max(len(ages), 1),
            "train/staleness_max": float(max(ages, default=0)),
            "rollout/filtered_groups": float(taken.filtered),
            **(taken.sampling_metrics(self.spec.algorithm.prompts_per_step) if sampling else {}),
            "data/dropped_overlong": float(self.dropped_overlong),
            "rollout/stale_groups": float(taken.stale),
            "perf/tokens_per_second": tokens / seconds,
            "perf/tokens_per_second_per_device": tokens / seconds / devices,
            **self.sync_metrics,
            **self._idle(),
            **self.board.totals(),
        }

    def _idle(self) -> dict[str, float]:
        """Return what each side waited for the other: on policy a trainer idles while rollouts generate, and the reverse."""
        seconds = self.timers.seconds
        busy_actor = [seconds.get(f"time/{part}", 0.0) for part in ("inference", "train", "sync")]
        return {"time/idle_actor": seconds["time/rollout"], "time/idle_rollout": sum(busy_actor)}

    def _log(self, metrics: dict[str, Any]) -> None:
        values = {"policy_version": self.version, "epoch": self.epoch, **metrics, **self.timers.seconds}
        self.trackers.log(self.step, values)
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        self.board.set(metrics={key: value for key, value in numbers.items() if math.isfinite(value)})


GRPORunner = ReasoningRunner
