"""The sending end of weight sync: offers each version to every rollout, commits it, serves it to late joiners.

Actor rank 0 owns one (trainers.md 9). A version passes three seams: a `VersionSource` yields its buckets, `HostCopies` encodes them in host
memory (full weights; `Chain` a patch besides), a `Way` moves the bytes. `publish` gathers and copies in the caller's thread and then lets the
process's handler loop talk to the receivers, so the trained tensors are free as soon as it returns. `host_copy` says which
copies are held when; `weights_pull` is answered from the committed one at any time between two publishes.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_core.api.errors import ConfigError, DeadlineExceeded
from rl_core.api.identity import Identity
from rl_core.api.job import RLJobSpec
from rl_core.messages.weights import PublishReport, ReceiverAddress
from rl_core.transports import sockets
from rl_core.transports.curve import KeyRing
from rl_core.transports.handlers import HandlerLoop
from rl_core.transports.links import SharedMemory
from rl_core.transports.rpc import RpcClient, RpcServer
from rl_core.transports.rpc_wire import refuse_on_event_loop
from rl_core.weights import words
from rl_core.weights.chain import Chain
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.fanout import Relays
from rl_core.weights.handshake import Gate, Handshake, HandshakeState
from rl_core.weights.host_copy import HostCopies, HostCopy
from rl_core.weights.joiners import LateJoiners
from rl_core.weights.outlets import Outlets
from rl_core.weights.version_source import VersionSource
from rl_core.weights.ways import OnDevice, Star, Together, Way

if TYPE_CHECKING:
    from rl_core.weights.device_memory import DeviceMemory

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
        """`device` ("cpu" or "cuda:N") and its UUID: where the trained weights are. `deadlines` None = those of the job.

        `host_token` None = this host's; another text makes every receiver a remote one (tests, benchmarks).
        """
        self.cfg = RLJobSpec.model_validate(cfg) if isinstance(cfg, Mapping) else cfg
        if self.cfg.weights.encrypt and keys is None:
            raise ConfigError("weights.encrypt needs CURVE keys, got none; set RLJOB_CURVE_DIR or encrypt: false")
        self.epoch = epoch
        self._identity, self._keys, self._device = identity, keys, device
        self._deadlines = deadlines or Deadlines.from_spec(self.cfg)
        self._last = NOTHING
        """Version and digest that were committed last."""
        self._clients: dict[str, RpcClient] = {}
        self._busy = threading.Lock()
        """Lets one publish run at a time: two would write the same memory and offer in either order."""
        self._loop = HandlerLoop.shared().loop
        host = sockets.split_address(bind)[0]
        self._copies = HostCopies(SharedMemory.shared(identity.uid if identity is not None else "").store)
        own = self.cfg.weights
        self._chain = Chain(self._copies, verify_every=own.verify_every) if own.syncer == "patch" else None
        self._outlets = Outlets(host, keys=keys, encrypt=self.cfg.weights.encrypt, host_token=host_token)
        self._relays = Relays(own.fanout, encrypted=own.encrypt) if own.fanout else None
        self._joiners = LateJoiners(self._copies, self._outlets, self._deadlines, self._relays)
        self._memory: DeviceMemory | None = None
        """The version on the device, where receivers map it there."""
        self._way = self._make_way(host, device_uuid)
        handlers = {"weights_pull": self._joiners.pull, "weights_pulled": self._joiners.pulled}
        allowed = {"rollout": frozenset(handlers)} if keys is not None else None
        self._server = RpcServer(bind, handlers, keys, identity, allowed=allowed).start()
        self.address = self._server.address
        """Where `weights_pull` is served."""
        words.kernels()

    def _make_way(self, host: str, device_uuid: str | None) -> Way:
        """Return how versions travel: patches go over ZeroMQ, and a CPU job does unless it asks for another way."""
        transport, star = self.cfg.weights.transport, Star(self._outlets, self._relays)
        if transport == "zmq" or (transport == "auto" and (self._device == "cpu" or self._chain is not None)):
            return star
        if self._shares_devices:
            from rl_core.weights.device_memory import DeviceMemory  # needs torch

            self._memory = DeviceMemory()
            own = self._outlets.host_token
            return OnDevice(star, self._memory, wanted=transport, host_token=own, device=device_uuid or self._device)
        return Together(
            star,
            wanted=transport,
            host=host,
            epoch=self.epoch,
            device=self._device,
            device_uuid=device_uuid,
            timeout=self._deadlines.collective_seconds,
        )

    @property
    def _shares_devices(self) -> bool:
        """Return whether a receiver may be on the device of the trained weights."""
        transport, mode = self.cfg.weights.transport, self.cfg.placement.mode
        return transport == "ipc" or (transport == "auto" and mode != "disaggregated")

    def current(self) -> tuple[int, str]:
        """Return (version, digest) that late joiners get; (-1, "") before the first commit and until a publish that began commits."""
        copy = self._joiners.committed
        return (copy.manifest.version, copy.manifest.digest) if copy is not None else NOTHING

    def publish(
        self, version: int, source: VersionSource, receivers: Sequence[ReceiverAddress], min_acks: int
    ) -> PublishReport:
        """Give `version` of `source` to `receivers` and return the report once all are served or out.

        Publishing a version again is harmless: who has it acknowledges without data.
        Raises DeadlineExceeded naming each missing receiver when fewer than `min_acks` acknowledge; ValueError when the
        version is older than the committed one, or the same with other weights.
        """
        refuse_on_event_loop("publish()")
        with self._busy:
            if version < self._last[0]:
                raise ValueError(
                    f"version must not go back inside an epoch: {self._last[0]} is committed, got {version}"
                )
            started = time.monotonic()
            self._joiners.withdraw()
            try:
                source = source if self._memory is None else self._memory.filled_by(source)
                write = self._copies.write if self._chain is None else self._chain.write
                copy = write(source, version=version, epoch=self.epoch, device=self._device)
                copied = time.monotonic()
                handshakes = self._send(copy, receivers, min_acks, self._deadlines.after(copied - started))
            finally:
                self._loop.call_soon_threadsafe(self._joiners.settle)
            return _report(copy, handshakes, min_acks, started=started, copied=copied)

    def lost(self, name: str, reason: str) -> None:
        """Stop waiting for receiver `name`: the hub declared it dead."""
        client = self._clients.get(name)
        if client is not None:
            client.fail(reason)

    def close(self) -> None:
        """Stop serving and free the host copies."""
        self._server.close()
        self._outlets.close()
        self._way.close()
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._copies.close()

    # --- one sync --------------------------------------------------------------------------------------------------

    def _send(
        self, copy: HostCopy, receivers: Sequence[ReceiverAddress], min_acks: int, deadlines: Deadlines
    ) -> list[Handshake]:
        """Offer `copy` and return the handshakes, each as far as it got."""
        manifest = copy.manifest
        if manifest.version == self._last[0] and manifest.digest != self._last[1]:
            raise ValueError(
                f"version {manifest.version} is committed with digest {self._last[1]} and other weights; raise the version"
            )
        handshakes = [
            Handshake(name=one.name, client=self._client(one), host_token=one.host_token) for one in receivers
        ]
        for handshake in handshakes:
            self._way.start(handshake, copy, deadlines)
        asyncio.run_coroutine_threadsafe(self._sync(copy, handshakes, min_acks, deadlines), self._loop).result()
        return handshakes

    async def _sync(self, copy: HostCopy, handshakes: list[Handshake], min_acks: int, deadlines: Deadlines) -> None:
        """Bring the `handshakes`, whose offers are under way, as far as they get."""
        self._copies.hold(copy, self)
        try:
            grace = deadlines.straggler(copy.manifest.total_bytes)
            gate = Gate(min_acks=min_acks, straggler_seconds=grace, opened=lambda: self._commit(copy))
            gate.watch(handshakes)
            await self._way.deliver(handshakes, copy, gate, deadlines)
        finally:
            self._copies.drop(copy, self)

    def _commit(self, copy: HostCopy) -> None:
        self._last = (copy.manifest.version, copy.manifest.digest)
        self._joiners.commit(copy)

    def _client(self, receiver: ReceiverAddress) -> RpcClient:
        client = self._clients.get(receiver.name)
        if client is None or client.address != receiver.address:
            if client is not None:
                client.close()
            service = "rollout" if self._keys is not None else None
            client = self._clients[receiver.name] = RpcClient(
                receiver.address, self._keys, self._identity, service=service
            )
        return client


def _report(
    copy: HostCopy, handshakes: Sequence[Handshake], min_acks: int, *, started: float, copied: float
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
    acks = [handshake.ack for handshake in acked if handshake.ack is not None]
    return PublishReport(
        version=copy.manifest.version,
        digest=copy.manifest.digest,
        acked=tuple(handshake.name for handshake in acked),
        failed={handshake.name: handshake.describe() for handshake in handshakes if handshake not in acked},
        seconds=now - started,
        bytes=_bytes(copy, acked),
        transport="+".join(sorted(kinds)) or "none",
        copy_seconds=copied - started,
        sync_seconds=now - copied,
        apply_seconds=max((ack.apply_seconds for ack in acks), default=0.0),
        pause_seconds=max((ack.pause_seconds for ack in acks), default=0.0),
        patched=tuple(handshake.name for handshake in acked if handshake.patched),
        relayed=tuple(handshake.name for handshake in acked if handshake.relayed),
        patch_share=copy.patch_share,
    )


def _bytes(copy: HostCopy, acked: Sequence[Handshake]) -> int:
    """Return the most bytes that one of `acked` needed; the size of the version when nobody needed any."""
    needed = [handshake for handshake in acked if handshake.transport]
    if copy.patch is not None and needed and all(handshake.patched for handshake in needed):
        return copy.patch.nbytes
    return copy.manifest.total_bytes
