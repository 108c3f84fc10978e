"""Collects the trajectories of a step. Env workers, rollouts and actors work at the same time and exchange data through channels:

    env worker <-- observations, actions --> rollout -- trajectories --> actor

If an env worker is lost, its open episodes are lost, and the collection continues with the other env workers. If a rollout or the last env
worker is lost, the collection is abandoned and run again. The number of a collection is part of every key on the channels, so messages that
an abandoned collection left there are never received.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from rl_core.api.embodied import embodied_options, groups_of_stage, longest_collection, simulators_per_group
from rl_core.api.errors import DeadlineExceeded, InfrastructureError
from rl_core.api.records import EnvOutput
from rl_core.channel import Channel
from rl_core.messages.embodied import CollectionRequest, EpisodeStats
from rl_core.messages.members import MemberId
from rl_core.plan.groups import ENV, ROLLOUT
from rl_core.plan.routing import routes
from rl_core.runner.env_calls import EnvCall
from rl_core.runner.member_versions import MemberVersions
from rl_core.runner.run import Run
from rl_core.workers.group import WorkerGroup, WorkerGroupFuncResult
from rl_core.workers.member import Member
from rl_core.workers.result import WorkerErrors

logger = logging.getLogger(__name__)
LOOK_S = 1.0
"""Seconds between two checks for lost members while trajectories are collected."""
MOST_REPEATS = 20
"""Number of attempts to collect the trajectories of one step. When the last one fails, the run fails."""
Wait = Callable[[], None]


@dataclass(slots=True)
class Pending:
    """A collection in progress."""

    request: CollectionRequest
    version: int
    """Version of the weights that choose the actions."""
    workers: WorkerGroupFuncResult
    """Calls to the env workers and rollouts."""
    envs: list[EnvCall]
    """The calls to the env workers, in the order of `request.envs`; empty in an evaluation."""
    deadline: float
    """Time on the monotonic clock, in seconds, at which the collection must have ended."""
    receiving: WorkerGroupFuncResult | None = None
    """Calls by which the actors receive the trajectories; None before these calls, and in an evaluation."""
    reported: set[int] = field(default_factory=set)
    """Indices in `request.envs` of the lost env workers whose loss was reported to the rollouts."""

    def cancel(self) -> None:
        """Cancel the calls that are not answered yet."""
        for result in filter(None, (self.workers, self.receiving)):
            result.cancel()


class Collection:
    """Runs collections, one at a time, each with the env workers and rollouts that are present when it begins."""

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
        """`versions` records which version of the weights each rollout has. Only rollouts with the one published last take part."""
        self._run, self._actor, self._versions = run, actor, versions
        self._observations, self._actions, self._trajectories = observations, actions, trajectories
        self._number = run.epoch * 1_000_000
        self._addresses: dict[MemberId, str] = {}
        """Addresses at which the processes of env workers accept direct connections of rollouts."""
        self._abandoned: list[CollectionRequest] = []
        """Collections that may have left items on the channels."""
        self.repeated = 0
        """Number of collections that were abandoned and run again."""

    def collect(self, step: int, *, at: Wait) -> list[EpisodeStats]:
        """Collect the trajectories of `step`; return the episodes that ended, by env worker.

        `at()` is called before each attempt. It waits for missing members, and may end the collection by raising.
        """
        return self._repeat(lambda: self._request(step), at)

    def evaluate(self, step: int, episodes: int, *, at: Wait) -> list[EpisodeStats]:
        """Run `episodes` episodes with the weights of `step` and without sampling; return them by env worker."""
        return self._repeat(lambda: self._request(step, episodes=episodes), at)

    def _repeat(self, make: Callable[[], CollectionRequest], on_poll: Wait) -> list[EpisodeStats]:
        for attempt in range(MOST_REPEATS):
            on_poll()
            try:
                return self._run_once(make())
            except (InfrastructureError, DeadlineExceeded) as error:
                if attempt == MOST_REPEATS - 1:
                    raise
                self.repeated += 1
                logger.warning("the collection is run again: %s", error)
                self._run.stops.wait_for_stop_request(LOOK_S)
        raise AssertionError("a bug: the last attempt neither returned nor raised")

    def _request(self, step: int, *, episodes: int = 0, version: int | None = None) -> CollectionRequest:
        """Return the description of a new collection with the members that are present.

        The rollouts wait until they serve `version` of the weights; None means the one published last. Rollouts without a group of simulators are
        left out. Raises InfrastructureError if no env worker or no rollout is present.
        """
        self._number += 1
        spec = self._run.applied.spec
        envs, rollouts = self._ranks(ENV), self._ranks(ROLLOUT, self._versions.committed)
        if not envs or not rollouts:
            raise InfrastructureError(
                f"a collection needs an env worker and a rollout, got {len(envs)} and {len(rollouts)}"
            )
        # While env workers are missing there may be more rollouts than groups of simulators.
        rollouts = rollouts[: groups_of_stage(spec, embodied_options(spec), len(envs))]
        return CollectionRequest(
            direct=self._direct(envs, rollouts),
            number=self._number,
            step=step,
            envs=envs,
            rollouts=rollouts,
            actors=spec.actor.world_size,
            mode="eval" if episodes else "train",
            episodes=episodes,
            version=version,
        )

    def _direct(self, envs: tuple[int, ...], rollouts: tuple[int, ...]) -> tuple[tuple[int, int, str], ...]:
        """Return `CollectionRequest.direct`: the pairs of an env worker and a rollout that share a host."""
        hosts = {member.name: member.host_token for member in self._members(ROLLOUT)}
        old_addresses, self._addresses, pairs = self._addresses, {}, []
        for member in self._members(ENV):
            local_ranks = [
                index for index, rank in enumerate(rollouts) if hosts.get(f"{ROLLOUT}:{rank}") == member.host_token
            ]
            if member.rank not in envs or not local_ranks:
                continue
            address = old_addresses.get(member.id)
            if address is None:
                seconds = self._run.applied.spec.runtime.deadlines.rpc
                call = self._run.cluster.submit(member.name, "direct_address", (), {}, timeout=seconds)
                address = call.future.result().value
            self._addresses[member.id] = address
            pairs += [(envs.index(member.rank), index, address) for index in local_ranks]
        return tuple(pairs)

    def _ranks(self, group: str, version: int | None = None) -> tuple[int, ...]:
        return tuple(sorted(int(member.name.partition(":")[2]) for member in self._members(group, version)))

    def _members(self, group: str, version: int | None = None) -> list[Member]:
        """Return the processes of a worker group that can take part now. `version`: only those that serve this version of the weights."""
        present = [m for m in self._run.cluster.members(group) if m.state.constructed]
        if version is None:
            return present
        return [m for m in present if self._versions.version_of((m.name, m.incarnation)) == version]

    # --- collections that begin early --------------------------------------------------------------------------------

    def begin(self, step: int, *, version: int) -> Pending | None:
        """Request the collection of a later step, and return it before it has ended. End it with `take`; `settle` may be called before.

        The rollouts make no decision until they serve `version` of the weights, which is the one published last or the next. The call may wait
        up to `deadlines.rpc` for the address of a new env worker. Returns None if no env worker is present, if no rollout serves the version
        published last, or if an env worker does not answer.
        """
        deadlines = self._run.applied.spec.runtime.deadlines
        # For weights that are not published yet, the rollouts first wait for training and weight sync.
        waits_for_weights = version > self._versions.committed
        try:
            return self._start(
                self._request(step, version=version),
                longest_collection(deadlines) if waits_for_weights else deadlines.rollout,
            )
        except (InfrastructureError, DeadlineExceeded):
            return None

    def is_intact(self, pending: Pending) -> bool:
        """Return whether `pending`, which was requested before the last version was published, can run with all its members.

        It cannot if an env worker was lost meanwhile, or if a rollout was lost or does not serve the version published last.
        """
        ready = self._ranks(ROLLOUT, self._versions.committed)
        return not any(call.lost for call in pending.envs) and set(pending.request.rollouts) <= set(ready)

    def settle(self, pending: Pending) -> Pending | None:
        """Wait until the env workers and rollouts have finished the collection `pending`, and return it. Then call `take`.

        Call this before new weights are published, because rollouts load weights only between two collections. The trajectories stay in the
        channel. Returns None if the collection was abandoned: a rollout or the last env worker was lost, a call failed with
        InfrastructureError, or the deadline passed. Raises the other errors of workers.
        """
        try:
            self._await_workers(pending)
            self._answers(pending)
            return pending
        except (InfrastructureError, DeadlineExceeded) as error:
            self._lost_early(pending, error)
            return None
        except BaseException:
            pending.cancel()
            raise

    def take(self, pending: Pending) -> list[EpisodeStats] | None:
        """Let the actors receive the trajectories of a collection that `begin` returned, and wait until it has ended.

        Its deadline is now `deadlines.rollout` seconds from this call. Returns the statistics of the episodes, one entry for each env worker, or
        None if the collection was abandoned: a rollout or the last env worker was lost, a call failed with InfrastructureError, or the deadline
        passed. Raises the other errors of workers.
        """
        pending.deadline = time.monotonic() + self._run.applied.spec.runtime.deadlines.rollout
        try:
            pending.receiving = self._receive(pending.request)
            self._await_workers(pending)
            return self._finish(pending)
        except (InfrastructureError, DeadlineExceeded) as error:
            self._lost_early(pending, error)
            return None
        finally:
            pending.cancel()

    def abandon(self, pending: Pending) -> None:
        """Cancel a collection that is of no use. What it leaves on the channels is deleted when a later one has ended."""
        pending.cancel()
        self._abandoned.append(pending.request)

    def _lost_early(self, pending: Pending, error: Exception) -> None:
        self.abandon(pending)
        self.repeated += 1
        logger.warning("a collection that began early was lost: %s", error)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _run_once(self, request: CollectionRequest) -> list[EpisodeStats]:
        pending = self._start(request, self._run.applied.spec.runtime.deadlines.rollout)
        try:
            if request.mode == "train":
                pending.receiving = self._receive(request)
            self._await_workers(pending)
            return self._finish(pending)
        except (InfrastructureError, DeadlineExceeded):
            self.abandon(pending)
            raise
        finally:
            pending.cancel()

    def _start(self, request: CollectionRequest, limit: float) -> Pending:
        """Call the members of a collection, which must end within `limit` seconds."""
        workers, envs = self._call(request, limit)
        version = self._versions.committed if request.version is None else request.version
        return Pending(request, version, workers, envs, deadline=time.monotonic() + limit)

    def _receive(self, request: CollectionRequest) -> WorkerGroupFuncResult:
        limit = self._run.applied.spec.runtime.deadlines.rollout
        receiving: WorkerGroupFuncResult = self._actor.within(limit).recv_rollout_trajectories(
            self._trajectories, request, limit
        )
        return receiving

    def _await_workers(self, pending: Pending) -> None:
        while not self._run.stops.wait_done(pending.workers, LOOK_S):
            self._require(pending)
            self._tell_losses(pending)
            if time.monotonic() > pending.deadline:
                limit = self._run.applied.spec.runtime.deadlines.rollout
                raise DeadlineExceeded(f"a collection must end within deadlines.rollout {limit:.0f} s, got none")

    def _finish(self, pending: Pending) -> list[EpisodeStats]:
        answers = self._answers(pending)
        if pending.receiving is not None:
            self._wait(pending.receiving, max(pending.deadline - time.monotonic(), 1.0))
        self._delete_leftovers()
        return [answer for answer in answers if isinstance(answer, EpisodeStats)]

    def _delete_leftovers(self) -> None:
        """Delete what abandoned collections have left on the channels. A later one has ended, so that their workers put nothing any more."""
        requests, self._abandoned = self._abandoned, []
        stages = range(embodied_options(self._run.applied.spec).stages) if requests else ()
        for request in requests:
            pairs = product(stages, range(len(request.envs)), range(len(request.rollouts)))
            exchanged = [(request.key(*pair), None) for pair in pairs]
            self._observations.move(exchanged)
            self._actions.move(exchanged)
            self._trajectories.move([(request.trajectory_key(rank), None) for rank in range(request.actors)])

    def _answers(self, pending: Pending) -> list[Any]:
        """Return what the env workers and rollouts of a collection that has ended answered."""
        return self._wait(pending.workers, 0.0)

    def _wait(self, result: WorkerGroupFuncResult, seconds: float) -> list[Any]:
        """Wait for calls to several workers; return their answers.

        Raises InfrastructureError or DeadlineExceeded if the collection can be run again, and the error of a worker otherwise.
        """
        try:
            return self._run.stops.wait(result, seconds)
        except WorkerErrors as errors:
            _, fatal = errors.split((InfrastructureError, DeadlineExceeded))
            if fatal is None:
                raise InfrastructureError(str(errors)) from errors
            raise

    def _call(self, request: CollectionRequest, limit: float) -> tuple[WorkerGroupFuncResult, list[EnvCall]]:
        submit = self._run.cluster.submit
        to_env, to_rollout = (self._actions, self._observations), (self._observations, self._actions)
        env_method, rollout_method = ("evaluate", "evaluate") if request.mode == "eval" else ("interact", "generate")
        actor_channel = () if request.mode == "eval" else (self._trajectories,)
        names = [f"{ENV}:{rank}" for rank in request.envs]
        calls: list[Any] = [submit(name, env_method, (*to_env, request), {}, timeout=limit) for name in names]
        envs: list[EnvCall] = []
        if request.mode == "train":
            episodes = embodied_options(self._run.applied.spec).num_envs
            envs = [EnvCall(name, call, episodes=episodes) for name, call in zip(names, calls, strict=True)]
            calls = [*envs]
        calls += [
            submit(f"{ROLLOUT}:{rank}", rollout_method, (*to_rollout, *actor_channel, request), {}, timeout=limit)
            for rank in request.rollouts
        ]
        return WorkerGroupFuncResult("collection", rollout_method, dict(enumerate(calls))), envs

    def _require(self, pending: Pending) -> None:
        """Check that the members that a collection needs are present.

        Gives up the calls to lost env workers, because these calls might never end. Raises InfrastructureError if a rollout or all env workers
        are gone, or any member of an evaluation.
        """
        request, present = (
            pending.request,
            {m.name for group in (ENV, ROLLOUT) for m in self._run.cluster.members(group)},
        )
        member_names = [f"{ROLLOUT}:{rank}" for rank in request.rollouts]
        member_names += [f"{ENV}:{rank}" for rank in request.envs if not pending.envs]
        if absent := [name for name in member_names if name not in present]:
            raise InfrastructureError(f"{', '.join(absent)} left in the middle of a collection")
        for call in pending.envs:
            if call.name not in present and not call.future.done():
                call.give_up()
        if pending.envs and all(call.lost for call in pending.envs):
            raise InfrastructureError("all env workers left in the middle of a collection")

    def _tell_losses(self, pending: Pending) -> None:
        """Report newly lost env workers to the rollouts, which then wait for no further observations of these."""
        request, spec = pending.request, self._run.applied.spec
        options, group = embodied_options(spec), simulators_per_group(spec.algorithm)
        lost_indices = {index for index, call in enumerate(pending.envs) if call.lost} - pending.reported
        pending.reported |= lost_indices
        per_stage = options.num_envs // options.stages
        for route in routes(per_stage, env_workers=len(request.envs), rollouts=len(request.rollouts), group=group):
            if route.env in lost_indices:
                for stage in range(options.stages):
                    key = request.key(stage, route.env, route.rollout)
                    self._observations.put(EnvOutput(obs=None), key=key, async_op=True)
        for index in sorted(lost_indices):
            logger.warning("env:%s was lost; the collection goes on with the other env workers", request.envs[index])
