"""The sending end of weight sync: offers each version to every rollout, commits it, serves it to late joiners.

Actor rank 0 owns one (trainers.md 9). `publish` copies the weights to host memory in the caller's thread and then lets the
process's handler loop talk to the receivers, so the trained tensors are free as soon as it returns. The committed version
stays in host memory until the next one is committed; `weights_pull` is answered from it at any time, training or not.
"""

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_core.api.errors import ConfigError, DeadlineExceeded
from rl_core.api.identity import Identity
from rl_core.api.job import RLJobSpec
from rl_core.messages.weights import (
    PublishReport,
    PullOffer,
    PullRefusal,
    PullRequest,
    ReceiverAddress,
    SharedSource,
    StreamSource,
    WeightOffer,
    WeightSource,
    WeightTransfer,
)
from rl_core.transports import sockets, tokens
from rl_core.transports.bulk import BulkSender
from rl_core.transports.curve import KeyRing
from rl_core.transports.handlers import HandlerLoop
from rl_core.transports.links import SharedMemory
from rl_core.transports.rpc import RpcClient, RpcServer
from rl_core.transports.rpc_wire import refuse_on_event_loop
from rl_core.weights import words
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.handshake import Gate, Handshake, HandshakeState
from rl_core.weights.host_copy import HostCopies, HostCopy

if TYPE_CHECKING:
    import torch

    from rl_core.weights.collective import GroupSender

logger = logging.getLogger(__name__)

NOTHING = (-1, "")


