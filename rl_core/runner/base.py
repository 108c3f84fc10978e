"""What every runner program has: parts, bring-up, validation, checkpoints, status, an orderly end.

The runner never imports torch or the model: it moves handles and numbers. A program (reasoning.py) adds the step.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.api.errors import ConfigError, InfrastructureError, RLJobError, StorageFull, WorkerLost
from rl_core.api.job import RLJob, RLJobSpec
from rl_core.channel import Channel
from rl_core.data.dataset import PromptDataset
from rl_core.messages.groups import EndOfStep
from rl_core.observability.trackers import Trackers
from rl_core.plan.failure_rules import tripped
from rl_core.runner.changes import differences
from rl_core.runner.checkpoints import Checkpoints, as_one
from rl_core.runner.history import LedgerFile
from rl_core.runner.intake import Intake, put_all
from rl_core.runner.ledger import PromptLedger
from rl_core.runner.membership import Membership
from rl_core.runner.status import Phase, StatusBoard
from rl_core.runner.steering import Controls, Steering, StopKind, drain
from rl_core.runner.streaks import Streaks
from rl_core.runner.sync import WeightSync
from rl_core.runner.validation import Validation
from rl_core.runner.waiting import Attendance
from rl_core.workers.group import Cluster, WorkerGroup, WorkerGroupFuncResult
from rl_core.workers.result import WorkerErrors

logger = logging.getLogger(__name__)
LEAVABLE = frozenset({Phase.GENERATING, Phase.VALIDATING, Phase.DEGRADED, Phase.STARTING})
"""Phases that the run leaves at once when it is to end. Training is left between micro-batches, the others are finished first."""
UNANSWERED = "its rollouts were lost each time"
ROOM_PAUSE = 5.0
"""Seconds between two attempts to write to a full storage."""
RESUMABLE = frozenset({"Suspended", "Interrupted"})
"""Ends after which the run is to be resumed."""


class Stopped(Exception):
    """The run was asked to finish; the loop leaves the step it is in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """How a run ended."""

    status: str
    """Finished, or when it was asked to end early Stopped, Suspended or Interrupted."""
    step: int
    version: int
    seconds: float
    accuracy_before: float | None
    accuracy_after: float | None


@dataclass(slots=True)
class StepTimers:
    """Seconds per part of one step."""

    seconds: dict[str, float] = field(default_factory=dict)

    def carried(self, name: str) -> dict[str, float]:
        """Return the seconds of a part that is measured after its step was logged, for the next step's line."""
        return {key: value for key, value in self.seconds.items() if key == f"time/{name}"}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the block's wall time to `time/<name>`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[f"time/{name}"] = self.seconds.get(f"time/{name}", 0.0) + time.perf_counter() - began


