"""Collects the trajectories of a step: env workers, rollouts and actors at once, and again where one of them is lost meanwhile.

    env worker <-- observations, actions --> rollout -- trajectories --> actor

A collection has a number, which is part of every key. What an abandoned one left on the channels is never taken.
"""

import logging
import time
from collections.abc import Callable

from rl_core.api.errors import DeadlineExceeded, InfrastructureError
from rl_core.channel import Channel
from rl_core.messages.embodied import CollectionRound, EpisodeStats
from rl_core.plan.groups import ENV, ROLLOUT
from rl_core.runner.member_versions import MemberVersions
from rl_core.runner.run import Run
from rl_core.workers.group import WorkerGroup, WorkerGroupFuncResult
from rl_core.workers.member import Member

logger = logging.getLogger(__name__)
LOOK_S = 1.0
"""Seconds between two looks at the members while trajectories are collected."""
MOST_REPEATS = 20
"""Times that one step is collected again before the run fails."""
LEAVING = ("suspect", "draining")
Wait = Callable[[], None]


class Collection:
    """Runs one collection after the other over the members that are there."""

    def __init__(
        self,
        run: Run,
        actor: WorkerGroup,
        versions: MemberVersions,
        *,
        observations: Channel,
        actions: Channel,
        trajectories: Channel,
    ) -> None:
        """`versions` knows which rollouts have proved which weights; only those with the present ones take part."""
        self._run, self._actor, self._versions = run, actor, versions
        self._observations, self._actions, self._trajectories = observations, actions, trajectories
        self._number = run.epoch * 1_000_000
        self.repeated = 0
        """Number of collections that were abandoned and run again."""

    def collect(self, step: int, *, at: Wait) -> list[EpisodeStats]:
        """Collect the trajectories of `step`; return the episodes that ended, by env worker.

        `at()` is called between two looks, and may end the collection by raising; it waits for missing members.
        """
        return self._repeat(lambda: self._round(step), at)

    def evaluate(self, step: int, episodes: int, *, at: Wait) -> list[EpisodeStats]:
        """Run `episodes` episodes with the weights of `step` and without sampling; return them by env worker."""
        return self._repeat(lambda: self._round(step, episodes=episodes), at)

    def _repeat(self, make: Callable[[], CollectionRound], at: Wait) -> list[EpisodeStats]:
        for attempt in range(MOST_REPEATS):
            at()
            try:
                return self._run_once(make())
            except (InfrastructureError, DeadlineExceeded) as error:
                if attempt == MOST_REPEATS - 1:
                    raise
                self.repeated += 1
                logger.warning("the collection is run again: %s", error)
                self._run.stops.wait_for_stop_request(LOOK_S)
        raise AssertionError("a bug: the last attempt neither returned nor raised")

    def _round(self, step: int, *, episodes: int = 0) -> CollectionRound:
        """Return the next collection over the members that are there. Raises InfrastructureError without an env worker or a rollout."""
        self._number += 1
        envs, rollouts = self._ranks(ENV), self._ranks(ROLLOUT)
        if not envs or not rollouts:
            raise InfrastructureError(
                f"a collection needs an env worker and a rollout, got {len(envs)} and {len(rollouts)}"
            )
        return CollectionRound(
            number=self._number,
            step=step,
            envs=envs,
            rollouts=rollouts,
            actors=self._run.applied.spec.actor.world_size,
            mode="eval" if episodes else "train",
            episodes=episodes,
        )

    def _ranks(self, group: str) -> tuple[int, ...]:
        return tuple(sorted(int(member.name.partition(":")[2]) for member in self._members(group)))

    def _members(self, group: str) -> list[Member]:
        version = self._run.progress.version
        present = [m for m in self._run.cluster.members(group) if m.state.constructed and m.state not in LEAVING]
        if group != ROLLOUT:
            return present
        return [m for m in present if self._versions.version_of((m.name, m.incarnation)) == version]

    def _run_once(self, round: CollectionRound) -> list[EpisodeStats]:
        spec, stops = self._run.applied.spec, self._run.stops
        limit = spec.runtime.deadlines.rollout
        receiving = None
        if round.mode == "train":
            receiving = self._actor.within(limit).recv_rollout_trajectories(self._trajectories, round, limit)
        workers = self._call(round, limit)
        try:
            deadline = time.monotonic() + limit
            while not stops.wait_done(workers, LOOK_S):
                self._require(round)
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"a collection must end within deadlines.rollout {limit:.0f} s, got none")
            answers = stops.wait(workers, 0.0)
            if receiving is not None:
                stops.wait(receiving, max(deadline - time.monotonic(), 1.0))
            return [answer for answer in answers if isinstance(answer, EpisodeStats)]
        finally:
            for result in filter(None, (workers, receiving)):
                result.cancel()

    def _call(self, round: CollectionRound, limit: float) -> WorkerGroupFuncResult:
        submit = self._run.cluster.submit
        to_env, to_rollout = (self._actions, self._observations), (self._observations, self._actions)
        env_method, rollout_method = ("evaluate", "evaluate") if round.mode == "eval" else ("interact", "generate")
        extra = () if round.mode == "eval" else (self._trajectories,)
        calls = [submit(f"{ENV}:{rank}", env_method, (*to_env, round), {}, timeout=limit) for rank in round.envs]
        calls += [
            submit(f"{ROLLOUT}:{rank}", rollout_method, (*to_rollout, *extra, round), {}, timeout=limit)
            for rank in round.rollouts
        ]
        return WorkerGroupFuncResult("collection", rollout_method, dict(enumerate(calls)))

    def _require(self, round: CollectionRound) -> None:
        """Raise InfrastructureError when a member of the collection is gone: its calls may wait for ever."""
        for group, ranks in ((ENV, round.envs), (ROLLOUT, round.rollouts)):
            here = {m.name for m in self._run.cluster.members(group)}
            if gone := [f"{group}:{rank}" for rank in ranks if f"{group}:{rank}" not in here]:
                raise InfrastructureError(f"{', '.join(gone)} left in the middle of a collection")
