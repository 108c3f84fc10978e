"""`MultiStepRolloutWorker`: a rollout that chooses the actions of simulators, chunk by chunk, and sends the trajectories to the trainer.

    env worker -- EnvOutput --> recv_env_output -> predict -> send_chunk_actions --> env worker
                                    trajectories --> actor

A version of the weights is loaded between two collections only, so that a trajectory has one version.

Legend: B simulators, C actions of a chunk, T decisions.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_core.api.embodied import EmbodiedOptions, embodied_options, simulators_per_group
from rl_core.api.errors import ConfigError, DataError, InfrastructureError
from rl_core.api.job import RLJobSpec
from rl_core.api.records import ChunkStepResult, EnvOutput
from rl_core.batching.trajectories import join_epochs, merge_trajectories
from rl_core.channel import Channel
from rl_core.channel.direct import DirectChannel, PeerLost
from rl_core.messages.embodied import CollectionRound
from rl_core.plan.routing import data_rank_of, routes, trajectory_parts
from rl_core.policies.base import Mode, splits_values
from rl_core.policies.folder import build_policy, load_policy
from rl_core.rollouts.decoupled import DecoupledDecisions, Lane
from rl_core.rollouts.embodied import (
    bootstrap_rewards,
    cut_trajectory,
    host_result,
    host_tensor,
    lost_output,
    merge_env_outputs,
    output_of,
    tensor_of,
    tensors_of,
)
from rl_core.rollouts.observation_rows import ObservationRows, large_observations, lend_rows
from rl_core.rollouts.pausing_target import pausing
from rl_core.rollouts.policy_target import PolicyWeightTarget, saved_tensors
from rl_core.rollouts.recorder import TrajectoryRecorder
from rl_core.rollouts.weight_methods import WeightMethods
from rl_core.transports.direct import Connection, Mailbox
from rl_core.transports.shared_rows import Layout
from rl_core.workers.loop_thread import LoopThread

Exchange = Channel | DirectChannel


class MultiStepRolloutWorker(WeightMethods):
    """Runs the policy of `model.path` for the simulators of the env workers."""

    def __init__(self, cfg: RLJobSpec | Mapping[str, Any], placement: Mapping[str, Any] | None = None) -> None:
        """Configure the worker for `cfg`, the job's spec; the policy is built by `init_worker`. `placement` is not used."""
        self.cfg = cfg if isinstance(cfg, RLJobSpec) else RLJobSpec.model_validate(dict(cfg))
        self.options: EmbodiedOptions = embodied_options(self.cfg)
        self.per_stage = self.options.num_envs // self.options.stages
        self._group = simulators_per_group(self.cfg.algorithm)
        self._decisions = self.options.horizon // self.options.chunk
        """Decisions of a rollout epoch."""
        critic = self.cfg.algorithm.critic_in_use
        self._gamma = critic.gamma if critic is not None else 1.0
        self._with_values = critic is not None
        self.model: nn.Module | None = None
        self.global_step = 0
        self._round = CollectionRound(number=0, step=1, envs=(0,), rollouts=(0,))
        self._gone: set[int] = set()
        """Places of env workers that were lost in the collection."""
        self._latest: dict[tuple[int, int], EnvOutput] = {}
        """(stage, place of the env worker) -> its last output in the collection."""
        self._large: Layout = {}
        """Types and shapes of the large observations, known after the first collection; empty before."""
        self._rows: list[ObservationRows] = []
        """Memory for the large observations of the collection, by stage. Empty where they come in messages."""
        self._routed: tuple[CollectionRound, list[tuple[int, int]]] | None = None
        """A collection and the env workers that this rollout serves in it."""
        self._working: asyncio.Future[int] | None = None
        self._offloaded = False
        self._mailbox = Mailbox(seconds=self.cfg.runtime.deadlines.rollout)
        self._connections: dict[str, Connection] = {}
        """Direct connections by the address of the env worker."""
        self._thread = LoopThread("collection")
        """Runs the collections, because a policy may take long to choose. One decides at a time, so that random numbers do not mix."""

    # --- bring-up ----------------------------------------------------------------------------------------------------

    def init_worker(self) -> None:
        """Build the policy, of `model.path` where the runner sent none, and the receiver of its weights. Does nothing when called again."""
        if self.model is not None:
            return
        config, seed = self.files.get("config.json"), self.cfg.algorithm.seed
        policy = load_policy(self.cfg.model.path, seed=seed) if config is None else build_policy(config, seed=seed)
        self.model = policy.to(self.device).eval()
        self._build_receiver(self.cfg, pausing(PolicyWeightTarget(saved_tensors(self.model)), self._pause))

    async def start_serving(self) -> None:
        """Report the version that is served: the hub has forgotten that of a member that lost its connection."""
        self._report_version()

    def sync_model_from_actor(self) -> int:
        """Return the version that is served. The trainer sends its weights, so that there is nothing to fetch."""
        return self._receiver().current()[0]

    def set_global_step(self, global_step: int) -> None:
        """Set the trainer's last step. Raises ValueError when it is negative or goes back."""
        if global_step < self.global_step:
            raise ValueError(f"global_step must be {self.global_step} or more, got {global_step}; steps only rise")
        self.global_step = global_step

    # --- one decision ------------------------------------------------------------------------------------------------

    def predict(self, env_obs: dict[str, Any], mode: Mode = "train") -> tuple[Tensor, dict[str, Any]]:
        """Return actions [B, C, ...] for observations [B, ...] by name, with prev_logprobs, prev_values and forward_inputs.

        Everything is on the CPU. Mode "train" samples, "eval" takes the most likely action.
        """
        if self.model is None:
            raise InfrastructureError("the policy is not built yet; call init_worker first")
        given = tensors_of(env_obs)
        obs = self._on_device(given)
        with torch.no_grad():
            actions, result = self.model.predict(obs, mode)
        return host_result(given, obs, actions, result)

    def _on_device(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        return given if self.device == "cpu" else {name: tensor.to(self.device) for name, tensor in given.items()}

    def get_dones_and_rewards(self, env_output: EnvOutput | Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return dones [B, C], and scaled rewards [B, C] with the value of the final observation added where an episode was cut.

        Rewards are None for the first output of a trajectory.
        """
        env_output = output_of(env_output)
        dones = tensor_of(env_output.dones).contiguous()
        if env_output.rewards is None:
            return dones, None
        rewards = tensor_of(env_output.rewards).contiguous()
        if self.options.reward_scale != 1:
            rewards = rewards * self.options.reward_scale
        wanted = self.options.auto_reset and self._with_values and self.options.bootstrap != "none"
        if not wanted or env_output.final_obs is None:
            return dones, rewards
        truncations = tensor_of(env_output.truncations)
        ends = dones if self.options.bootstrap == "always" else truncations
        if not bool(ends[:, -1].any()):
            return dones, rewards
        return dones, bootstrap_rewards(
            rewards,
            self.predict(env_output.final_obs, "eval")[1]["prev_values"],
            truncations,
            dones,
            gamma=self._gamma,
            terminations=tensor_of(env_output.terminations),
            bootstrap_type=self.options.bootstrap,
        )

    # --- messages ----------------------------------------------------------------------------------------------------

    def get_src_ranks(self, stage: int = 0) -> list[tuple[int, int]]:
        """Return (place of the env worker, number of simulators) of each env worker that this rollout serves in a stage."""
        if self._routed is None or self._routed[0] is not self._round:
            round = self._round
            parts = routes(self.per_stage, env_workers=len(round.envs), rollouts=len(round.rollouts), group=self._group)
            mine = [(route.env, route.size) for route in parts if route.rollout == self._place]
            self._routed = self._round, mine
        return self._routed[1]

    def get_dst_ranks(self, stage: int = 0) -> list[tuple[int, int]]:
        """Return where the actions of a stage go: as `get_src_ranks`."""
        return self.get_src_ranks(stage)

    async def recv_env_output(
        self, input_channel: Exchange, mode: Mode = "train", stage: int = 0, *, begins: bool = False
    ) -> EnvOutput:
        """Receive the outputs of all env workers that this rollout serves, merged in their order, as tensors.

        `begins`: they begin a rollout epoch. A lost env worker's simulators stay lost. Raises InfrastructureError if it never sent any.
        """
        sources, shards = self.get_src_ranks(stage), []
        for env, _ in sources:
            shard = None
            if env not in self._gone:
                with self.waiting("observations", f"env:{self._round.envs[env]}"), suppress(PeerLost):
                    shard = await input_channel.get_async(key=self._round.key(stage, env, self._place))
            shards.append(self._output_of(stage, env, shard, begins=begins))
        sizes = [size for _, size in sources]
        if not self._rows:
            return merge_env_outputs(shards, sizes)
        rows = self._rows[stage]
        shards = rows.receive(shards, sizes, [env in self._gone for env, _ in sources])
        return rows.fill(merge_env_outputs(shards, sizes))

    def _output_of(self, stage: int, env: int, message: Any, *, begins: bool) -> EnvOutput:
        """Return the output that an env worker sent. Any other message means that it is lost; what stands for its output is returned."""
        if env not in self._gone and isinstance(message, EnvOutput) and message.obs is not None:
            output = message
        else:
            self._gone.add(env)
            output = lost_output(self._latest.get((stage, env)), self.options.chunk, begins=begins)
        self._latest[stage, env] = output
        return output

    def send_chunk_actions(
        self, output_channel: Exchange, chunk_actions: Tensor | np.ndarray, mode: Mode = "train", stage: int = 0
    ) -> None:
        """Send each env worker the actions of its simulators. Raises DataError when their numbers are not those of the actions."""
        destinations, begin = self.get_dst_ranks(stage), 0
        actions = chunk_actions.detach().cpu().numpy() if isinstance(chunk_actions, Tensor) else chunk_actions
        if sum(size for _, size in destinations) != len(actions):
            raise DataError(
                f"actions must be as many as the simulators {[size for _, size in destinations]}, got {len(actions)}"
            )
        for env, size in destinations:
            self._send(output_channel, stage, env, actions[begin : begin + size])
            begin += size

    def _send(self, channel: Exchange, stage: int, env: int, actions: np.ndarray) -> None:
        if env not in self._gone:
            try:
                part = np.ascontiguousarray(actions)
                channel.put(part, key=self._round.key(stage, env, self._place), async_op=True)
            except PeerLost:
                self._gone.add(env)

    # --- one collection ----------------------------------------------------------------------------------------------

    async def generate(
        self,
        input_channel: Channel,
        output_channel: Channel,
        actor_channel: Channel,
        round: CollectionRound | None = None,
    ) -> int:
        """Choose the actions of one collection and send its trajectories to `actor_channel`; return the number of decisions.

        Observations come from `input_channel`, actions go to `output_channel`. A collection in progress is abandoned.
        """
        return await self._work(round, lambda: self._generate(input_channel, output_channel, actor_channel, round))

    async def evaluate(
        self, input_channel: Channel, output_channel: Channel, round: CollectionRound | None = None
    ) -> int:
        """Choose actions without sampling until the env workers have no more episodes; return the number of decisions."""
        round = round or replace(self._round, mode="eval")
        return await self._work(round, lambda: self._evaluate(input_channel, output_channel, round))

    async def _work(self, round: CollectionRound | None, work: Callable[[], Coroutine[Any, Any, int]]) -> int:
        """Run `work()` instead of the collection in progress, with the weights of `round`. Raises InfrastructureError if it is given up."""
        self._stop()
        if self._working is not None:
            await asyncio.wait({self._working})
        try:
            if round is not None and round.version is not None:
                await self._await_version(round.version)
            self._round = round or self._round
            self._working = self._thread.submit(work())
            return await self._working
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr] # the caller has cancelled the call
                raise
            raise InfrastructureError("the rollout has given up the collection; it is run again") from None

    async def _generate(
        self, observations: Channel, actions: Channel, trajectories: Channel, round: CollectionRound | None
    ) -> int:
        options, version = self.options, self.sync_model_from_actor() if self._weights is not None else self.global_step
        run_epoch = self._run_decoupled_epoch if options.batching == "decoupled" else self._run_epoch
        self._gone, self._latest = set(), {}
        with self._lent_rows(), closing(self._exchange(observations, actions)) as exchange:
            self._seed()
            epochs = [await run_epoch(exchange, version) for _ in range(options.rollout_epochs)]
            await self._deliver(trajectories, epochs)
        return options.rollout_epochs * self._decisions * options.stages

    async def _run_epoch(self, exchange: DirectChannel, version: int) -> list[list[TrajectoryRecorder]]:
        """Make the decisions of a rollout epoch; return their recorders, one for each stage."""
        recorders = [self._recorder(stage) for stage in range(self.options.stages)]
        for decision in range(self._decisions + 1):
            for stage, recorder in enumerate(recorders):
                output = await self.recv_env_output(exchange, stage=stage, begins=decision == 0)
                if decision == self._decisions:
                    self._end(recorder, output)
                    continue
                step, values = self._decide(output, version)
                self.send_chunk_actions(exchange, step.actions, stage=stage)
                # The rest is done while the simulators make the actions.
                if values is not None:
                    step.prev_values = values()
                self._observe(recorder, output)
                recorder.decide(step)
            self.record_progress("decisions")
        return [[recorder] for recorder in recorders]

    async def _run_decoupled_epoch(self, exchange: DirectChannel, version: int) -> list[list[TrajectoryRecorder]]:
        """Do the same, but decide for each env worker as its observations come. A stage has several recorders."""
        stages, round = range(self.options.stages), self._round
        lanes = [
            Lane(stage, env, size, round.key(stage, env, self._place), self._recorder(stage))
            for stage in stages
            for env, size in self.get_src_ranks(stage)
        ]
        await DecoupledDecisions(
            lanes=lanes,
            decisions=self._decisions,
            min_batch_size=self.options.min_batch_size,
            lost=self._gone.__contains__,
            output_of=lambda lane, message: self._output_of(lane.stage, lane.env, message, begins=lane.made == 0),
            decide=lambda output: self._decide(output, version),
            act=lambda lane, chosen: self._send(exchange, lane.stage, lane.env, chosen.numpy()),
            observe=self._observe,
            end=self._end,
            waiting=lambda env: self.waiting("observations", f"env:{round.envs[env]}"),
            progress=self.record_progress,
        ).run(exchange)
        return [[lane.recorder for lane in lanes if lane.stage == stage] for stage in stages]

    def _recorder(self, stage: int) -> TrajectoryRecorder:
        return TrajectoryRecorder(sender=self._place, stage=stage, auto_reset=self.options.auto_reset)

    def _decide(self, output: EnvOutput, version: int) -> tuple[ChunkStepResult, Callable[[], Tensor] | None]:
        """Return the decision on an output, and what returns its values where it has none yet. Raises ConfigError if none has any."""
        if self._with_values and splits_values(self.model):
            given = tensors_of(output.obs)
            obs = self._on_device(given)
            with torch.no_grad():
                actions, result = host_result(given, obs, *self.model.act(obs, "train"))  # type: ignore[union-attr]
            return ChunkStepResult(actions=actions, versions=version, **result), lambda: self._values(obs)
        actions, result = self.predict(output.obs)
        if self._with_values and result["prev_values"] is None:
            raise ConfigError(
                f"predict of the policy must return prev_values with algorithm.name {self.cfg.algorithm.name}, got none; add a value head"
            )
        return ChunkStepResult(actions=actions, versions=version, **result), None

    def _values(self, obs: dict[str, Tensor]) -> Tensor:
        """Return the values [B, 1] of observations on the device of the policy."""
        with torch.no_grad():
            return host_tensor(self.model.values(obs)).float()  # type: ignore[union-attr]

    def _observe(self, recorder: TrajectoryRecorder, output: EnvOutput) -> None:
        """Record an output. The decision before it must have been recorded, and that on it not yet."""
        if output.intervene_flags is not None and output.rewards is not None:
            recorder.intervene(output.intervene_actions, output.intervene_flags)
        recorder.observe(output, self.get_dones_and_rewards(output)[1])

    def _end(self, recorder: TrajectoryRecorder, output: EnvOutput) -> None:
        """Record the last output, of which the value alone counts."""
        self._observe(recorder, output)
        if not self._rows:
            self._large = large_observations(output.obs)
        self._last_values[recorder] = self.predict(output.obs, "eval")[1]["prev_values"]

    async def _deliver(self, channel: Channel, epochs: list[list[list[TrajectoryRecorder]]]) -> None:
        """Send the trajectory of each stage. `epochs` has the recorders of each epoch by stage, in the order of the simulators."""
        round, stages = self._round, self.options.stages
        senders = len(round.rollouts) * stages
        for stage, of_epochs in enumerate(zip(*epochs, strict=True)):
            sender = self._place * stages + stage
            trajectory = join_epochs(
                [merge_trajectories([one.finish(self._last_values.pop(one)) for one in parts]) for parts in of_epochs]
            )
            pieces = cut_trajectory(trajectory, trajectory_parts(senders, round.actors), group=self._group)
            for part, piece in enumerate(pieces):
                rank = data_rank_of(sender, part, senders=senders, actors=round.actors)
                await channel.put_async(piece, key=round.trajectory_key(rank))

    async def _evaluate(self, observations: Channel, actions: Channel, round: CollectionRound) -> int:
        sources = [place for place in range(len(round.envs)) if place % len(round.rollouts) == self._place]
        with closing(self._exchange(observations, actions)) as exchange:
            served = await asyncio.gather(*(self._serve(exchange, round, env) for env in sources))
        return sum(served)

    async def _serve(self, exchange: DirectChannel, round: CollectionRound, env: int) -> int:
        """Choose the actions for one env worker until it sends no observations."""
        key, count = round.key(0, env, self._place), 0
        while True:
            with self.waiting("observations", f"env:{round.envs[env]}"):
                output: EnvOutput = await exchange.get_async(key=key)
            if output.obs is None:
                return count
            chosen, _ = self.predict(output.obs, "eval")
            exchange.put(chosen.numpy(), key=key)
            self.record_progress("decisions")
            count += 1

    def _exchange(self, observations: Channel, actions: Channel) -> DirectChannel:
        """Return this end of the exchange with the env workers; connects to those of this host."""
        round, place = self._round, self._place
        self._mailbox.wait(0.0)  # notices which connections have ended
        self._mailbox.keep(round.prefix)
        exchange = DirectChannel(self._mailbox, get_from=observations, put_to=actions)
        for env in range(len(round.envs)):
            address = round.address(env, place)
            if address is None:
                continue
            connection = self._connections.get(address)
            if connection is None or connection.closed:
                connection = self._connections[address] = Connection.connect(address)
                self._mailbox.add(connection)
            self._mailbox.send(connection, round.opening_key(place), self._columns_of(env))
            for stage in range(self.options.stages):
                exchange.connect(round.key(stage, env, place), connection)
        return exchange

    @contextmanager
    def _lent_rows(self) -> Iterator[None]:
        """Lend memory for the large observations of a collection, where env workers of this host take part. Without lockstep lend none."""
        near = any(self._round.address(env, self._place) is not None for env in range(len(self._round.envs)))
        near &= self.options.batching == "lockstep"
        self._rows = lend_rows(
            self._large if near else {},
            decisions=self.options.rollout_epochs * (self._decisions + 1) - 1,
            simulators=[sum(size for _, size in self.get_src_ranks(stage)) for stage in range(self.options.stages)],
        )
        reuse = False
        try:
            yield
            reuse = not self._gone  # the channel has copied the trajectories
        finally:
            rows, self._rows = self._rows, []
            for one in rows:
                one.release(reuse=reuse)

    def _columns_of(self, env: int) -> dict[str, np.ndarray]:
        """Return where the simulators of an env worker put their large observations, by stage."""
        columns = {}
        for stage, rows in enumerate(self._rows):
            begin = 0
            for source, size in self.get_src_ranks(stage):
                if source == env:
                    columns[CollectionRound.columns_key(stage)] = rows.column(begin).pack()
                begin += size
        return columns

    # --- weights and the end -----------------------------------------------------------------------------------------

    def offload_model(self) -> None:
        """Move the policy to host memory; idempotent."""
        if self.model is not None and not self._offloaded:
            self.model.to("cpu")
            self._offloaded = True

    def reload_model(self) -> None:
        """Move the policy back to its device; idempotent."""
        if self.model is not None and self._offloaded:
            self.model.to(self.device)
            self._offloaded = False

    async def on_new_epoch(self, epoch: int) -> None:
        """Give up the collection; the weights have no version until those of the restarted trainer are verified."""
        self._stop()
        if self._weights is not None:
            self._weights.set_epoch(epoch)

    async def drain(self) -> None:
        """Give up the collection, which the runner then repeats without this rollout."""
        self._stop()

    async def close(self) -> None:
        """Stop serving. May be called again."""
        self._stop()
        self._thread.close()
        self._mailbox.close()
        await self._close_receiver()

    def status(self) -> dict[str, Any]:
        """Return version and digest of the weights, and the state of their receiver."""
        return self._weights_status()

    # --- inside ------------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> int:
        """Place of this rollout in the collection."""
        rollouts = self._round.rollouts
        return rollouts.index(self.rank) if self.rank in rollouts else 0

    async def _pause(self, deadline: float) -> None:
        """Wait for the end of the collection, so that a trajectory has one version."""
        if self._working is not None and not self._working.done():
            await asyncio.wait({self._working}, timeout=deadline)

    def _seed(self) -> None:
        """Draw the numbers of a collection from a seed of its own: a collection that is repeated chooses the same actions."""
        self._last_values: dict[TrajectoryRecorder, Tensor | None] = {}
        seed = np.random.SeedSequence([self.cfg.algorithm.seed, self._round.step, self._place]).generate_state(1)[0]
        torch.manual_seed(int(seed))

    def _stop(self) -> None:
        """Cancel the collection in progress, or the wait of one for its weights."""
        self._stop_awaiting()
        if self._working is not None:
            self._working.cancel()
