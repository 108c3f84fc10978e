"""The env worker of simulators: it sends observations to the rollouts and makes the actions that they choose.

    runner -- interact(request) --> env worker -- EnvOutput --> rollout
                                             <-- actions --

There is one vector environment per pipeline stage. While the rollouts choose the actions of one stage, the simulators of the other step.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rl_core.api.embodied import EmbodiedOptions, embodied_options, longest_collection, simulators_per_group
from rl_core.api.errors import InfrastructureError
from rl_core.api.job import RLJobSpec
from rl_core.api.records import EnvOutput
from rl_core.channel import Channel
from rl_core.channel.direct import DirectChannel
from rl_core.envs.embodied import eval_seeds, eval_share, train_seed
from rl_core.envs.gymnasium import GymnasiumVectorEnv
from rl_core.envs.video import FRAMES, gif, require_imageio
from rl_core.messages.embodied import CollectionRequest, EpisodeStats, SimulatorSettings
from rl_core.plan.routing import routes
from rl_core.transports.direct import Listener, Mailbox
from rl_core.transports.shared_rows import ColumnAddress
from rl_core.workers.loop_thread import LoopThread
from rl_core.workers.worker import Worker


class EnvWorker(Worker):
    """Steps `env.options.numEnvs` simulators per process of the group env."""

    def __init__(self, cfg: RLJobSpec | Mapping[str, Any]) -> None:
        """Build the simulators of `cfg`, the job's spec. Raises ConfigError when one cannot be built."""
        self.spec = cfg if isinstance(cfg, RLJobSpec) else RLJobSpec.model_validate(dict(cfg))
        self.options: EmbodiedOptions = embodied_options(self.spec)
        self.per_stage = self.options.num_envs // self.options.stages
        self._group = simulators_per_group(self.spec.algorithm)
        self._step = self._epoch = 0
        self._interacting: asyncio.Future[EpisodeStats] | None = None
        self._prefetched: list[EnvOutput] | None = None
        self._parts: list[list[_Part]] = []
        """For each stage, its parts in the order of the simulators."""
        self._listener = Listener(self.identity.uid)
        self._mailbox = Mailbox(self._listener, seconds=self.spec.runtime.deadlines.rollout)
        self._thread = LoopThread("collection")
        """Runs the collections, because simulators may take long to step."""
        self._evaluation: GymnasiumVectorEnv | None = None
        self.envs: list[GymnasiumVectorEnv] = []
        try:
            for stage in range(self.options.stages):
                self.envs.append(self._build(self.per_stage, self.options.auto_reset, self._seeds_of(stage)))
            if self._records(self.rank):
                require_imageio()
                self._evaluation_of(eval_share(self.options.eval_episodes, 0, self.spec.env.replicas))
        except BaseException:
            self.close()
            raise
        self._started = [False] * self.options.stages

    async def direct_address(self) -> str:
        """Return the address at which rollouts of this host connect directly."""
        return self._listener.address

    def init_worker(self) -> None:
        """Do nothing: the simulators are built with the object."""

    # --- one collection ----------------------------------------------------------------------------------------------

    async def interact(
        self, input_channel: Channel, output_channel: Channel, request: CollectionRequest | None = None
    ) -> EpisodeStats:
        """Take part in one collection: send observations to `output_channel`, and step the simulators with actions from `input_channel`.

        `request` describes the collection; None means one by all workers of the job. A collection in progress is abandoned.
        """
        request = request or CollectionRequest.of_job(self.spec, step=self._step + 1)
        if self._interacting is not None:
            self._interacting.cancel()
        self._interacting = self._thread.submit(self._run(input_channel, output_channel, request))
        return await self._interacting

    async def evaluate(
        self, input_channel: Channel, output_channel: Channel, request: CollectionRequest | None = None
    ) -> EpisodeStats:
        """Take part in an evaluation; see `interact`. `request` None means all episodes of one."""
        if request is None:
            request = CollectionRequest.of_job(self.spec, step=1, mode="eval", episodes=self.options.eval_episodes)
        return await self.interact(input_channel, output_channel, request)

    async def _run(self, actions: Channel, observations: Channel, request: CollectionRequest) -> EpisodeStats:
        self._mailbox.keep(request.prefix)
        seconds = longest_collection(self.spec.runtime.deadlines)
        exchange = DirectChannel(self._mailbox, get_from=actions, put_to=observations, seconds=seconds)
        try:
            await self._open(exchange, request)
            return await (self._evaluate if request.mode == "eval" else self._collect)(exchange, request)
        except Exception:
            exchange.disconnect()  # Tells the rollouts that no observations follow.
            raise
        finally:
            exchange.close()
            for env in self.envs:
                env.end_sharing()

    async def _open(self, exchange: DirectChannel, request: CollectionRequest) -> None:
        """Accept the direct connections of rollouts on this host, and determine which simulators each rollout serves.

        If all rollouts of a stage lend shared memory, its large observations are written there.
        """
        index = request.envs.index(self.rank)
        lent_columns: dict[tuple[str, int], np.ndarray] = {}
        for rollout in range(len(request.rollouts)):
            if request.address(index, rollout) is not None:
                with self.waiting("connection", f"rollout:{request.rollouts[rollout]}"):
                    opening, connection = await exchange.accept(request.opening_key(rollout))
                lent_columns |= {(key, rollout): packed for key, packed in opening.items()}
                for stage in range(self.options.stages):
                    exchange.connect(request.key(stage, index, rollout), connection)
        all_routes = routes(
            self.per_stage, env_workers=len(request.envs), rollouts=len(request.rollouts), group=self._group
        )
        for stage, env in enumerate(self.envs):
            own_routes = [route for route in all_routes if route.env == index]
            places = [lent_columns.get((request.columns_key(stage), route.rollout)) for route in own_routes]
            columns = [
                columns_of(packed, route.size)
                for packed, route in zip(places, own_routes, strict=True)
                if packed is not None
            ]
            if len(columns) == len(own_routes):
                env.share([column for part in columns for column in part])
        self._parts = [
            [
                _Part(
                    request.key(stage, index, route.rollout), route.size, f"rollout:{request.rollouts[route.rollout]}"
                )
                for route in all_routes
                if route.env == index
            ]
            for stage in range(self.options.stages)
        ]

    async def _collect(self, exchange: DirectChannel, request: CollectionRequest) -> EpisodeStats:
        num_before, parts = sum(env.num_steps for env in self.envs), []
        for epoch in range(self.options.rollout_epochs):
            self.update_reset_state_ids(request.step, epoch)
            for env in self.envs if epoch else ():
                env.next_row()
            parts.append(await self._run_epoch(exchange, is_last=epoch == self.options.rollout_epochs - 1))
        return EpisodeStats(
            episodes=[episode for part in parts for episode in part.episodes],
            steps=sum(env.num_steps for env in self.envs) - num_before,
            lost=sum(part.lost for part in parts),
            interventions=sum(part.interventions for part in parts),
        )

    async def _run_epoch(self, exchange: DirectChannel, *, is_last: bool) -> EpisodeStats:
        """Make the steps of a rollout epoch; return its episodes. `is_last` says whether it is the last one of the collection."""
        stages = range(self.options.stages)
        episodes: list[dict[str, Any]] = []
        num_lost = interventions = 0
        if self._prefetched is None:
            self.prefetch_train_bootstrap()
        outputs, self._prefetched = self._prefetched or [], None
        for stage in stages:
            outputs[stage].env_ids = np.arange(self.per_stage, dtype=np.int64) + self._first_env(stage)
            self._send(exchange, stage, outputs[stage])
        for decision in range(self.options.decisions):
            for stage in stages:
                actions = await self._receive(exchange, stage)
                output = self.env_interact_step(actions, stage)
                if is_last and decision == self.options.decisions - 1:
                    # Once the rollout has the last output, it may give the shared memory back, and another process may write to it.
                    self.envs[stage].end_sharing()
                self._send(exchange, stage, output)
                episodes.extend(output.final_info or ())
                num_lost += int(output.lost.sum()) if output.lost is not None else 0
                interventions += int(output.intervene_flags.sum()) if output.intervene_flags is not None else 0
            self.record_progress("env_steps", self.options.num_envs)
        return EpisodeStats(episodes=episodes, lost=num_lost, interventions=interventions)

    async def _evaluate(self, exchange: DirectChannel, request: CollectionRequest) -> EpisodeStats:
        index, workers = request.envs.index(self.rank), len(request.envs)
        key = request.key(0, index, index % len(request.rollouts))
        episodes: list[dict[str, Any]] = []
        videos: list[bytes] = []
        if count := eval_share(request.episodes, index, workers):
            env = self._evaluation_of(count)
            seeds = eval_seeds(self.spec.algorithm.seed, index, workers, count)
            output = env.reset(seeds, record=self.options.videos if self._records(index) else 0)
            for _ in range(-(-self.options.eval_horizon // self.options.chunk)):
                exchange.put(output, key)
                output = env.chunk_step(np.asarray(await exchange.get_async(key)))
                episodes.extend(output.final_info or ())
                self.record_progress("env_steps", count)
                if env.all_resting:
                    break
            videos = [gif(frames) for frames in env.recordings()]
            episodes += env.open_episodes()
        exchange.put(EnvOutput(obs=None), key)  # no observations follow
        return EpisodeStats(episodes=episodes, videos=videos)

    def _records(self, index: int) -> bool:
        """Return whether this env worker records videos of an evaluation. Only the first of `request.envs`, which has index 0, does."""
        return index == 0 and self.options.videos > 0

    def _evaluation_of(self, count: int) -> GymnasiumVectorEnv:
        """Return `count` simulators for an evaluation, one per episode."""
        if self._evaluation is None or self._evaluation.num_envs != count:
            if self._evaluation is not None:
                self._evaluation.close()
            frame_interval = -(-self.options.eval_horizon // FRAMES) if self.options.videos else 0
            self._evaluation = self._build(count, False, None, record_every=frame_interval)
        return self._evaluation

    # --- simulators --------------------------------------------------------------------------------------------------

    def bootstrap_step(self, stage: int) -> EnvOutput:
        """Return the output with which the trajectory of a pipeline stage begins.

        The simulators are reset for it. With auto-reset this is done for the first trajectory only; later ones begin with the latest
        observations, so that episodes continue from one trajectory to the next.
        """
        env = self.envs[stage]
        if self.options.auto_reset and self._started[stage]:
            return env.current()
        output = env.reset()
        self._started[stage] = True
        return output

    def prefetch_train_bootstrap(self) -> None:
        """Begin the episodes of the next rollout epoch now. Raises RuntimeError when they have been begun already."""
        if self._prefetched is not None:
            raise RuntimeError("prefetch_train_bootstrap must be called once per rollout epoch, got a second call")
        self._prefetched = [self.bootstrap_step(stage) for stage in range(self.options.stages)]

    def env_interact_step(self, chunk_actions: Any, stage: int) -> EnvOutput:
        """Make a chunk of actions [B, C, ...] in the simulators of a stage.

        If this raises, some of the simulators have made the actions and others have not, and all are reset for the next trajectory.
        """
        try:
            return self.envs[stage].chunk_step(np.asarray(chunk_actions))
        except Exception:  # Whatever it is, the simulators are no longer at the same decision.
            self._started[stage] = False
            raise

    def update_reset_state_ids(self, step: int | None = None, epoch: int = 0) -> None:
        """Choose the reset seeds of the simulators for one rollout epoch of training step `step`; None means the next step."""
        self._step, self._epoch = self._step + 1 if step is None else step, epoch
        for env in self.envs:
            env.restart_seeds()

    def status(self) -> dict[str, Any]:
        """Return the number of simulators and of the steps that they made."""
        return {"simulators": self.options.num_envs, "steps": sum(env.num_steps for env in self.envs)}

    def close(self) -> None:
        """End the simulators."""
        self._thread.close()
        self._mailbox.close()
        for env in (*self.envs, *filter(None, [self._evaluation])):
            env.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _build(self, count: int, auto_reset: bool, seed_of: Any, *, record_every: int = 0) -> GymnasiumVectorEnv:
        deadlines, options = self.spec.runtime.deadlines, self.options
        settings = SimulatorSettings(
            id=options.id,
            kwargs=options.kwargs,
            auto_reset=auto_reset,
            ignore_terminations=options.ignore_terminations,
            label=f"simulator {options.id}",
            extensions=list(self.spec.extensions),
            record_every=record_every,
        )
        return GymnasiumVectorEnv(
            options.id,
            count,
            auto_reset=auto_reset,
            vectorization=options.vectorization,
            seed_of=seed_of,
            settings=settings,
            start_seconds=deadlines.env_reset,
            step_seconds=deadlines.env_step,
        )

    def _seeds_of(self, stage: int) -> Any:
        """Return a function from (index of the simulator, episode) to a seed.

        Simulators of a group share seeds, which differ between rollout epochs and between steps.
        """

        def seed(index: int, episode: int) -> int:
            group = self._first_env(stage) + index
            base_seed = self.spec.algorithm.seed + 7919 * self._step + (self._epoch << 40)
            return train_seed(base_seed, group // self._group, episode)

        return seed

    def _first_env(self, stage: int) -> int:
        """Return the number, in the job, of the first simulator of a stage."""
        return self.rank * self.options.num_envs + stage * self.per_stage

    def _send(self, exchange: DirectChannel, stage: int, output: EnvOutput) -> None:
        """Send each rollout its simulators' part of the output."""
        start = 0
        for part in self._parts[stage]:
            single = part.size == self.per_stage
            exchange.put(output if single else slice_output(output, start, start + part.size), part.key)
            start += part.size

    async def _receive(self, exchange: DirectChannel, stage: int) -> np.ndarray:
        """Return the actions of a stage [B, C, ...] from all rollouts that serve it."""
        parts = []
        for part in self._parts[stage]:
            with self.waiting("actions", part.rollout):
                actions = np.asarray(await exchange.get_async(part.key))
            if len(actions) != part.size:
                raise InfrastructureError(
                    f"actions of {part.size} simulators are expected from {part.rollout}, got {len(actions)}"
                )
            parts.append(actions)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class _Part(NamedTuple):
    """Consecutive simulators of a stage that one rollout serves in a collection."""

    key: str
    size: int
    rollout: str
    """Its name."""


def columns_of(packed: np.ndarray, count: int) -> list[ColumnAddress]:
    """Return the addresses of `count` columns, of which the first one is given in packed form."""
    first = ColumnAddress.unpack(packed)
    return [replace(first, column=first.column + index) for index in range(count)]


def slice_output(output: EnvOutput, begin: int, end: int) -> EnvOutput:
    """Return the rows from `begin` to `end` of an output."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: array[begin:end] for name, array in value.items()}
        return None if value is None else value[begin:end]

    return EnvOutput(
        obs=cut(output.obs),
        final_obs=cut(output.final_obs),
        rewards=cut(output.rewards),
        terminations=cut(output.terminations),
        truncations=cut(output.truncations),
        dones=cut(output.dones),
        sub_steps=cut(output.sub_steps),
        lost=cut(output.lost),
        env_ids=cut(output.env_ids),
        intervene_actions=cut(output.intervene_actions),
        intervene_flags=cut(output.intervene_flags),
    )