class Runner:
    """The parts of a run and what all programs do with them."""

    def __init__(
        self,
        job: RLJob,
        cluster: Cluster,
        groups: dict[str, WorkerGroup],
        ledger: PromptLedger,
        trackers: Trackers,
        *,
        output: Path,
        epoch: int = 0,
        resume: str = "none",
        first_epoch: int | None = None,
        in_cluster: bool = False,
        train: PromptDataset,
        validation: PromptDataset | None = None,
    ) -> None:
        """Wire the parts; `groups` holds actor, rollout and env; `resume` is auto, none or a path, `first_epoch` that of the first start.

        `in_cluster`: members that are missing are waited for without a bound, and `output` is on the job's volume.
        """
        self.job, self.spec = job, job.spec
        self.cluster, self.groups, self.trackers = cluster, groups, trackers
        self.actor = groups["actor"]
        self.output, self.epoch, self.resume, self.first_epoch = output, epoch, resume, first_epoch
        self.dropped_overlong = train.dropped_overlong
        self.step = 0
        self.version = 0
        self.reward: float | None = None
        self.accuracy: list[float] = []
        self.timers = StepTimers()
        self.prompts = Channel.create("prompts", delivery="lease", lease_seconds=self.spec.runtime.lease_seconds)
        self.trajectories = Channel.create("trajectories")
        self.results = Channel.create("validation")
        self.intake = Intake(
            ledger,
            self.spec.algorithm,
            put_prompts=self._put_prompts,
            end_step=self._end_step,
            data_ranks=self.spec.actor.data_parallel,
        )
        self.intake.on_failure = self._fail
        self.membership = Membership(cluster, groups, deadline=self.spec.runtime.deadlines.wait_ready)
        self.membership.on_failure = self._fail
        self.steering = Steering(self.spec)
        self.streaks = Streaks(self.spec.failure_policy)
        self.board = StatusBoard(self.spec, cluster, epoch=epoch, job=job.metadata.name)
        self.board.ledger_metrics = self.intake.metrics
        self.board.channels = lambda: self._channels
        self.checkpoints = Checkpoints(self.spec, output=output, epoch=epoch, in_cluster=in_cluster)
        self.attendance = Attendance(
            lambda: self.spec,
            cluster,
            self.board,
            self.membership,
            patient=in_cluster,
            check=self.check,
            at_boundary=self.take_changes,
        )
        probe = [int(token) for message in train[0]["message_log"] for token in message["token_ids"]]
        self.sync = WeightSync(
            self.spec, cluster=cluster, actor=self.actor, membership=self.membership, probe_prompt=probe
        )
        self.validation = None
        if validation is not None:
            self.validation = Validation(self.spec, validation.samples, prompts=self.prompts, results=self.results)
        self.ledger_file: LedgerFile | None = None
        self._channels: list[dict[str, Any]] = []
        self._guard = threading.Lock()
        self._pending: WorkerGroupFuncResult | None = None
        self._failure: RLJobError | None = None

    def run(self) -> RunSummary:
        """Run the program to its end."""
        raise NotImplementedError(f"{type(self).__name__} must define run")

    # --- bring-up --------------------------------------------------------------------------------------------------

    ready = False
    """Whether the actors hold weights that may be saved."""

    def init_workers(self) -> None:
        """Bring every role up, resume if asked, publish the starting weights (runtime.md 8: engines, env, actor, resume, publish)."""
        deadline = self.spec.runtime.deadlines.wait_ready
        self.attendance.await_actors(deadline)
        self.await_result(self.actor.init_worker(), deadline)
        checkpoint = self.checkpoints.find(self.resume, first_epoch=self.first_epoch)
        if checkpoint is not None:
            self._restore(self.checkpoints.restore(checkpoint, self.actor))
            self.board.set(checkpoint=self.checkpoints.describe(str(checkpoint.path)))
        else:
            self.checkpoints.begin_afresh()
        self.await_result(self.actor.set_global_step(self.version))
        self.ready = True
        self.ledger_file = LedgerFile(self.output / "ledger.jsonl", attempt=self.write_with_patience)
        address = next(answer for answer in self.await_result(self.actor.publisher_address()) if answer)
        published = self.await_result(self.actor.sync_model_to_rollout(self.version, [], 0), deadline)
        self.sync.digest = published[0].digest
        self.membership.open(address, (self.prompts, self.trajectories, self.results))
        self.attendance.await_envs(deadline)
        self.await_rollouts()

    def _restore(self, state: dict[str, Any]) -> None:
        self.step, self.version, self.reward = state["step"], state["version"], state["reward"]
        self.accuracy = list(state["accuracy"])
        self.intake.ledger.load_state_dict(state["ledger"])
        self.board.set(step=self.step, policyVersion=self.version, reward=self.reward)
        logger.info("resumed at step %s, version %s", self.step, self.version)

    def await_rollouts(self) -> None:
        """Wait, as Degraded once training began, until enough rollouts serve the current version."""
        deadlines = self.spec.runtime.deadlines
        self.attendance.await_rollouts(
            self._serving,
            begun=bool(self.step or self.accuracy),
            limit=deadlines.degraded if self.step else deadlines.wait_ready,
        )

    def _serving(self) -> int:
        """Count rollouts at the present version: those that say so, and those whose acknowledgement is ahead of their heartbeat."""
        acked = self.sync.acked_at(self.version)
        members = self.cluster.members("rollout")
        return sum((m.state == "serving" and m.policy_version == self.version) or m.name in acked for m in members)

    # --- waiting ---------------------------------------------------------------------------------------------------

    def await_result(self, result: WorkerGroupFuncResult, timeout: float | None = None) -> list[Any]:
        """Return the results by rank; a failure of the intake or a stop request ends the wait at once."""
        with self._guard:
            self._pending = result
        try:
            self.check()
            return list(result.wait(timeout))
        except RLJobError:
            self.check()
            raise
        finally:
            with self._guard:
                self._pending = None

    def check(self) -> None:
        """Raise what ended the run from outside the loop: a failure, or Stopped while generating."""
        if self._failure is not None:
            raise self._failure
        if self.board.phase in LEAVABLE:
            self.leave_if_stopping()

    def leave_if_stopping(self) -> None:
        """Raise Stopped when the run was asked to end."""
        if self.stopping:
            raise Stopped(self.stop_reason)

    def _fail(self, error: RLJobError) -> None:
        self._failure = error
        self._interrupt()

    def _interrupt(self) -> None:
        with self._guard:
            if self._pending is not None:
                self._pending.cancel()

    def _put_prompts(self, items: list[dict[str, Any]]) -> None:
        put_all(self.prompts, items)

    def _end_step(self, step: int) -> None:
        for _ in range(self.spec.actor.data_parallel):
            self.trajectories.put(EndOfStep(step=step))

    def housekeep(self) -> None:
        """Once a second, from a thread: requeue overdue leases and dead prompts, look at the channels and for actors that must go."""
        leaving = [member.name for member in self.cluster.members("actor") if member.state == "draining"]
        if leaving and not self.stopping:
            self.stop(f"SIGTERM at {', '.join(leaving)}", StopKind.INTERRUPT)
        self.intake.expire()
        stats = [channel.stats() for channel in (self.prompts, self.trajectories, self.results)]
        self._channels = [
            {"name": s.name, "depth": s.depth, "oldestAge": round(s.oldest_age_seconds, 3)} for s in stats
        ]
        for delivery in self.prompts.dead_items() if stats[0].dead_items else []:
            item = delivery.item
            if item["mode"] == "train":
                self.intake.give_back(item["group_id"], item["lease_token"], "worker_lost", UNANSWERED)
            elif self.validation is not None:
                self.validation.fail(item, UNANSWERED)
            delivery.ack()

    # --- control ---------------------------------------------------------------------------------------------------

    def stop(self, reason: str, kind: StopKind = StopKind.FINISH) -> None:
        """Ask the run to end; from any thread, but not from a signal's handler: it takes locks that the loop may hold.

        The step being generated is left at once, the one being trained before its next micro-batch (`Actor.cancel_training` says when
        not): its groups are not acknowledged, so a resume gives them out again. A step that is trained is published first.
        """
        self.steering.ask_stop(kind, reason)
        phase = self.board.phase
        if phase in (Phase.GENERATING, Phase.VALIDATING):
            self._interrupt()
        elif phase is Phase.TRAINING:
            self.actor.within(self.spec.runtime.deadlines.rpc).cancel_training()

    @property
    def stopping(self) -> bool:
        """Return whether the run was asked to end."""
        return self.steering.stop is not None

    @property
    def stop_kind(self) -> StopKind | None:
        """Return how the run was asked to end, None when it was not."""
        return self.steering.stop[0] if self.steering.stop is not None else None

    @property
    def stop_reason(self) -> str:
        """Return why the run was asked to end; empty when it was not."""
        return self.steering.stop[1] if self.steering.stop is not None else ""

    def controls(self) -> Controls:
        """Return the control calls of this run."""
        return Controls(
            self.steering,
            stop=lambda kind, reason: self.stop(reason, kind),
            drain=lambda pods: drain(pods, cluster=self.cluster, roster=self.board.roster),
            applied_generation=lambda: int(self.board.fact("appliedGeneration")),
        )

    def take_changes(self) -> None:
        """Apply what `PUT /control` brought; called between steps, and in waits in which nothing is computed."""
        change = self.steering.changes.take() if self.ready else None
        if change is None:
            return
        before, self.spec = self.spec, change.spec
        rate, steps = self.spec.actor.optimizer.learning_rate, self.spec.algorithm.steps
        if (rate, steps) != (before.actor.optimizer.learning_rate, before.algorithm.steps):
            self.await_result(self.actor.set_schedule(rate, steps), self.spec.runtime.deadlines.rpc)
        self.checkpoints.adopt(self.spec)
        self.sync.adopt(self.spec)
        self.board.adopt(self.spec, change.generation)
        told = [path for path, _, _ in differences(_plain(before), _plain(self.spec))]
        logger.info("generation %s of the job is applied: %s", change.generation, ", ".join(told) or "no change here")

    def give_back(self, group_id: str, lease_token: str, reason: str, message: str) -> None:
        """Take back a group a rollout gave up; what a cluster's shortage caused is not the group's fault."""
        blamed = reason in ("infrastructure", "deadline") and self.attendance.short()
        self.intake.give_back(group_id, lease_token, "worker_lost" if blamed else reason, message)

    def status(self) -> dict[str, Any]:
        """Return `/status`."""
        return self.board.snapshot()

    # --- validation and checkpoints --------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Measure the served weights on the validation split; empty without one."""
        if self.validation is None:
            return {}
        with self.board.during(Phase.VALIDATING), self.timers.measure("validation"):
            metrics = self.validation.measure(
                self.version,
                cancelled=lambda: self.stopping or self._failure is not None,
                short=self.attendance.short,
            )
            self.check()
        if "val/accuracy" in metrics:
            self.accuracy.append(metrics["val/accuracy"])
        return metrics

    def checkpoint_due(self) -> bool:
        """Return whether the step just finished is to be saved; never when it is rolled back."""
        if self.stop_kind is StopKind.ROLLBACK:
            return False
        every = self.spec.checkpoint.every_steps
        asked = self.steering.take_checkpoint()
        return asked or (every is not None and self.step % every == 0) or self.step >= self.spec.algorithm.steps

    def save_checkpoint(self) -> None:
        """Publish a checkpoint of the last finished step, unless it exists. Raises InfrastructureError when the storage refuses."""
        if self.checkpoints.last_step == self.step:
            return
        state = {
            "step": self.step,
            "version": self.version,
            "reward": self.reward,
            "accuracy": self.accuracy,
            "ledger": self.intake.state_dict(),
        }
        with self.board.during(Phase.CHECKPOINTING), self.timers.measure("checkpoint"):
            path = self.checkpoints.save(
                self.step, self.actor, state, version=self.version, weights_digest=self.sync.digest, reward=self.reward
            )
        self.board.set(checkpoint=self.checkpoints.describe(path))

    def try_checkpoint(self) -> None:
        """Publish a checkpoint, or tell and count that the storage refused: the next one may succeed, and training loses nothing."""
        try:
            self.save_checkpoint()
        except WorkerLost:
            raise
        except InfrastructureError as error:
            self._tell_refused(error, "training goes on from the weights in memory")

    def _tell_refused(self, error: InfrastructureError, reaction: str) -> None:
        logger.error("%s; %s", error, reaction)
        self.board.count_failure("runner", "checkpoint")
        self.board.set(checkpoint={**self.board.fact("checkpoint"), "error": str(error)})

    def watch_numbers(self, metrics: dict[str, float]) -> None:
        """Tell the streaks after a step; roll back when a rule of failurePolicy has fired whose action is RestartFromCheckpoint.

        Who restarts the run is the operator, which reads the streaks too. Its call to roll back may be lost or come late, and until
        then nothing may make a checkpoint of these weights.
        """
        self.board.set(streaks=self.streaks.observe(metrics))
        trip = tripped(self.spec.failure_policy, self.streaks.counts)
        if trip is not None and trip.action == "RestartFromCheckpoint":
            self.stop(f"failurePolicy.{trip.rule} has fired: {trip.message}", StopKind.ROLLBACK)

    def finish(self, *, resumable: bool) -> None:
        """Save what the run came to: a checkpoint of the last step, and the model unless the run is to be resumed.

        Nothing before the actors hold weights.
        """
        if not self.ready:
            return
        if resumable:
            if self.stop_kind is not StopKind.ROLLBACK:
                self.save_checkpoint()
            return
        self.sync.confirm()
        until = time.monotonic() + self.spec.runtime.deadlines.degraded
        try:
            self.write_with_patience(self.save_checkpoint, until)
        finally:
            self.write_with_patience(self._export, until)

    def _export(self) -> None:
        try:
            self.await_result(self.actor.export_hf(str(self.output / "model")))
        except WorkerErrors as errors:
            raise as_one(errors) from errors

    def write_with_patience(self, write: Callable[[], None], until: float | None = None) -> None:
        """Do a write that the run cannot go on or end without; while the storage is full try again, unless the run is asked to end.

        `until`: clock at which to give up, None = deadlines.degraded from now.
        Raises ConfigError when no room was made: a restart would only train the same steps again and meet the same storage.
        """
        until = time.monotonic() + self.spec.runtime.deadlines.degraded if until is None else until
        while True:
            try:
                write()
                return
            except StorageFull as error:
                left = until - time.monotonic()
                if self.stop_kind not in (None, StopKind.FINISH):
                    raise
                if self.stopping or left <= 0:
                    raise ConfigError(f"{error}; then resume the run from its last checkpoint") from error
                self._tell_refused(error, f"what was trained waits in memory for room, {left:.0f} s more")
            with self.board.during(Phase.CHECKPOINTING):
                self.steering.asked.wait(min(ROOM_PAUSE, left))
            if self._failure is not None:
                raise self._failure

    def ended_early(self) -> str:
        """Return how a run that was asked to end is told: Stopped, or to be resumed Suspended or Interrupted."""
        if self.stop_kind is StopKind.ROLLBACK:
            return "Interrupted"
        if self.stop_kind is StopKind.FINISH or self.step >= self.spec.algorithm.steps:
            return "Stopped"
        return "Suspended" if self.stop_kind is StopKind.SUSPEND else "Interrupted"

    def close(self) -> None:
        """Stop background work."""
        self.membership.close()
        self.sync.close()
        if self.ledger_file is not None:
            self.ledger_file.close()


def _plain(spec: RLJobSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json", by_alias=True)