class WeightPublisher:
    """Publishes the versions of one epoch. Its `address` is what late joiners pull from.

    `cfg`: the job's spec or a mapping of it. `bind` needs `keys` when it leaves the machine.
    """

    def __init__(
        self,
        cfg: RLJobSpec | Mapping[str, Any],
        epoch: int,
        *,
        identity: Identity | None = None,
        keys: KeyRing | None = None,
        bind: str = "tcp://127.0.0.1:0",
        device: str = "cpu",
        device_uuid: str | None = None,
        deadlines: Deadlines | None = None,
        host_token: str | None = None,
    ) -> None:
        """`device` ("cpu" or "cuda:N") and its UUID: where the trained weights are, for NCCL.

        `host_token` None = this host's; another text makes every receiver a remote one (tests, benchmarks).
        """
        self.cfg = RLJobSpec.model_validate(cfg) if isinstance(cfg, Mapping) else cfg
        if self.cfg.weights.encrypt and keys is None:
            raise ConfigError("weights.encrypt needs CURVE keys, got none; set RLJOB_CURVE_DIR or encrypt: false")
        self.epoch = epoch
        self._identity, self._keys = identity, keys
        self._deadlines = deadlines or Deadlines()
        self._host_token = host_token if host_token is not None else tokens.host_token()
        store = SharedMemory.shared(identity.uid if identity is not None else "").store
        self._copies = HostCopies(store, bucket_bytes=self.cfg.weights.bucket_bytes, dtype=self.cfg.model.dtype)
        self._committed: HostCopy | None = None
        self._clients: dict[str, RpcClient] = {}
        self._busy = threading.Lock()
        self._loop = HandlerLoop.shared().loop
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._device, self._device_uuid = device, device_uuid
        self._group: GroupSender | None = None
        self._pulls: dict[str, tuple[HostCopy, asyncio.TimerHandle]] = {}
        handlers = {"weights_pull": self._pull, "weights_pulled": self._pulled}
        allowed = {"rollout": frozenset(handlers)} if keys is not None else None
        self._bulk: BulkSender | None = None
        self._server = RpcServer(bind, handlers, keys, identity, allowed=allowed).start()
        self.address = self._server.address
        """Where `weights_pull` is served."""
        words.kernels()

    def current(self) -> tuple[int, str]:
        """Return (version, digest) of the committed version; (-1, "") before the first."""
        copy = self._committed
        return (copy.manifest.version, copy.manifest.digest) if copy is not None else NOTHING

    def publish(
        self,
        version: int,
        state: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
        receivers: Sequence[ReceiverAddress],
        min_acks: int,
        *,
        ties: Mapping[str, str] | None = None,
    ) -> PublishReport:
        """Give `version` to `receivers` and return the report once all are served or out.

        `ties` names tied tensors (alias -> name) where memory does not show
        them. Publishing a version again is harmless: who has it acknowledges without data.
        Raises DeadlineExceeded naming each missing receiver when fewer than `min_acks` acknowledge; ValueError when the
        version is older than the committed one or the tensors changed shape.
        """
        refuse_on_event_loop("publish()")
        with self._busy:
            committed = self._committed
            if committed is not None and version < committed.manifest.version:
                raise ValueError(
                    f"version must not go back inside an epoch: {committed.manifest.version} is committed, got {version}"
                )
            started = time.monotonic()
            copy = self._copies.write(state, version=version, epoch=self.epoch, ties=ties)
            copied = time.monotonic()
            if committed is not None and version == committed.manifest.version:
                copy = self._same(copy, committed)
            handshakes = [self._handshake(receiver) for receiver in receivers]
            for handshake in handshakes:
                self._start_offer(handshake, copy)
            asyncio.run_coroutine_threadsafe(self._sync(copy, handshakes, min_acks), self._loop).result()
            return self._report(copy, handshakes, min_acks, started=started, copied=copied)

    def lost(self, name: str, reason: str) -> None:
        """Stop waiting for receiver `name`: the hub declared it dead."""
        client = self._clients.get(name)
        if client is not None:
            client.fail(reason)

    def close(self) -> None:
        """Stop serving and free the host copies."""
        self._server.close()
        if self._bulk is not None:
            self._bulk.close()
        if self._group is not None:
            self._group.close()
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._copies.close()

    # --- one sync, on the handler loop -----------------------------------------------------------------------------

    def _same(self, copy: HostCopy, committed: HostCopy) -> HostCopy:
        """Return the committed copy in place of an equal new one."""
        self._copies.drop(copy, None)
        if copy.manifest.digest != committed.manifest.digest:
            raise ValueError(
                f"version {copy.manifest.version} is committed with digest {committed.manifest.digest} and other weights; raise the version"
            )
        return committed

    async def _sync(self, copy: HostCopy, handshakes: list[Handshake], min_acks: int) -> None:
        """Bring the `handshakes`, whose offers are under way, as far as they get."""
        self._copies.hold(copy, "sync")
        self._quiet.clear()
        try:
            gate = Gate(min_acks=min_acks, deadlines=self._deadlines, opened=lambda: self._commit(copy))
            gate.watch(handshakes)
            if self._is_star:
                await asyncio.gather(*(self._deliver(handshake, copy, gate) for handshake in handshakes))
            else:
                await self._deliver_together(handshakes, copy, gate)
        finally:
            self._quiet.set()
            self._copies.drop(copy, "sync")

    @property
    def _is_star(self) -> bool:
        """Whether each receiver is served by itself over ZeroMQ."""
        transport = self.cfg.weights.transport
        return transport == "zmq" or (transport == "auto" and self._device == "cpu")

    def _handshake(self, receiver: ReceiverAddress) -> Handshake:
        return Handshake(
            name=receiver.name,
            client=self._client(receiver.name, receiver.address),
            shares_host=receiver.host_token == self._host_token,
        )

    def _start_offer(self, handshake: Handshake, copy: HostCopy) -> None:
        """Send OFFER. In a star a receiver of this host is told where the data are and loads in the same exchange."""
        source, seconds = None, self._deadlines.ready_seconds
        if self._is_star and handshake.shares_host and copy.segment is not None:
            source = self._source(copy, shares_host=True)
            seconds += self._transfer_seconds(copy)
        handshake.start(self._offer(copy, source), seconds)

    async def _deliver(self, handshake: Handshake, copy: HostCopy, gate: Gate) -> None:
        """Serve one receiver to the end, independently of the others."""
        await handshake.offered()
        await self._send_and_commit(handshake, copy, gate)

    async def _deliver_together(self, handshakes: list[Handshake], copy: HostCopy, gate: Gate) -> None:
        """Hear all; move the bytes in one process group where the job or the devices say so; commit."""
        await asyncio.gather(*(handshake.offered() for handshake in handshakes))
        backend = self._backend([one.ready.device for one in handshakes if one.live and one.ready is not None])
        if backend is not None:
            await self._send_in_group(backend, handshakes, copy)
        await asyncio.gather(*(self._send_and_commit(handshake, copy, gate) for handshake in handshakes))

    async def _send_and_commit(self, handshake: Handshake, copy: HostCopy, gate: Gate) -> None:
        if handshake.live:
            source = self._source(copy, shares_host=handshake.shares_host)
            transfer = WeightTransfer(digest=copy.manifest.digest, source=source)
            await handshake.transfer(transfer, self._transfer_seconds(copy))
        if handshake.state is HandshakeState.APPLIED and await gate.wait():
            await handshake.commit(copy.manifest.version, copy.manifest.digest, self._deadlines.commit_seconds)

    async def _send_in_group(self, backend: str, handshakes: list[Handshake], copy: HostCopy) -> None:
        """Broadcast to all that are READY, again in a smaller group whenever a member is lost."""
        sender = self._sender(backend)
        for _ in range(len(handshakes) + 1):
            ready = [handshake for handshake in handshakes if handshake.live]
            if not ready:
                return
            await sender.send(copy, ready, self._transfer_seconds(copy))
            again = [handshake for handshake in ready if handshake.live]
            for handshake in again:
                self._start_offer(handshake, copy)
            await asyncio.gather(*(handshake.offered() for handshake in again))
        for handshake in handshakes:
            if handshake.live:
                handshake.fail(f"the process group ended in every generation: {handshake.reason}")

    def _sender(self, backend: str) -> "GroupSender":
        if self._group is None:
            from rl_core.weights.collective import GroupSender

            host, _ = sockets.split_address(self.address)
            timeout = self.cfg.runtime.deadlines.collective
            device = self._device if backend == "nccl" else "cpu"
            self._group = GroupSender(host=host, epoch=self.epoch, backend=backend, device=device, timeout=timeout)
        return self._group

    def _transfer_seconds(self, copy: HostCopy) -> float:
        return self._deadlines.transfer(copy.manifest.total_bytes)

    def _backend(self, devices: list[str]) -> str | None:
        """Return the backend for receivers on `devices` (UUIDs or "cpu"); None = each by itself over ZeroMQ."""
        wanted = self.cfg.weights.transport
        own = [self._device_uuid or self._device, *devices]
        possible = "cpu" not in own and len(set(own)) == len(own)
        if wanted == "nccl" and not possible:
            raise ConfigError(
                f"weights.transport nccl needs a device of its own per member, got {own}; use auto or zmq"
            )
        return "gloo" if wanted == "gloo" else "nccl" if possible and devices else None

    def _offer(self, copy: HostCopy, source: WeightSource | None) -> WeightOffer:
        manifest = copy.manifest
        return WeightOffer(
            digest=manifest.digest,
            manifest=manifest.packed,
            bucket_bytes=self.cfg.weights.bucket_bytes,
            deadline=self._deadlines.total(manifest.total_bytes),
            source=source,
        )

    def _source(self, copy: HostCopy, *, shares_host: bool) -> WeightSource:
        if not (shares_host and copy.segment is not None):
            return self._stream(copy)
        return SharedSource(segment=copy.segment, nbytes=copy.layout.nbytes)

    def _stream(self, copy: HostCopy) -> StreamSource:
        encrypt = self.cfg.weights.encrypt
        if self._bulk is None:
            host, _ = sockets.split_address(self.address)
            self._bulk = BulkSender(f"tcp://{host}:0", self._keys if encrypt else None)
        return StreamSource(ticket=self._bulk.offer([copy.memory], share=copy.share), encrypted=encrypt)

    def _client(self, name: str, address: str) -> RpcClient:
        client = self._clients.get(name)
        if client is None or client.address != address:
            if client is not None:
                client.close()
            service = "rollout" if self._keys is not None else None
            client = self._clients[name] = RpcClient(address, self._keys, self._identity, service=service)
        return client

    def _commit(self, copy: HostCopy) -> None:
        if copy is not self._committed:
            self._copies.hold(copy, "committed")
            old, self._committed = self._committed, copy
            if old is not None:
                self._copies.drop(old, "committed")
        self._quiet.set()

    def _report(
        self, copy: HostCopy, handshakes: list[Handshake], min_acks: int, *, started: float, copied: float
    ) -> PublishReport:
        acked = [handshake for handshake in handshakes if handshake.state is HandshakeState.ACKED]
        if len(acked) < min_acks:
            missing = "; ".join(handshake.describe() for handshake in handshakes if handshake not in acked)
            raise DeadlineExceeded(
                f"version {copy.manifest.version} must be acknowledged by {min_acks} receivers, got {len(acked)} of {len(handshakes)}"
                f"{': ' + missing if missing else ''}; start more rollouts or lower minReplicas"
            )
        now = time.monotonic()
        kinds = {handshake.transport for handshake in handshakes if handshake.transport}
        acks = [one.ack for one in acked if one.ack is not None]
        return PublishReport(
            version=copy.manifest.version,
            digest=copy.manifest.digest,
            acked=tuple(one.name for one in acked),
            failed={one.name: one.describe() for one in handshakes if one not in acked},
            seconds=now - started,
            bytes=copy.manifest.total_bytes,
            transport="+".join(sorted(kinds)) or "none",
            copy_seconds=copied - started,
            sync_seconds=now - copied,
            apply_seconds=max((ack.apply_seconds for ack in acks), default=0.0),
            pause_seconds=max((ack.pause_seconds for ack in acks), default=0.0),
        )

    # --- late joiners, on the handler loop -------------------------------------------------------------------------

    async def _pull(self, request: PullRequest) -> PullOffer | PullRefusal:
        """Answer with a source of the committed version, or refuse.

        While a publish is under way it waits for its commit (30 s at most): on policy the version before is of no use.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._quiet.wait(), self._deadlines.ready_seconds)
        copy = self._committed
        if copy is None:
            return PullRefusal(reason="no version is committed yet")
        ticket = secrets.token_hex(16)
        self._copies.hold(copy, ticket)
        source = self._source(copy, shares_host=request.host_token == self._host_token)
        expiry = self._loop.call_later(self._deadlines.total(copy.manifest.total_bytes), self._release, ticket)
        self._pulls[ticket] = (copy, expiry)
        manifest = copy.manifest
        offer = self._offer(copy, source)
        return PullOffer(ticket=ticket, version=manifest.version, epoch=manifest.epoch, offer=offer)

    async def _pulled(self, ticket: str) -> bool:
        """End a pull: its copy may be used again."""
        return self._release(ticket)

    def _release(self, ticket: str) -> bool:
        entry = self._pulls.pop(ticket, None)
        if entry is None:
            return False
        copy, expiry = entry
        expiry.cancel()
        self._copies.drop(copy, ticket)
        return True
