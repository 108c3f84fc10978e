"""The embodied programs: a policy acts in simulators and is trained on its trajectories.

`run_step` is one step at policy version v: collect trajectories, train, publish version v + 1. The next collection is requested during
training, and a rollout begins it as soon as it serves version v + 1. `AsyncEmbodiedRunner` collects the trajectories of the next step while it
trains. With `env.options.weightSyncInterval` K only every K-th version is published, and the rollouts act with the last one until then.
"""

import logging
from typing import Any, Self

from rl_core.api.embodied import check_job, embodied_options
from rl_core.envs.embodied import episode_metrics
from rl_core.messages.embodied import EpisodeStats
from rl_core.plan.groups import ACTOR, ENV, ROLLOUT, TRAJECTORIES
from rl_core.runner.changes import for_elastic_roles
from rl_core.runner.collection import Collection, Pending
from rl_core.runner.joining import build_strategies
from rl_core.runner.member_versions import MemberVersions
from rl_core.runner.members import Members
from rl_core.runner.run import Run
from rl_core.runner.saving import Saving
from rl_core.runner.startup import Startup
from rl_core.runner.status import Phase
from rl_core.runner.sync import WeightSync
from rl_core.runner.time_sharing import build_device_schedule
from rl_core.runner.training_program import TrainingProgram
from rl_core.runner.workload import Workload

logger = logging.getLogger(__name__)


