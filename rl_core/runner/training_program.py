"""`TrainingProgram`: the base of programs that train a policy. It starts the run, trains one step, and publishes weights."""

from abc import abstractmethod
from typing import Any

from rl_core.api.job import RLJobSpec
from rl_core.plan.groups import ACTOR
from rl_core.runner.device_schedule import DeviceSchedule
from rl_core.runner.program import Program
from rl_core.runner.run import Run
from rl_core.runner.saving import Saving
from rl_core.runner.startup import Startup
from rl_core.runner.status import Phase
from rl_core.runner.stopping import Stopped
from rl_core.runner.sync import WeightSync


class TrainingProgram(Program):
    """A program with an actor that trains and rollouts that receive its weights. A subclass implements `run_step`."""

    def __init__(
        self, run: Run, saving: Saving, *, startup: Startup, schedule: DeviceSchedule, sync: WeightSync
    ) -> None:
        """`startup` starts the worker groups, `sync` publishes weights to the rollouts."""
        super().__init__(run, saving)
        self.actor = run.groups[ACTOR]
        critic = run.job.spec.algorithm.critic_group
        self.critic = None if critic is None else run.groups[critic]
        """The worker group of the critic; None if the critic is part of the actor or the job has no critic."""
        self.startup, self.schedule, self.sync = startup, schedule, sync

    def start(self) -> None:
        """Start all worker groups, load the checkpoint to resume from, if any, and publish the initial weights."""
        self.startup.run(at=self.handle_requests)

    def loop(self) -> None:
        """Evaluate the initial weights if the job asks for it, then run step after step."""
        if self.progress.step == 0 and self.applied.spec.validation.before_training and self.validates:
            self.report.log(self.evaluate())
        self.handle_requests()
        # STARTING has no stall bound and the operator takes it for asleep, so the run counts as generating between two phases.
        with self.board.during(Phase.GENERATING):
            try:
                while self.progress.step < self.applied.spec.algorithm.steps:
                    self.run_step()
                    self.handle_requests()
            finally:
                self.write_last_step()

    @abstractmethod
    def run_step(self) -> None:
        """Run one step: collect, train, publish, evaluate, log, checkpoint."""

    @property
    def validates(self) -> bool:
        """Whether the initial weights can be evaluated."""
        return False

    @property
    def needs_scoring(self) -> bool:
        """Whether the trainer computes log-probabilities or values before it trains."""
        return self.applied.spec.algorithm.needs_scoring

    def train(self) -> dict[str, float]:
        """Have the actors compute advantages and run the optimizer steps; return `train/*` and `perf/*`. Raises Stopped if cancelled."""
        spec = self.applied.spec
        actor = self.actor.within(spec.runtime.deadlines.rpc)
        with (
            self.board.during(Phase.TRAINING),
            self.schedule.training(),
            self.stops.cancelling(lambda: actor.cancel_training()),
        ):
            # A stop that was requested before this phase could not cancel the step, so it is checked here.
            self.stops.raise_if_stop_requested()
            if self.needs_scoring:
                with self.report.measure("inference"):
                    self.stops.wait(self.actor.compute_log_probs())
                self.stops.raise_if_stop_requested()
            with self.report.measure("train"):
                # It computes the advantages too: they are tensors, for which the runner would load torch if it asked for them itself.
                training = self.actor.run_training(self.progress.step + 1)
                self.on_training()
                metrics = self.stops.wait(training)[0]
            of_critic: dict[str, float] = {}
            if metrics is not None and self.critic is not None:  # From here on the step cannot be cancelled.
                with self.report.measure("critic"):
                    fitting = self.critic.run_training(self.progress.step + 1, spec.actor.data_parallel)
                    (of_critic,) = self.stops.wait(fitting)
        if metrics is None:
            raise Stopped(f"{self.stops.reason}, in the training of step {self.progress.step + 1}")
        return of_critic | {
            f"train/{key.removeprefix('actor/')}" if key.startswith("actor/") else key: value
            for key, value in metrics.items()
        }

    def on_training(self) -> None:
        """Do work that needs no result of the training. Called once a step, as soon as they have begun. Writes the metrics of the last step."""
        self.report.write()

    def write_last_step(self) -> None:
        """Write the metrics and the trace of the last step, unless they are written already. Subclasses may write more."""
        self.report.write()

    def publish(self) -> None:
        """Publish the new version to the rollouts, which continue with it."""
        progress = self.progress
        with self.board.during(Phase.SYNCING), self.schedule.syncing(), self.report.measure("sync"):
            self.sync.publish(progress.version)
        self.show_step()

    def show_step(self) -> None:
        """Set the number of completed training steps that `GET /status` returns to that of the last trained step."""
        progress = self.progress
        self.board.set(step=progress.step, policyVersion=progress.version, reward=progress.reward)

    def save_if_due(self) -> None:
        """Report a checkpoint that was written in the background, and save one when it is due."""
        self.saving.settle()
        if (step := self.saving.due()) is not None:
            self.report.write()  # a run that resumes from the checkpoint must find the line of its step
            with self.report.measure("checkpoint"):
                self.saving.try_save(step)
            self.report.trace()

    def idle(self) -> dict[str, float]:
        """Return `time/idle_actor` and `time/idle_rollout` of the step, in seconds.

        On policy the actor is idle while rollouts generate, and rollouts are idle while the actor trains.
        """
        busy_actor = [self.report.seconds(part) for part in ("inference", "train", "critic", "sync")]
        return {"time/idle_actor": self.report.seconds("rollout"), "time/idle_rollout": sum(busy_actor)}

    def apply(self, spec: RLJobSpec, before: RLJobSpec) -> None:
        """Apply a changed learning rate and number of steps to the actor and to the group of the critic."""
        optimizer, steps, seconds = spec.actor.optimizer, spec.algorithm.steps, spec.runtime.deadlines.rpc
        if (optimizer.learning_rate, steps) != (before.actor.optimizer.learning_rate, before.algorithm.steps):
            self.stops.wait(self.actor.set_schedule(optimizer.learning_rate, steps), seconds)
            if self.critic is not None:
                rate = optimizer.value_learning_rate or optimizer.learning_rate
                self.stops.wait(self.critic.set_schedule(rate, steps), seconds)

    def status(self) -> dict[str, Any]:
        """Return the shared devices for `/status`."""
        return {"devices": self.schedule.devices()}

    def close(self) -> None:
        """Let no further members join."""
        self.sync.members.close()
