"""`MultiStepRolloutWorker`: a rollout that chooses the actions of simulators, chunk by chunk, and sends the trajectories to the trainer.

    env worker -- EnvOutput --> recv_env_output -> predict -> send_chunk_actions --> env worker
                                    trajectories --> actor

A version of the weights is loaded between two collections only, so that a trajectory has one version.

Legend: B simulators, C actions of a chunk, T decisions.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_core.api.embodied import EmbodiedOptions, embodied_options, longest_collection, simulators_per_group
from rl_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError
from rl_core.api.job import RLJobSpec
from rl_core.api.records import ChunkStepResult, EnvOutput, record_of
from rl_core.batching.trajectories import join_epochs, merge_trajectories
from rl_core.channel import Channel
from rl_core.channel.direct import DirectChannel
from rl_core.messages.embodied import CollectionRequest, Mode
from rl_core.plan.routing import data_rank_of, trajectory_parts
from rl_core.policies.base import splits_values
from rl_core.policies.folder import build_policy, load_policy
from rl_core.rollouts.decoupled import DecoupledDecisions, Lane
from rl_core.rollouts.embodied import (
    bootstrap_rewards,
    cut_trajectory,
    for_arrays,
    host_result,
    host_tensor,
    tensor_of,
    tensors_of,
)
from rl_core.rollouts.observation_rows import large_observations
from rl_core.rollouts.pausing_target import pausing
from rl_core.rollouts.policy_target import PolicyWeightTarget, saved_tensors
from rl_core.rollouts.recorder import TrajectoryRecorder
from rl_core.rollouts.served_envs import EnvConnections, Exchange, ServedEnvs
from rl_core.rollouts.weight_methods import WeightMethods
from rl_core.transports.shared_rows import Layout
from rl_core.weights.offload import empty_device_cache
from rl_core.workers.loop_thread import LoopThread

WeightsServed = Future[None]
"""Completes once this rollout serves the weights that a collection asks for."""


class MultiStepRolloutWorker(WeightMethods):
    """Runs the policy of `model.path` for the simulators of the env workers."""

    def __init__(self, cfg: RLJobSpec | Mapping[str, Any], placement: Mapping[str, Any] | None = None) -> None:
        """Configure the worker for `cfg`, the job's spec; the policy is built by `init_worker`. `placement` is not used."""
        self.cfg = cfg if isinstance(cfg, RLJobSpec) else RLJobSpec.model_validate(dict(cfg))
        self.options: EmbodiedOptions = embodied_options(self.cfg)
        self._group = simulators_per_group(self.cfg.algorithm)
        critic = self.cfg.algorithm.critic_in_use
        self._gamma = critic.gamma if critic is not None else 1.0
        self._with_values = critic is not None
        self.model: nn.Module | None = None
        self.global_step = 0
        self._envs: ServedEnvs
        """The env workers that this rollout serves in the current collection, or in the last one."""
        self._envs_by_mode: dict[Mode, ServedEnvs] = {}
        """The same for each mode."""
        self._large_observations: Layout = {}
        """Types and shapes of the large observations, known after the first collection; empty before."""
        self._working: asyncio.Future[int] | None = None
        self._offloaded = False
        self._lease_token = -1
        """Largest `token` with which `occupy` was called; -1 before its first call."""
        self._connections = EnvConnections(seconds=self.cfg.runtime.deadlines.rollout)
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
        self._build_receiver(self.cfg, pausing(PolicyWeightTarget(partial(saved_tensors, self.model)), self._pause))

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
        host_obs = tensors_of(env_obs)
        obs = self._on_device(host_obs)
        with torch.no_grad():
            actions, result = self.model.predict(obs, mode)
        return host_result(host_obs, obs, actions, result)

    def _on_device(self, tensors: Any) -> Any:
        return tensors if self.device == "cpu" else for_arrays(tensors, lambda tensor: tensor.to(self.device))

    def get_dones_and_rewards(self, env_output: EnvOutput | Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return dones [B, C], and scaled rewards [B, C] with the value of the final observation added where an episode was cut.

        Rewards are None for the first output of a trajectory.
        """
        env_output = record_of(EnvOutput, env_output)
        dones = tensor_of(env_output.dones).contiguous()
        if env_output.rewards is None:
            return dones, None
        rewards = tensor_of(env_output.rewards).contiguous()
        if self.options.reward_scale != 1:
            rewards = rewards * self.options.reward_scale
        bootstraps = self.options.auto_reset and self._with_values and self.options.bootstrap != "none"
        if not bootstraps or env_output.final_obs is None:
            return dones, rewards
        truncations = tensor_of(env_output.truncations)
        bootstrapped = dones if self.options.bootstrap == "always" else truncations
        if not bool(bootstrapped[:, -1].any()):
            return dones, rewards
        return dones, bootstrap_rewards(
            rewards,
            self._values(tensors_of(env_output.final_obs)),
            truncations,
            dones,
            gamma=self._gamma,
            terminations=tensor_of(env_output.terminations),
            bootstrap_type=self.options.bootstrap,
        )

    # --- messages ----------------------------------------------------------------------------------------------------

    def get_src_ranks(self, stage: int = 0, mode: Mode = "train") -> list[tuple[int, int]]:
        """Return (index of an env worker, number of its simulators) for each env worker that this rollout serves in a stage."""
        return self._served_in(mode).sources

    def get_dst_ranks(self, stage: int = 0, mode: Mode = "train") -> list[tuple[int, int]]:
        """Return the env workers that receive the actions of a stage, as `get_src_ranks` does."""
        return self._served_in(mode).sources

    async def recv_env_output(
        self, input_channel: Exchange, mode: Mode = "train", stage: int = 0, *, begins: bool = False
    ) -> EnvOutput:
        """Receive the outputs of all env workers that this rollout serves in a stage. Returns them as tensors, merged in their order.

        The keys are those of the last collection in `mode`, or of `CollectionRequest.of_job` before the first one. `begins` says whether they
        are the first outputs of a rollout epoch. See `ServedEnvs.receive`.
        """
        return await self._served_in(mode).receive(input_channel, stage, begins=begins)

    def send_chunk_actions(
        self, output_channel: Exchange, chunk_actions: Tensor | np.ndarray, mode: Mode = "train", stage: int = 0
    ) -> None:
        """Send each env worker the actions of its simulators. Raises DataError if there is not one row of actions for each simulator.

        The keys are those of `recv_env_output`.
        """
        self._served_in(mode).send(output_channel, stage, chunk_actions)

    # --- one collection ----------------------------------------------------------------------------------------------

    async def generate(
        self,
        input_channel: Channel,
        output_channel: Channel,
        actor_channel: Channel,
        request: CollectionRequest | None = None,
    ) -> int:
        """Choose the actions of one collection and send its trajectories to `actor_channel`; return the number of decisions.

        Observations come from `input_channel`, actions go to `output_channel`. A collection in progress is abandoned.
        """
        request = request or self._default_request("train")
        return await self._work(
            request, lambda served: self._generate(input_channel, output_channel, actor_channel, request, served)
        )

    async def evaluate(
        self, input_channel: Channel, output_channel: Channel, request: CollectionRequest | None = None
    ) -> int:
        """Choose actions without sampling until the env workers have no more episodes; return the number of decisions."""
        request = request or self._default_request("eval")
        return await self._work(request, lambda served: self._evaluate(input_channel, output_channel, request, served))

    def _default_request(self, mode: Mode) -> CollectionRequest:
        return CollectionRequest.of_job(self.cfg, step=self.global_step + 1, mode=mode)

    async def _work(self, request: CollectionRequest, work: Callable[[WeightsServed], Coroutine[Any, Any, int]]) -> int:
        """Cancel the collection in progress, run `work(served)` on the thread of collections, and return its result.

        `served` completes once this rollout serves the weights of `request`. Until then `work` may connect to the env workers. Raises
        InfrastructureError if this worker gives the collection up, and CancelledError if the caller cancels the call.
        """
        self._stop()
        served = WeightsServed()
        served.set_running_or_notify_cancel()  # Otherwise a cancellation of `work` would cancel this future too.
        working = self._working = self._thread.submit(work(served))
        try:
            if request.version is not None:
                await self._await_version(request.version)
            served.set_result(None)
            return await working
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr] # the caller has cancelled the call
                raise
            raise InfrastructureError("the rollout has given up the collection; it is run again") from None
        finally:
            working.cancel()

    async def _generate(
        self,
        observations: Channel,
        actions: Channel,
        trajectories: Channel,
        request: CollectionRequest,
        served: WeightsServed,
    ) -> int:
        """Connect to the env workers, wait for `served`, make all decisions, and send the trajectories; return the number of decisions."""
        options = self.options
        lockstep = options.batching == "lockstep"
        run_epoch = self._run_epoch if lockstep else self._run_decoupled_epoch
        self._begin(request)
        outputs = options.rollout_epochs * (options.decisions + 1)
        layout = self._large_observations if lockstep else {}
        async with self._envs.allocated_rows(trajectories.allocate_async, layout, outputs=outputs):
            with closing(self._connect(observations, actions)) as exchange:
                await asyncio.wrap_future(served)
                version = self.sync_model_from_actor() if self._weights is not None else self.global_step
                epochs = [await run_epoch(exchange, version) for _ in range(options.rollout_epochs)]
                await self._deliver(trajectories, epochs)
        return options.rollout_epochs * options.decisions * options.stages

    async def _run_epoch(self, exchange: DirectChannel, version: int) -> list[list[TrajectoryRecorder]]:
        """Make the decisions of a rollout epoch; return their recorders, one for each stage."""
        recorders = [self._recorder(stage) for stage in range(self.options.stages)]
        for decision in range(self.options.decisions + 1):
            for stage, recorder in enumerate(recorders):
                output = await self.recv_env_output(exchange, stage=stage, begins=decision == 0)
                if decision == self.options.decisions:
                    self._end(recorder, output)
                    continue
                actions, record = self._decide(output, version)
                self.send_chunk_actions(exchange, actions, stage=stage)
                # The rest is done while the simulators make the actions.
                self._observe(recorder, output)
                recorder.decide(record())
            self.record_progress("decisions")
        return [[recorder] for recorder in recorders]

    async def _run_decoupled_epoch(self, exchange: DirectChannel, version: int) -> list[list[TrajectoryRecorder]]:
        """As `_run_epoch`, but decide for the env workers whose observations have arrived. A stage has one recorder for each env worker."""
        stages = range(self.options.stages)
        lanes = [
            Lane(stage, env, size, self._recorder(stage)) for stage in stages for env, size in self.get_src_ranks(stage)
        ]
        await DecoupledDecisions(
            envs=self._envs,
            lanes=lanes,
            decisions=self.options.decisions,
            min_batch_size=self.options.min_batch_size,
            decide=lambda output: self._decide(output, version),
            observe=self._observe,
            end=self._end,
            progress=self.record_progress,
        ).run(exchange)
        return [[lane.recorder for lane in lanes if lane.stage == stage] for stage in stages]

    def _recorder(self, stage: int) -> TrajectoryRecorder:
        return TrajectoryRecorder(sender=self._envs.index, stage=stage, auto_reset=self.options.auto_reset)

    def _decide(self, output: EnvOutput, version: int) -> tuple[Tensor, Callable[[], ChunkStepResult]]:
        """Return the actions [B, C, ...] for observations of simulators, and a function that returns the record of this decision.

        Call the function after the actions were sent. If the policy has separate methods for actions and values, the function computes the
        values. `version` is that of the weights. Raises ConfigError if the algorithm needs values and the policy returns none.
        """
        if not splits_values(self.model):
            actions, result = self.predict(output.obs)
            if self._with_values and result["prev_values"] is None:
                raise ConfigError(
                    f"predict of the policy must return prev_values with algorithm.name {self.cfg.algorithm.name}, got none; add a value head"
                )
            return actions, partial(ChunkStepResult, actions=actions, versions=version, **result)
        host_obs = tensors_of(output.obs)
        obs = self._on_device(host_obs)
        with torch.no_grad():
            device_actions, device_result = self.model.act(obs, "train")  # type: ignore[union-attr]
        actions = host_tensor(device_actions).contiguous()

        def record() -> ChunkStepResult:
            _, result = host_result(host_obs, obs, actions, device_result)
            if self._with_values:
                result["prev_values"] = self._values(obs)
            return ChunkStepResult(actions=actions, versions=version, **result)

        return actions, record

    def _values(self, obs: dict[str, Tensor]) -> Tensor | None:
        """Return the values [B, 1] of observations, on the CPU; None if the policy gives none."""
        if not splits_values(self.model):
            return self.predict(obs, "eval")[1]["prev_values"]
        with torch.no_grad():
            return host_tensor(self.model.values(self._on_device(obs))).float()  # type: ignore[union-attr]

    def _observe(self, recorder: TrajectoryRecorder, output: EnvOutput) -> None:
        """Record an output, after the previous decision was recorded and before the decision for this output is."""
        if output.intervene_flags is not None and output.rewards is not None:
            recorder.intervene(output.intervene_actions, output.intervene_flags)
        recorder.observe(output, self.get_dones_and_rewards(output)[1])

    def _end(self, recorder: TrajectoryRecorder, output: EnvOutput) -> None:
        """Record the last output of a rollout epoch: what the last actions led to, and the value of the observations. No action follows it."""
        self._observe(recorder, output)
        if not self._envs.rows:
            self._large_observations = large_observations(output.obs)
        recorder.end(self._values(tensors_of(output.obs)) if self._with_values else None)

    async def _deliver(self, channel: Channel, epochs: list[list[list[TrajectoryRecorder]]]) -> None:
        """Send the trajectory of each stage. `epochs` has the recorders of each epoch by stage, in the order of the simulators."""
        request, stages, lent = self._envs.request, self.options.stages, self._envs.row_memory()
        senders = len(request.rollouts) * stages
        for stage, of_epochs in enumerate(zip(*epochs, strict=True)):
            sender = self._envs.index * stages + stage
            trajectory = join_epochs(
                [merge_trajectories([recorder.finish() for recorder in parts]) for parts in of_epochs]
            )
            shards = cut_trajectory(trajectory, trajectory_parts(senders, request.actors), group=self._group)
            for part, shard in enumerate(shards):
                rank = data_rank_of(sender, part, senders=senders, actors=request.actors)
                await channel.put_async(shard, key=request.trajectory_key(rank), lent=lent)

    async def _evaluate(
        self, observations: Channel, actions: Channel, request: CollectionRequest, served: WeightsServed
    ) -> int:
        self._begin(request)
        own_envs = [env for env in range(len(request.envs)) if env % len(request.rollouts) == self._envs.index]
        with closing(self._connect(observations, actions)) as exchange:
            await asyncio.wrap_future(served)
            try:
                async with asyncio.TaskGroup() as group:
                    counts = [group.create_task(self._serve(exchange, env)) for env in own_envs]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return sum(task.result() for task in counts)

    async def _serve(self, exchange: DirectChannel, env: int) -> int:
        """Choose the actions for one env worker until it sends no observations."""
        key, count = self._envs.key(0, env), 0
        while True:
            with self._envs.awaiting(env):
                output: EnvOutput = await exchange.get_async(key=key)
            if output.obs is None:
                return count
            actions, _ = self.predict(output.obs, "eval")
            exchange.put(actions.numpy(), key=key)
            self.record_progress("decisions")
            count += 1

    def _begin(self, request: CollectionRequest) -> None:
        """Prepare a collection: set the env workers that this rollout serves, and seed the random numbers.

        The seed depends on the training step and not on the number of the collection. A collection that is repeated chooses the same actions.
        """
        self._envs = self._envs_by_mode[request.mode] = self._served(request)
        entropy = [self.cfg.algorithm.seed, request.step, self._envs.index, int(request.mode == "eval")]
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))

    def _served_in(self, mode: Mode) -> ServedEnvs:
        """Return the env workers of the last collection in `mode`, or of one by all workers of the job."""
        if mode not in self._envs_by_mode:
            self._envs_by_mode[mode] = self._served(self._default_request(mode))
        return self._envs_by_mode[mode]

    def _served(self, request: CollectionRequest) -> ServedEnvs:
        index = request.rollouts.index(self.rank)
        return ServedEnvs(request, index=index, options=self.options, group=self._group, waiting=self.waiting)

    def _connect(self, observations: Channel, actions: Channel) -> DirectChannel:
        seconds = longest_collection(self.cfg.runtime.deadlines)
        return self._connections.open(self._envs, observations=observations, actions=actions, seconds=seconds)

    # --- weights and the end -----------------------------------------------------------------------------------------

    async def occupy(self, parts: Collection[str], token: int) -> None:
        """Move the policy to its device if "weights" is one of `parts`, and to host memory otherwise, which gives up a collection in progress.

        `token` is the number of the device lease, by which trainer and rollouts take turns on shared devices. A call with an older number
        than the last one is ignored.
        """
        if token < self._lease_token:
            return
        self._lease_token, is_resident = token, "weights" in parts
        if not is_resident:
            self._stop()

        async def move() -> None:
            (self.reload_model if is_resident else self.offload_model)()

        await self._thread.submit(move())

    def offload_model(self) -> None:
        """Move the policy to host memory; idempotent."""
        if self.model is not None and not self._offloaded:
            self.model.to("cpu")
            empty_device_cache(torch.device(self.device))
            self._offloaded = True

    def reload_model(self) -> None:
        """Move the policy back to its device; idempotent."""
        if self.model is not None and self._offloaded:
            self.model.to(self.device)
            self._offloaded = False

    async def on_new_epoch(self, epoch: int) -> None:
        """Give up the collection; the weights have no version until those of the restarted trainer are verified."""
        self._stop()
        self._lease_token = -1
        if self._weights is not None:
            self._weights.set_epoch(epoch)

    async def drain(self) -> None:
        """Give up the collection, which the runner then repeats without this rollout."""
        self._stop()

    async def close(self) -> None:
        """Stop serving. May be called again."""
        self._stop()
        self._thread.close()
        self._connections.close()
        await self._close_receiver()

    def status(self) -> dict[str, Any]:
        """Return version and digest of the weights, and the state of their receiver."""
        return self._weights_status()

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _pause(self, deadline: float) -> None:
        """Wait until no collection makes decisions, so that a trajectory has one version. Raises DeadlineExceeded after `deadline` seconds.

        A collection that waits for its weights is not waited for: it needs those that are about to be loaded.
        """
        if self._working is None or self._awaited is not None:
            return
        done, _ = await asyncio.wait({self._working}, timeout=deadline)
        if not done:
            raise DeadlineExceeded(
                f"a collection must end within {deadline:g} s before new weights are loaded, it goes on"
            )

    def _stop(self) -> None:
        """Cancel the collection in progress, or the wait of one for its weights."""
        self._stop_awaiting()
        if self._working is not None:
            self._working.cancel()
