"""`RolloutWorkerBase`: what every rollout worker does, whatever its engine: take weights, serve prompts, leave in order.

    init_worker -> join (PULL, verify) -> start_rollout -> serving
    OFFER -> updating (no prompt is leased, those in flight end) -> transfer, verify -> COMMIT -> serving

A worker serves a version only after its receiver proved it (I2). Its async methods run on one event loop.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rl_core.api.errors import GenerationUnavailable, InfrastructureError
from rl_core.api.job import RLJobSpec
from rl_core.api.records import EnvironmentInterface, PromptGroupRecord
from rl_core.data.tokenizer import Tokenizer
from rl_core.messages.groups import ProbeAnswer, PromptLease
from rl_core.messages.members import MemberState
from rl_core.messages.weights import (
    ReceiverAck,
    ReceiverAnswer,
    ReceiverRefusal,
    StreamSource,
    WeightOffer,
    WeightTransfer,
)
from rl_core.rollouts.engine import BuildEngine, Engine, Part, build_engine
from rl_core.rollouts.environment import RemoteEnvironment
from rl_core.rollouts.gate import gated
from rl_core.rollouts.generation import BatchedDataDict, GenerationConfig, GenerationInterface, sample_seed
from rl_core.rollouts.groups import GroupMaker
from rl_core.rollouts.leases import HubLeases
from rl_core.rollouts.message_log import as_token_tensor, flatten_messages, token_loss_mask
from rl_core.rollouts.meter import Meter
from rl_core.rollouts.model_files import max_positions
from rl_core.rollouts.occupancy import Occupancy
from rl_core.rollouts.recovery import Recovery
from rl_core.rollouts.serving import PromptServer
from rl_core.weights.receiver import ReceiverState, WeightReceiver
from rl_core.workers.worker import Worker

if TYPE_CHECKING:
    from rl_core.channel import Channel

__all__ = [
    "BatchedDataDict",
    "EnvironmentInterface",
    "GenerationConfig",
    "GenerationInterface",
    "RemoteEnvironment",
    "RolloutWorkerBase",
    "as_token_tensor",
    "flatten_messages",
    "sample_seed",
    "token_loss_mask",
]

PAUSE_SHARE = 0.8
"""Share of the publisher's patience that groups in flight get to end before they are returned."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What `init_worker` builds, once."""

    engine: Engine
    environment: RemoteEnvironment
    groups: GroupMaker
    receiver: WeightReceiver
    server: PromptServer
    recovery: Recovery
    occupancy: Occupancy