class EmbodiedRunner(TrainingProgram):
    """A program that trains a policy that acts in simulators."""

    def __init__(self, run: Run, saving: Saving, *, collection: Collection, **parts: Any) -> None:
        """`collection` collects trajectories and sends them to the actors; `parts` are the arguments of `TrainingProgram`."""
        super().__init__(run, saving, **parts)
        self.collection = collection
        self.trackers, self.videos = run.trackers, run.output / "videos"
        self._sync_interval = embodied_options(run.job.spec).weight_sync_interval
        self._env_steps = 0
        self._ahead: Pending | None = None
        """The collection of the next step, if it has begun."""
        self._age = 0
        """How many versions older the weights that chose the actions of this step are than the weights that are trained."""
        saving.register("embodied", self)

    @classmethod
    def build(cls, run: Run) -> Self:
        """Launch the worker groups and create the program with its parts. Raises ConfigError for wrong `env.options`."""
        spec = run.job.spec
        check_job(spec)
        stable = for_elastic_roles(spec)
        actor = run.launch(ACTOR, spec)
        run.launch(ROLLOUT, stable)
        run.launch(ENV, stable)
        for name, group in run.planned.items():
            if group.config is not None:
                run.launch(name, dict(group.config))
        schedule = build_device_schedule(spec, cluster=run.cluster, actor=actor)
        versions = MemberVersions(lambda processes, version: None)
        strategies = build_strategies(
            run.planned.values(),
            run.groups,
            cluster=run.cluster,
            versions=versions,
            release=lambda name, incarnation: None,
            schedule=schedule,
            seconds=spec.runtime.deadlines.wait_ready,
            start_args=(),
        )
        members = Members(run.cluster, strategies, run.roster, run.board, spec.runtime.deadlines, fail=run.stops.fail)
        sync = WeightSync(
            run.applied,
            cluster=run.cluster,
            actor=actor,
            members=members,
            versions=versions,
            roster=run.roster,
            workload=Workload(),
            check=None,
        )
        saving = Saving.of(
            run,
            schedule=schedule,
            groups=[actor],
            weights_digest=lambda: sync.digest if sync.version == run.progress.version else "",
        )
        startup = Startup(
            spec.runtime.deadlines,
            run.progress,
            run.board,
            trained=[actor],
            schedule=schedule,
            members=members,
            sync=sync,
            saving=saving,
            stops=run.stops,
        )
        collection = Collection(
            run,
            actor,
            versions,
            observations=run.channel("observations"),
            actions=run.channel("actions"),
            trajectories=run.channel(TRAJECTORIES),
        )
        program = cls(run, saving, collection=collection, startup=startup, schedule=schedule, sync=sync)
        run.cluster.hub.add_listeners(joined=members.joined, lost=members.lost)
        return program

    @property
    def needs_scoring(self) -> bool:
        """False: training uses the log-probabilities and values that the rollouts recorded."""
        return False

    @property
    def validates(self) -> bool:
        """True: episodes can be evaluated at any time."""
        return True

    def run_step(self) -> None:
        """One step: collect -> train -> publish -> evaluate, log, checkpoint."""
        report, progress = self.report, self.progress
        report.begin_step()
        with report.measure("step"):
            collected = self.collect()
            trained = self.train()
            with self.board.during(Phase.TRAINING):  # a stop waits until the step is final
                progress.step, progress.version = progress.step + 1, progress.version + 1
                progress.reward = collected.get("env/return", progress.reward)
            self.publish()
        seconds = report.seconds("step")
        self.board.step_took(seconds)
        metrics = collected | trained | {"perf/env_steps_per_second": collected["env/steps"] / seconds}
        if "env/return" in collected:
            metrics["reward/mean"] = collected["env/return"]
        self.check_metrics(metrics)
        if self.evaluates_after(progress.step):
            metrics |= self.evaluate()
        report.log(metrics | self.sync.metrics() | self.schedule.metrics() | self.idle() | self.board.totals())
        self.save_if_due()
        self.stops.raise_if_stop_requested()

    def collect(self) -> dict[str, float]:
        """Collect the trajectories of the next step; return `env/*`."""
        with self.board.during(Phase.GENERATING), self.schedule.generating(), self.report.measure(ROLLOUT):
            stats = self.gather()
        steps = sum(worker_stats.steps for worker_stats in stats)
        self._env_steps += steps
        return episode_metrics(episodes_of(stats)) | {
            "env/steps": float(steps),
            "env/steps_total": float(self._env_steps),
            "env/lost_episodes": float(sum(worker_stats.lost for worker_stats in stats)),
            "env/interventions": float(sum(worker_stats.interventions for worker_stats in stats)),
            "env/repeated_collections": float(self.collection.repeated),
        }

    def gather(self) -> list[EpisodeStats]:
        """Have simulators and policy produce the trajectories that the next training step uses, and the actors receive them.

        If their collection was requested during the last training, waits for its end; if not, or if it was lost, collects them now. Returns
        the statistics of the episodes, one entry for each env worker.
        """
        self.handle_requests()
        prefetched, self._ahead = self._ahead, None
        if prefetched is not None and (stats := self.collection.take(prefetched)) is not None:
            self._age = self.progress.version - prefetched.version
            return stats
        self._age = self.progress.version - self.sync.version
        return self.collection.collect(self.progress.step + 1, at=self.await_members)

    def train(self) -> dict[str, float]:
        """Train, and add the age of the trajectories to the metrics of a job whose trajectories may be older than the weights."""
        trained, age = super().train(), float(self._age)
        if not self.applied.spec.algorithm.max_staleness:
            return trained
        return trained | {"train/staleness_mean": age, "train/staleness_max": age}

    def publishes_after(self, step: int) -> bool:
        """Return whether the rollouts receive the weights of training step `step`: every K-th ones, and those that are evaluated."""
        return step % self._sync_interval == 0 or self.evaluates_after(step)

    def evaluates_after(self, step: int) -> bool:
        """Return whether the weights of training step `step` are to be evaluated."""
        spec = self.applied.spec
        return step == spec.algorithm.steps or step % spec.validation.every_steps == 0

    @property
    def _all_present(self) -> bool:
        """Whether all env workers and rollouts that the job asks for can take part in a collection."""
        roster = self.run.roster
        rollouts = roster.serving(ROLLOUT, self.sync.version)
        return roster.count(ENV) >= len(roster.wanted(ENV)) and rollouts >= len(roster.wanted(ROLLOUT))

    def on_training(self) -> None:
        """Request the next collection, and write the metrics of the last step."""
        self.begin_next()
        super().on_training()

    def begin_next(self) -> None:
        """Request the collection of the next step. The rollouts start it once they serve the weights that this training produces.

        They start it at once if these weights are not published. It is not requested yet if an evaluation needs the simulators first, if groups
        share devices, or if a member is missing.
        """
        used_before = self.evaluates_after(self.progress.step + 1) or self.schedule.devices() is not None
        if not used_before and self._all_present:
            is_published = self.publishes_after(self.progress.step + 1)
            version = self.progress.version + 1 if is_published else self.sync.version
            self._ahead = self.collection.begin(self.progress.step + 2, version=version)

    def publish(self) -> None:
        """Publish the new version if it is due. Give up the collection that waits for it if a member is lost or does not load it in time."""
        if not self.publishes_after(self.progress.step):
            self.show_step()
            return
        super().publish()
        prefetched = self._ahead
        if (
            prefetched is not None
            and prefetched.version == self.progress.version
            and not self.collection.is_intact(prefetched)
        ):
            self.collection.abandon(prefetched)
            self._ahead = None

    def await_members(self) -> None:
        """Wait until enough rollouts and env workers are present for the next collection."""
        self.startup.await_group(ENV, at=self.handle_requests)
        self.startup.await_rollouts(at=self.handle_requests)

    def evaluate(self) -> dict[str, float]:
        """Run the evaluation episodes with the current weights and without sampling; return `val/*`."""
        spec = self.applied.spec
        episodes = embodied_options(spec).eval_episodes
        with self.board.during(Phase.VALIDATING), self.schedule.generating(), self.report.measure("validation"):
            stats = self.collection.evaluate(self.progress.step, episodes, at=self.await_members)
            self._keep([video for worker_stats in stats for video in worker_stats.videos])
        return episode_metrics(episodes_of(stats), prefix="val")

    def _keep(self, videos: list[bytes]) -> None:
        """Write the GIF files of evaluation episodes into the output folder, and show them in the trackers."""
        try:
            for index, video in enumerate(videos):
                path = self.videos / f"step_{self.progress.step:06d}_{index}.gif"
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(video)
        except OSError as error:
            logger.warning("videos of the evaluation could not be written, and the run goes on: %s", error)
        self.trackers.log_videos(self.progress.step, videos)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps besides the policy: the number of steps that the simulators made."""
        return {"env_steps": self._env_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._env_steps = int(state["env_steps"])

    def close(self) -> None:
        """Cancel the collection in progress, and let no further members join."""
        if self._ahead is not None:
            self._ahead.cancel()
        super().close()


class AsyncEmbodiedRunner(EmbodiedRunner):
    """The embodied program with asynchronous collection: the trajectories of the next step are collected during training.

    version     v                               v + 1
    actors      | receive, train, publish       | receive, train, publish
    rollouts    | collect with version v        | collect with version v + 1

    A collection begins when training on the trajectories of the previous one begins, and ends before new weights are published. The trained
    trajectories are therefore at most K versions old with `env.options.weightSyncInterval` K, even if `algorithm.maxStaleness` allows more.
    """

    def begin_next(self) -> None:
        """Request the collection of the next step with the weights that were published last.

        Does nothing if algorithm.maxStaleness is 0, or if the step that is being trained is the last one.
        """
        following = self.progress.step + 2
        algorithm = self.applied.spec.algorithm
        if algorithm.max_staleness and following <= algorithm.steps:
            self._ahead = self.collection.begin(following, version=self.sync.version)

    def publish(self) -> None:
        """If the new weights are due, wait for the end of the collection, then publish them."""
        if self._ahead is not None and self.publishes_after(self.progress.step):
            with self.board.during(Phase.GENERATING), self.report.measure(ROLLOUT):
                self._ahead = self.collection.settle(self._ahead)
        super().publish()

    def idle(self) -> dict[str, float]:
        """Return `time/idle_actor` and `time/idle_rollout` of the step, in seconds.

        The time that rollouts wait for the end of training is not counted.
        """
        return super().idle() | {"time/idle_rollout": self.report.seconds("sync")}


def episodes_of(stats: list[EpisodeStats]) -> list[dict[str, Any]]:
    """Return the episodes of all env workers."""
    return [episode for worker_stats in stats for episode in worker_stats.episodes]
