"""`RolloutWorkerBase`: the rollout worker of every engine. It receives weights, leases prompt groups and delivers their records.

    init_worker -> join (pull and verify the committed weights) -> start_serving -> serving
    offer of new weights -> updating (no prompt is leased, groups in flight end) -> transfer and verify -> commit -> serving

A lease is the right to generate one prompt group for a limited time; the runner's ledger records which rollout holds which group.
Invariant: a worker generates with a version only after its receiver verified that the engine holds exactly the published weights. All async
methods run on one event loop.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rl_core.api.errors import GenerationUnavailable, InfrastructureError
from rl_core.api.job import RLJobSpec
from rl_core.api.records import EnvironmentInterface, PromptGroupRecord
from rl_core.data.tokenizer import Tokenizer
from rl_core.messages.groups import ProbeAnswer, PromptLease
from rl_core.messages.members import MemberState
from rl_core.messages.weights import ReceiverAck
from rl_core.rollouts.chat_template import ChatTemplate
from rl_core.rollouts.engine import Engine, Part
from rl_core.rollouts.environment import RemoteEnvironment
from rl_core.rollouts.groups import GroupMaker
from rl_core.rollouts.leases import HubLeases
from rl_core.rollouts.message_log import as_token_tensor, token_loss_mask
from rl_core.rollouts.meter import EngineMeter
from rl_core.rollouts.model_files import generation_eos_ids, max_positions
from rl_core.rollouts.padded import BatchedDataDict, GenerationInterface
from rl_core.rollouts.pausing_target import Pause, pausing
from rl_core.rollouts.recovery import EngineRecovery
from rl_core.rollouts.residency import EngineResidency
from rl_core.rollouts.rollout_loop import RolloutLoop
from rl_core.rollouts.sampling import sample_seed
from rl_core.rollouts.weight_methods import WeightMethods
from rl_core.weights.receiver import WeightReceiver
from rl_core.weights.receiver_state import ReceiverState

if TYPE_CHECKING:
    from rl_core.channel import Channel
    from rl_core.rollouts.agents import AgentEndpoint

__all__ = [
    "BatchedDataDict",
    "EnvironmentInterface",
    "GenerationInterface",
    "RemoteEnvironment",
    "RolloutWorkerBase",
    "as_token_tensor",
    "sample_seed",
    "token_loss_mask",
]

PAUSE_SHARE = 0.8
"""Fraction of a deadline during which groups in flight may still end. Afterwards they are returned to the runner."""


class BuildEngine(Protocol):
    """Builds the engine of a rollout worker."""

    def __call__(
        self,
        spec: RLJobSpec,
        files: Mapping[str, bytes],
        device: str,
        max_seq_len: int,
        on_tokens: Callable[[int], Any],
        on_stage: Callable[[str], object],
        /,
    ) -> Engine:
        """Return the engine with unfilled weights.

        Args:
            spec: The job.
            files: The files of the model folder by name, without weights.
            device: Device such as "cpu" or "cuda:0".
            max_seq_len: Longest sequence of prompt and completion, tokens.
            on_tokens: Called from any thread with the number of tokens that were generated since the last call.
            on_stage: Called from any thread with what the start of an engine process does, such as "the process imports SGLang".
        """
        ...


@dataclass(frozen=True, slots=True)
class _Parts:
    """What `init_worker` builds."""

    engine: Engine
    environment: RemoteEnvironment
    groups: GroupMaker
    receiver: WeightReceiver
    loop: RolloutLoop
    recovery: EngineRecovery
    residency: EngineResidency
    agents: AgentEndpoint | None
    """None in jobs whose episodes no agent programs drive."""


class RolloutWorkerBase(WeightMethods):
    """Runs prompt groups with an engine. A subclass per engine sets `build_engine` (`rl_core.api.backends.ENGINES`)."""

    build_engine: ClassVar[BuildEngine]

    def __init__(
        self,
        config: RLJobSpec | Mapping[str, Any],
        placement: Mapping[str, Any] | None = None,
    ) -> None:
        """Configure the worker; the engine is built by `init_worker`.

        `config` is the job's spec, or a mapping that is validated into one. `placement` may contain `max_seq_len`, which replaces
        rollout.maxSequenceLength.
        """
        self.spec = config if isinstance(config, RLJobSpec) else RLJobSpec.model_validate(config)
        self.placement = dict(placement or {})
        self._parts: _Parts | None = None

    # --- bring-up --------------------------------------------------------------------------------------------------

    def init_worker(self) -> None:
        """Build the engine and everything around it. Does nothing when called again."""
        if self._parts is not None:
            return
        spec = self.spec
        meter = EngineMeter()

        def count(tokens: int) -> None:
            self.record_progress("tokens", tokens)
            meter.count(tokens)

        stages = ["the process is started"]
        with self.waiting(lambda: stages[-1], f"{self.identity.name}/engine"):
            engine = type(self).build_engine(spec, self.files, self.device, self._max_seq_len(), count, stages.append)
        meter.watch(engine.load)
        environment = RemoteEnvironment(
            self._env_addresses,
            self.keys,
            step_seconds=spec.runtime.deadlines.env_step,
            connect=lambda address: self.peer(address, "env"),
            available=self.view_changed,
            waiting=lambda address: self.waiting("environment step", self._env_at(address)),
        )
        tokenizer = Tokenizer.from_files(self.files)
        template = ChatTemplate.of_job(spec, tokenizer, stop_ids=generation_eos_ids(self.files))
        agents = self._agent_endpoint(tokenizer, engine, template)
        groups = GroupMaker(spec, tokenizer, engine, environment, template, agents)
        self.report_metrics(lambda: meter.read() | groups.metrics())
        sampling = spec.algorithm.dynamic_sampling
        loop = RolloutLoop(
            self._make_group,
            HubLeases(self.hub_call),
            row_limit=self._row_limit,
            group_rows=spec.algorithm.group_size,
            version=lambda: engine.policy_version,
            waiting=self.waiting,
            min_std=sampling.min_std if sampling.enabled else None,
            kept_prompts=spec.samples.validation_groups,
        )
        receiver = self._build_receiver(spec, pausing(engine.weight_target, self._pause(engine, loop)))
        recovery = EngineRecovery(receiver, loop, starting=self._on_engine_lost)
        engine.watch(recovery.lost, recovery.back)
        residency = EngineResidency(engine.residency, loop)
        self._parts = _Parts(engine, environment, groups, receiver, loop, recovery, residency, agents)
        # These objects live as long as the process, and a garbage collection over them takes longer than a decode step.
        gc.freeze()

    def _agent_endpoint(self, tokenizer: Tokenizer, engine: Engine, template: ChatTemplate) -> AgentEndpoint | None:
        """Return the endpoint that agent programs call, None in other jobs: they do not load the HTTP server."""
        if not self.spec.env.calls_model:
            return None
        from rl_core.rollouts.agents import AgentEndpoint

        return AgentEndpoint(self.spec, tokenizer, engine, template)

    def _pause(self, engine: Engine, loop: RolloutLoop) -> Pause:
        """Return how the worker pauses before weights change: as `weights.onUpdate` says, groups in flight end or are interrupted."""
        if self.spec.weights.on_update == "wait":
            return lambda deadline: loop.pause(deadline * PAUSE_SHARE)

        async def interrupt(deadline: float) -> None:
            loop.close()
            await engine.pause(keep_cache=self.spec.weights.on_update == "keep_kv")

        return interrupt

    async def join(self, publisher_address: str) -> ReceiverAck:
        """Load the committed weights from the publisher at `publisher_address`.

        Returns their version and digest once they are verified and served.
        """
        self._built().recovery.joined(publisher_address)
        return await super().join(publisher_address)

    async def start_serving(self, trajectories: Channel, validation: Channel) -> None:
        """Start to lease prompt groups from the runner; returns at once.

        Records of training groups go to the channel `trajectories`, and scores of validation groups to `validation`.
        """
        parts = self._built()
        if parts.agents is not None:
            await parts.agents.start(self.worker_info.node_ip, self.identity.endpoint_port)
        parts.loop.start(trajectories, validation)
        self._report_version()

    async def drop_groups(self, tokens: list[str]) -> None:
        """Stop generating the groups whose leases the runner has revoked. `tokens` are the ids of these leases."""
        self._built().loop.drop(tokens)

    # --- weights ---------------------------------------------------------------------------------------------------

    async def occupy(self, parts: list[Part], token: int) -> None:
        """Keep exactly `parts` of the engine's memory on the device; once all parts are there, groups are leased again.

        The device lease is the runner's turn-taking between trainer and rollouts that share accelerators. `token` is its number; a call
        with an older number than the last one is ignored. The trainer has a method of the same name without a number, because the runner
        waits for each of its calls.
        """
        built = self._parts
        if built is None:
            return  # The engine is not built yet, so nothing is on the device.
        await built.residency.move_to(parts, token)
        if built.residency.complete and built.receiver.state is ReceiverState.SERVING:
            built.loop.open()

    async def probe(self, prompt_ids: list[int], max_new_tokens: int) -> ProbeAnswer:
        """Return a sampled continuation of a fixed prompt with its log-probabilities.

        After a weight sync the trainer computes the log-probabilities of the same tokens, and the runner compares them (content check).
        Raises GenerationUnavailable while no verified weights are served or a part of the engine is off its device.
        """
        parts = self._built()
        if parts.receiver.state is not ReceiverState.SERVING:
            raise GenerationUnavailable(f"no proven weights are served, the receiver is {parts.receiver.state.value}")
        if not parts.residency.complete:
            raise GenerationUnavailable("the engine has given up its device for now")
        return await parts.groups.probe(prompt_ids, max_new_tokens)

    # --- the end ---------------------------------------------------------------------------------------------------

    async def on_new_epoch(self, epoch: int) -> None:
        """Drop all work of older epochs.

        The weights count as having no version until those of the restarted trainer are verified.
        """
        if self._parts is not None:
            await self._parts.loop.stop()
            self._parts.receiver.set_epoch(epoch)
            self._parts.residency.reset_token()

    async def drain(self) -> None:
        """Lease no more groups and finish those in flight. Groups that do not end in time are returned to the runner."""
        if self._parts is not None:
            await self._parts.loop.pause(self.spec.runtime.drain_seconds * PAUSE_SHARE)
            await self._parts.loop.stop()

    async def close(self) -> None:
        """Stop serving and release the engine. May be called again."""
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.recovery.close()
            await parts.loop.stop()
            await self._close_receiver()
            parts.environment.close()
            if parts.agents is not None:
                await parts.agents.close()
            await asyncio.to_thread(parts.engine.close)

    def status(self) -> dict[str, Any]:
        """Return the state of the worker.

        The keys are version, digest, weights (state of the receiver), weights_proof, engines_lost, groups_in_flight and groups_done.
        """
        parts = self._parts
        return {
            **self._weights_status(),
            "weights_proof": parts.engine.weights_proof if parts is not None else "",
            "engines_lost": parts.recovery.losses if parts is not None else 0,
            "groups_in_flight": parts.loop.groups_in_flight if parts is not None else 0,
            "groups_done": parts.loop.groups_done if parts is not None else 0,
        }

    # --- inside ----------------------------------------------------------------------------------------------------

    def _on_weights(self, state: ReceiverState, version: int, digest: str) -> None:
        """Report version and state of the weights to the hub, and lease groups while a verified version is served."""
        super()._on_weights(state, version, digest)
        parts = self._built()
        if state is ReceiverState.SERVING and parts.residency.complete:
            parts.loop.open()
        else:
            parts.loop.close()

    def _weights_proof(self) -> str:
        return self._built().engine.weights_proof

    def _on_engine_lost(self, losses: int) -> None:
        self.record_metric("rollout/engines_lost_total", losses)
        self.set_state(MemberState.CONSTRUCTING)

    async def _make_group(self, lease: PromptLease) -> PromptGroupRecord:
        record = await self._built().groups.make(lease)
        if record.times is not None:
            record.times.rollout = self.identity.name
        self.record_progress("records")
        return record

    def _row_limit(self) -> int:
        """Return the most rows in flight: the engine's capacity, but no more than this worker's share of a step's rows."""
        algorithm = self.spec.algorithm
        groups = math.ceil(algorithm.prompts_per_step * self.spec.rollout.oversample)
        share = -(-groups * algorithm.group_size // max(1, self.num_serving))
        return min(self._built().engine.row_capacity, share)

    def _max_seq_len(self) -> int:
        limit = self.placement.get("max_seq_len") or self.spec.rollout.max_sequence_length
        return int(limit or max_positions(self.files))

    def _env_addresses(self) -> list[str]:
        return [member.address for member in self.members("env") if member.state.constructed]

    def _env_at(self, address: str) -> str:
        """Return the name of the env worker at `address`, or "env" if none is known there."""
        return next((member.name for member in self.members("env") if member.address == address), "env")

    def _built(self) -> _Parts:
        if self._parts is None:
            raise InfrastructureError("the rollout engine is not built yet; call init_worker first")
        return self._parts