class RolloutWorkerBase(Worker):
    """Weights in, prompts in, records out, with the engine that the job names."""

    peer_methods: ClassVar[Mapping[str, frozenset[str]]] = {
        "actor": frozenset({"weights_offer", "weights_transfer", "weights_commit", "weights_abort", "weights_relay"})
    }

    def __init__(
        self,
        config: RLJobSpec | Mapping[str, Any],
        placement: Mapping[str, Any] | None = None,
        *,
        build: BuildEngine = build_engine,
    ) -> None:
        """`config` is the job's spec; `placement` may hold `max_seq_len` (None: the job's rollout.maxSequenceLength).

        `build` makes the engine.
        """
        self.spec = config if isinstance(config, RLJobSpec) else RLJobSpec.model_validate(config)
        self.placement = dict(placement or {})
        self._build = build
        self._parts: _Parts | None = None

    # --- bring-up --------------------------------------------------------------------------------------------------

    def init_worker(self) -> None:
        """Build the engine and all around it; repeating it keeps them."""
        if self._parts is not None:
            return
        spec = self.spec
        meter: list[Meter] = []

        def count(tokens: int) -> None:
            self.record_progress("tokens", tokens)
            for one in meter:
                one.count(tokens)

        engine = self._build(spec, self.files, self.device, self._max_seq_len(), count)
        meter.append(Meter(engine.load))
        environment = RemoteEnvironment(
            self._env_addresses,
            self.keys,
            step_seconds=spec.runtime.deadlines.env_step,
            connect=lambda address: self.peer(address, "env"),
            available=self.view_changed,
            waiting=lambda address: self.waiting("environment step", self._env_at(address)),
        )
        groups = GroupMaker(spec, Tokenizer.from_files(self.files), engine, environment)
        self.report_metrics(lambda: meter[0].read() | groups.metrics())
        server = PromptServer(
            self._make_group,
            HubLeases(self.hub_call),
            row_limit=self._row_limit,
            group_rows=spec.algorithm.group_size,
            version=lambda: engine.policy_version,
            waiting=self.waiting,
            records_wait=spec.algorithm.max_staleness > 0 or spec.rollout.oversample > 1,
        )
        receiver = WeightReceiver(
            spec,
            self.identity,
            self.epoch,
            gated(engine.weight_target, self._pause(engine, server)),
            keys=self.keys,
            device=self.device,
            device_uuid=next(iter(self.worker_info.device_uuids), None),
            on_state=self._on_weights,
            host=self.worker_info.node_ip,
        )
        receiver.warm_up()
        recovery = Recovery(receiver, server, starting=self._on_engine_lost)
        engine.watch(recovery.lost, recovery.back)
        occupancy = Occupancy(engine.residency, server)
        self._parts = _Parts(engine, environment, groups, receiver, server, recovery, occupancy)
        # What was built lives as long as the process: a collection over it takes longer than a decode step.
        gc.freeze()

    def _pause(self, engine: Engine, server: PromptServer) -> Callable[[float], Awaitable[None]]:
        """Return what `weights.onUpdate` says happens to groups in flight before weights change: they end, or are interrupted."""
        if self.spec.weights.on_update == "wait":
            return lambda deadline: server.pause(deadline * PAUSE_SHARE)

        async def interrupt(deadline: float) -> None:
            server.close()
            await engine.hold(keep_cache=self.spec.weights.on_update == "keep_kv")

        return interrupt

    async def join(self, publisher_address: str) -> ReceiverAck:
        """Load the committed weights of the publisher at `publisher_address`; return once they are proven and served."""
        parts = self._built()
        parts.recovery.joined(publisher_address)
        version, digest = await parts.receiver.pull(publisher_address)
        return ReceiverAck(version=version, digest=digest)

    async def start_rollout(self, trajectories: Channel, validation: Channel) -> None:
        """Lease prompt groups from the runner and deliver to these channels from now on; returns at once."""
        parts = self._built()
        parts.server.start(trajectories, validation)
        # Reported again: the hub knows a member that was cut off and came back without its version.
        if parts.receiver.state is ReceiverState.SERVING:
            self._on_weights(parts.receiver.state, *parts.receiver.current())

    async def drop_groups(self, tokens: list[str]) -> None:
        """Generate these leases no further: the runner counts them no longer."""
        self._built().server.drop(tokens)

    # --- weights ---------------------------------------------------------------------------------------------------

    async def weights_offer(self, offer: WeightOffer) -> ReceiverAnswer:
        """Answer the publisher's OFFER; READY means that nothing is served any more."""
        return await self._built().receiver.offer(offer)

    async def weights_transfer(self, transfer: WeightTransfer) -> ReceiverAnswer:
        """Load and verify the offered version."""
        return await self._built().receiver.transfer(transfer)

    async def weights_commit(self, version: int, digest: str) -> ReceiverAnswer:
        """Serve the applied version."""
        return await self._built().receiver.commit(version, digest)

    async def weights_abort(self, generation: int) -> None:
        """Leave a transfer that a lost member blocks."""
        await self._built().receiver.abort(generation)

    async def weights_relay(self, digest: str, encrypted: bool) -> StreamSource | ReceiverRefusal:
        """Pass the proven version on to another rollout."""
        return await self._built().receiver.relay(digest, encrypted)

    async def occupy(self, parts: list[Part], token: int) -> None:
        """Have `parts` of the engine on the device and no others, under `token` of the device lease; serve again once it is whole."""
        built = self._parts
        if built is None:
            return  # nothing of this process is on a device yet
        await built.occupancy.become(parts, token)
        if built.occupancy.whole and built.receiver.state is ReceiverState.SERVING:
            built.server.open()

    async def probe(self, prompt_ids: list[int], max_new_tokens: int) -> ProbeAnswer:
        """Return how the served weights go on with a fixed prompt, for the content check after a sync.

        Raises GenerationUnavailable while no proven weights are served.
        """
        parts = self._built()
        if parts.receiver.state is not ReceiverState.SERVING:
            raise GenerationUnavailable(f"no proven weights are served, the receiver is {parts.receiver.state.value}")
        if not parts.occupancy.whole:
            raise GenerationUnavailable("the engine has given up its device for now")
        return await parts.groups.probe(prompt_ids, max_new_tokens)

    # --- the end ---------------------------------------------------------------------------------------------------

    async def on_new_epoch(self, epoch: int) -> None:
        """Drop all work of older epochs; weights count as unversioned until the new publisher proves them."""
        if self._parts is not None:
            await self._parts.server.stop()
            self._parts.receiver.set_epoch(epoch)
            self._parts.occupancy.forget()

    async def drain(self) -> None:
        """Lease nothing more and finish what is in flight; what cannot end in time is returned."""
        if self._parts is not None:
            await self._parts.server.pause(self.spec.runtime.drain_seconds * PAUSE_SHARE)
            await self._parts.server.stop()

    async def close(self) -> None:
        """Stop serving and release the engine; idempotent."""
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.recovery.close()
            await parts.server.stop()
            await parts.receiver.close()
            parts.environment.close()
            await asyncio.to_thread(parts.engine.close)

    def status(self) -> dict[str, Any]:
        """Return version, digest, state and proof of the weights, groups in flight, and engines lost."""
        parts = self._parts
        version, digest = parts.receiver.current() if parts is not None else (-1, "")
        return {
            "version": version,
            "digest": digest,
            "weights": (parts.receiver.state if parts is not None else ReceiverState.UNVERSIONED).value,
            "weights_proof": parts.engine.weights_proof if parts is not None else "",
            "engines_lost": parts.recovery.losses if parts is not None else 0,
            "groups_in_flight": parts.server.groups_in_flight if parts is not None else 0,
            "groups_done": parts.server.groups_done if parts is not None else 0,
        }

    # --- inside ----------------------------------------------------------------------------------------------------

    def _on_weights(self, state: ReceiverState, version: int, digest: str) -> None:
        """Tell the hub what is held, and open the gate for a proven version only."""
        serving = state is ReceiverState.SERVING
        parts = self._built()
        proof = parts.engine.weights_proof if serving else ""
        self.set_policy_version(version if version >= 0 else None, digest or None, proof)
        self.set_state(MemberState.SERVING if serving else MemberState.UPDATING)
        if serving and parts.occupancy.whole:
            parts.server.open()
        else:
            parts.server.close()

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
        """Return the engine's capacity, but no more than this worker's share of a step's rows."""
        algorithm = self.spec.algorithm
        groups = math.ceil(algorithm.prompts_per_step * self.spec.rollout.oversample)
        share = -(-groups * algorithm.group_size // max(1, self.num_serving))
        return min(self._built().engine.row_capacity, share)

    def _max_seq_len(self) -> int:
        given = self.placement.get("max_seq_len") or self.spec.rollout.max_sequence_length
        return int(given or max_positions(self.files))

    def _env_addresses(self) -> list[str]:
        return [member.address for member in self.members("env") if member.state.constructed]

    def _env_at(self, address: str) -> str:
        """Return the name of an env worker, the role's where none is known at `address`."""
        return next((member.name for member in self.members("env") if member.address == address), "env")

    def _built(self) -> _Parts:
        if self._parts is None:
            raise InfrastructureError("the rollout engine is not built yet; call init_worker first")
        return self._parts
