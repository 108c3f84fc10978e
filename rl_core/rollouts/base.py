"""`RolloutWorkerBase`: what every rollout worker does, whatever its engine: take weights, serve prompts, leave in order.

    init_worker -> join (PULL, verify) -> start_rollout -> serving
    OFFER -> updating (no prompt is leased, those in flight end) -> transfer, verify -> COMMIT -> serving

A worker serves a version only after its receiver proved it (I2). Its async methods run on one event loop.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from rl_core.api.errors import GenerationUnavailable, InfrastructureError
from rl_core.api.job import RLJobSpec
from rl_core.api.records import EnvironmentInterface, PromptGroupRecord
from rl_core.messages.groups import ProbeAnswer, PromptLease
from rl_core.messages.members import MemberState
from rl_core.messages.weights import ReceiverAnswer, WeightOffer, WeightTransfer
from rl_core.rollouts.environment import RemoteEnvironment
from rl_core.rollouts.generation import BatchedDataDict, GenerationConfig, GenerationInterface, sample_seed
from rl_core.rollouts.leases import HubLeases
from rl_core.rollouts.message_log import as_token_tensor, flatten_messages, token_loss_mask
from rl_core.rollouts.serving import PromptServer
from rl_core.weights.receiver import ReceiverState, WeightReceiver
from rl_core.weights.target import WeightTarget
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


class RolloutWorkerBase(Worker):
    """Weights in, prompts in, records out. A subclass has an engine: `_build`, `_run`, `_row_capacity`, `probe`."""

    peer_methods: ClassVar[Mapping[str, frozenset[str]]] = {
        "actor": frozenset({"weights_offer", "weights_transfer", "weights_commit", "weights_abort"})
    }

    def __init__(self, config: RLJobSpec | Mapping[str, Any], placement: Mapping[str, Any] | None = None) -> None:
        """`config` is the job's spec; `placement` may hold `max_seq_len` (None: the job's rollout.maxSequenceLength)."""
        self.spec = config if isinstance(config, RLJobSpec) else RLJobSpec.model_validate(config)
        self.placement = dict(placement or {})
        self._receiver: WeightReceiver | None = None
        self._server: PromptServer | None = None

    @abstractmethod
    def _build(self) -> WeightTarget:
        """Build the engine with unfilled weights; return what the receiver fills. Called once, off the event loop."""

    @abstractmethod
    async def _run(self, lease: PromptLease) -> PromptGroupRecord:
        """Return the record of a leased group, after the retries that are the worker's."""

    @abstractmethod
    def _row_capacity(self) -> int:
        """Return the rows in flight at which this engine leases no more prompts."""

    @abstractmethod
    def _policy_version(self) -> int:
        """Return the version of the weights in the engine."""

    # --- bring-up --------------------------------------------------------------------------------------------------

    def init_worker(self) -> None:
        """Build the engine; repeating it keeps it."""
        if self._receiver is None:
            target = self._build()
            self._receiver = WeightReceiver(
                self.spec,
                self.identity,
                self.epoch,
                target,
                keys=self.keys,
                device=self.device,
                device_uuid=next(iter(self.worker_info.device_uuids), None),
                on_state=self._on_weights,
            )
            self._receiver.warm_up()

    async def join(self, publisher_address: str, ticket: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Load the committed weights of the publisher at `publisher_address`; return {version, digest} once proven."""
        version, digest = await self._require_receiver().pull(publisher_address)
        return {"version": version, "digest": digest}

    async def start_rollout(self, trajectories: Channel, validation: Channel) -> None:
        """Lease prompt groups from the runner and deliver to these channels from now on; returns at once."""
        server = self._prompt_server()
        server.start(trajectories, validation)
        receiver = self._require_receiver()
        if receiver.state is ReceiverState.SERVING:
            self._on_weights(
                receiver.state, *receiver.current()
            )  # told again: one that was cut off came back without a version

    # --- weights ---------------------------------------------------------------------------------------------------

    async def weights_offer(self, offer: WeightOffer) -> ReceiverAnswer:
        """Answer the publisher's OFFER; READY means that nothing is served any more."""
        return await self._require_receiver().offer(offer)

    async def weights_transfer(self, transfer: WeightTransfer) -> ReceiverAnswer:
        """Load and verify the offered version."""
        return await self._require_receiver().transfer(transfer)

    async def weights_commit(self, version: int, digest: str) -> ReceiverAnswer:
        """Serve the applied version."""
        return await self._require_receiver().commit(version, digest)

    async def weights_abort(self, generation: int) -> None:
        """Leave a transfer that a lost member blocks."""
        await self._require_receiver().abort(generation)

    @abstractmethod
    async def probe(self, prompt_ids: list[int], max_new_tokens: int) -> ProbeAnswer:
        """Return a fixed continuation, for the content check after a sync."""

    # --- the end ---------------------------------------------------------------------------------------------------

    async def on_new_epoch(self, epoch: int) -> None:
        """Drop all work of older epochs; weights count as unversioned until the new publisher proves them."""
        if self._server is not None:
            await self._server.stop()
        if self._receiver is not None:
            self._receiver.set_epoch(epoch)

    async def drain(self) -> None:
        """Lease nothing more and finish what is in flight; what cannot end in time is returned."""
        if self._server is not None:
            await self._server.pause(self.spec.runtime.drain_seconds * PAUSE_SHARE)
            await self._server.stop()

    async def close(self) -> None:
        """Stop serving and release the engine."""
        if self._server is not None:
            await self._server.stop()
        if self._receiver is not None:
            await self._receiver.close()

    def status(self) -> dict[str, Any]:
        """Return version, digest, state of the weights and groups in flight."""
        receiver, server = self._receiver, self._server
        version, digest = receiver.current() if receiver is not None else (-1, "")
        return {
            "version": version,
            "digest": digest,
            "weights": receiver.state.value if receiver is not None else ReceiverState.UNVERSIONED.value,
            "groups_in_flight": server.groups_in_flight if server is not None else 0,
            "groups_done": server.groups_done if server is not None else 0,
        }

    # --- inside ----------------------------------------------------------------------------------------------------

    async def _pause(self, deadline: float) -> None:
        """Empty the engine for new weights."""
        if self._server is not None:
            await self._server.pause(deadline * PAUSE_SHARE)

    def _on_weights(self, state: ReceiverState, version: int, digest: str) -> None:
        """Tell the hub what is held, and open the gate for a proven version only."""
        serving = state is ReceiverState.SERVING
        self.set_policy_version(version if version >= 0 else None, digest or None)
        self.set_state(MemberState.SERVING if serving else MemberState.UPDATING)
        if self._server is not None:
            if serving:
                self._server.open()
            else:
                self._server.close()

    def _prompt_server(self) -> PromptServer:
        if self._server is None:
            self._server = PromptServer(
                self._counted_run,
                HubLeases(self.hub_call),
                row_limit=self._row_limit,
                group_rows=self.spec.algorithm.group_size,
                version=self._policy_version,
                waiting=self.waiting,
            )
        return self._server

    async def _counted_run(self, lease: PromptLease) -> PromptGroupRecord:
        record = await self._run(lease)
        self.record_progress("records")
        return record

    def _row_limit(self) -> int:
        """Return the engine's capacity, but no more than this worker's share of a step's rows."""
        algorithm = self.spec.algorithm
        serving = sum(member.state is MemberState.SERVING for member in self.members("rollout"))
        share = -(-algorithm.prompts_per_step * algorithm.group_size // max(1, serving))
        return min(self._row_capacity(), share)

    def _require_receiver(self) -> WeightReceiver:
        if self._receiver is None:
            raise InfrastructureError("the rollout engine is not built yet; call init_worker first")
        return self._receiver

    def _require_serving(self) -> None:
        receiver = self._require_receiver()
        if receiver.state is not ReceiverState.SERVING:
            raise GenerationUnavailable(f"no proven weights are served, the receiver is {receiver.state.value}")
