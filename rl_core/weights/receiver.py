"""The receiving end of weight sync: verifies a version before the engine serves it.

A rollout worker owns one receiver and serves its `handlers()` by RPC; the publisher calls them. All state changes happen on the
worker's event loop; bytes are moved in one thread (those of a small model on the loop). The engine serves a version only after COMMIT,
and COMMIT is accepted only if every checksum was correct. A sync that ends before that leaves the engine paused, and `current()`
without a version if memory was changed. A patch is applied only to the version that is served; if it fails verification, the answer
is READY and the whole version is sent.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rl_core.api.errors import DeadlineExceeded, EpochFenced, InfrastructureError
from rl_core.api.identity import Identity
from rl_core.api.job import RLJobSpec
from rl_core.messages.weights import (
    PatchSource,
    PullOffer,
    PullRequest,
    ReceiverAck,
    ReceiverAnswer,
    ReceiverApplied,
    ReceiverFailure,
    ReceiverReady,
    ReceiverRefusal,
    StreamSource,
    WeightOffer,
    WeightSource,
    WeightTransfer,
)
from rl_core.transports import tokens
from rl_core.transports.curve import KeyRing
from rl_core.transports.rpc import RpcClient
from rl_core.weights.assembly import Assembly, writable_bytes
from rl_core.weights.bucket import Layout
from rl_core.weights.compatibility import incompatibility
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.loader import CANCELLED, WeightLoader
from rl_core.weights.manifest import WeightManifest
from rl_core.weights.receiver_state import ReceiverState, VersionStates
from rl_core.weights.relay import Relay
from rl_core.weights.source_reader import SourceReader
from rl_core.weights.target import InPlaceTarget, RankTarget, WeightTarget

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class WeightReceiver:
    """Gives `target` the versions that are offered. Call its methods on one event loop; `current` may be called from any thread.

    `device`: device of the engine's weights, "cpu" or "cuda:N"; `device_uuids`: UUIDs of all devices of the engine unless it is on the CPU.
    `on_state(state, version, digest)` is called whenever the state changes.
    """

    def __init__(
        self,
        cfg: RLJobSpec | Mapping[str, Any] | None,
        identity: Identity | None,
        epoch: int,
        target: WeightTarget,
        *,
        keys: KeyRing | None = None,
        device: str = "cpu",
        device_uuids: Sequence[str] = (),
        deadlines: Deadlines | None = None,
        on_state: Callable[[ReceiverState, int, str], None] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """`host`: address at which other receivers reach this process."""
        self.cfg = RLJobSpec.model_validate(cfg) if isinstance(cfg, Mapping) else cfg
        self.epoch = epoch
        self._identity, self._keys, self._target = identity, keys, target
        self._device, self._device_uuids = device, tuple(device_uuids)
        self._deadlines = deadlines or (Deadlines.from_spec(self.cfg) if self.cfg is not None else Deadlines())
        self._states = VersionStates(on_state)
        self._engine_lock = asyncio.Lock()
        """Guards the engine's memory: a newer OFFER waits until the transfer that it replaces has stopped writing."""
        self._expiry: asyncio.TimerHandle | None = None
        """Ends the sync if the publisher is silent for too long."""
        self._paused_at: float | None = None
        """Time at which the engine stopped serving."""
        self._load_seconds = 0.0
        """Duration of the last load."""
        self._relay = Relay(host, keys)
        self._reader = SourceReader(keys=keys, device=device, deadlines=self._deadlines)
        self._loader = WeightLoader(target, self._reader)

    @property
    def state(self) -> ReceiverState:
        """Return the state of the sync."""
        return self._states.state

    def warm_up(self) -> None:
        """Wait until the compiled checksum kernels are loaded, so that the first transfer does not wait for them."""
        self._loader.warm_up()

    def handlers(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        """Return the RPC methods that the worker must serve for its publisher."""
        return {
            "weights_offer": self.offer,
            "weights_transfer": self.transfer,
            "weights_commit": self.commit,
            "weights_relay": self.relay,
        }

    def current(self) -> tuple[int, str]:
        """Return (version, manifest digest) of the committed weights in memory; (-1, "") if there is no committed version."""
        return self._states.current()

    def set_epoch(self, epoch: int) -> None:
        """Enter `epoch`. If it is newer, the sync in progress ends and the weights have no version until the next offer."""
        if epoch <= self.epoch:
            return
        self.epoch = epoch
        self.forget()

    def forget(self) -> None:
        """End the sync in progress and hold no version until the next offer. Called when the engine's memory is outdated or gone."""
        self._loader.cancel()
        self._relay.withdraw()
        self._stop_timer()
        self._states.reset()

    # --- the handshake ---------------------------------------------------------------------------------------------

    async def offer(self, offer: WeightOffer) -> ReceiverAnswer:
        """Handle OFFER: pause the engine and answer READY. Cancels the transfer of an earlier offer, and enters the offer's epoch if it is newer.

        Other answers are ACK (this version is served already), APPLIED (it is loaded and only needs COMMIT) and REFUSE. If the offer says where
        the data is, the version is loaded at once, and the answer is that of `transfer`.
        """
        manifest = WeightManifest.unpack(offer.manifest)
        if manifest.digest != offer.digest:
            return ReceiverRefusal(reason="the manifest does not have the digest of the offer")
        if manifest.epoch < self.epoch:
            return ReceiverRefusal(reason=f"older_epoch: offered {manifest.epoch}, this receiver is at {self.epoch}")
        self.set_epoch(manifest.epoch)
        problem = self._problem(manifest)
        if problem:
            return ReceiverRefusal(reason=problem)
        if self._states.serves(manifest.digest):
            return ReceiverAck(version=manifest.version, digest=manifest.digest)
        self._loader.cancel()  # a transfer in progress belongs to an offer that is replaced by this one
        async with self._engine_lock:
            self._start_timer(offer.deadline)
            layout = Layout.of(manifest.entries, offer.bucket_bytes)
            # Processes of an engine read a whole version from the publisher's memory: nothing is kept here to be patched.
            reads_whole = offer.keep and offer.source is not None and isinstance(self._target, RankTarget)
            self._states.offer(manifest, layout, retain=offer.keep and not reads_whole)
            answer = await self._accept(manifest)
            patch = offer.patch if not reads_whole else None
            if isinstance(answer, ReceiverReady) and patch is not None:
                if self._states.accepts(patch.base):
                    answer = await self._load(manifest, layout, patch)
                elif self._states.base:
                    logger.warning(
                        "the adapters of version %s are offered over base %s, got base %s in memory; the whole version is needed",
                        manifest.version,
                        patch.base,
                        self._states.base,
                    )
            if isinstance(answer, ReceiverReady) and offer.source is not None:
                answer = await self._load(manifest, layout, offer.source)
            return answer

    async def _accept(self, manifest: WeightManifest) -> ReceiverAnswer:
        """Pause the engine for the offered version."""
        loaded = self._states.loaded
        if loaded is not None and loaded.digest == manifest.digest:
            self._states.already_loaded()
            return _applied(manifest, loaded=False)
        self._loader.reset()
        if self._paused_at is None:
            self._paused_at = time.monotonic()
        self._states.await_data()
        try:
            await self._target.prepare(self._deadlines.ready_seconds)
        except DeadlineExceeded as error:
            self._abandon(f"the engine did not stop: {error}")
            return ReceiverRefusal(reason=f"requests in flight did not end: {error}")
        return self._ready()

    def _ready(self) -> ReceiverReady:
        ranks = self._loader.ranks
        devices = (*self._device_uuids, *[self._device] * ranks)[:ranks]
        return ReceiverReady(have=self.current(), devices=devices, group=self._loader.group)

    def _problem(self, manifest: WeightManifest) -> str:
        """Return why the offered version must be refused, or ""."""
        newest = self._states.newest()
        if newest is not None and (manifest.epoch, manifest.version) < newest:
            return f"older: offered version {manifest.version}, this receiver is at {newest[1]} of epoch {newest[0]}"
        loaded = self._states.loaded
        if (
            loaded is not None
            and self._states.committed
            and (loaded.epoch, loaded.version) == (manifest.epoch, manifest.version)
            and loaded.digest != manifest.digest
        ):
            return f"version {manifest.version} is held with digest {loaded.digest}, got {manifest.digest}; raise the version"
        return incompatibility(manifest, self._target.names_and_shapes())

    async def transfer(self, transfer: WeightTransfer) -> ReceiverAnswer:
        """Handle TRANSFER: load and verify the offered version. Answer APPLIED or FAILED, or READY if a patch failed verification."""
        async with self._engine_lock:
            manifest, layout = self._states.offered, self._states.layout
            if manifest is None or layout is None or manifest.digest != transfer.digest:
                return _failed(f"digest {transfer.digest} is not on offer here; offer it first")
            if self.state is ReceiverState.APPLIED:
                return _applied(manifest, loaded=False)
            return await self._load(manifest, layout, transfer.source)

    async def _load(self, manifest: WeightManifest, layout: Layout, source: WeightSource) -> ReceiverAnswer:
        self._relay.withdraw()
        states = self._states
        assembly = Assembly(
            manifest,
            layout,
            destinations=self._destinations(),
            wanted=self._target.names_and_shapes(),
            check=self._loader.check,
            retained=states.retained,
            base=states.loaded if states.committed else None,
        )
        started = time.monotonic()
        patched = isinstance(source, PatchSource)
        try:
            reason = await self._loader.load(assembly, source)
        except asyncio.CancelledError:
            self._abandon("the publisher gave the transfer up", touched=assembly.touched)
            raise
        if assembly.bad:
            reason = f"{len(assembly.bad)} tensors do not have the checksum of the manifest"
        if reason and patched and not self._loader.is_cancelled:
            names = f", first {assembly.bad[0]!r}" if assembly.bad else ""
            logger.warning(
                "the patch to version %s failed, the whole version is needed: %s%s", manifest.version, reason, names
            )
            states.patch_failed()
            return self._ready()
        if reason or self._loader.is_cancelled:
            self._abandon(reason or CANCELLED, touched=assembly.touched)
            aborted = not assembly.bad and self._loader.group_ended(source)
            return ReceiverFailure(
                names=tuple(assembly.bad),
                reason=reason or CANCELLED,
                aborted=aborted,
                opened=self._loader.opened(source),
            )
        self._load_seconds = time.monotonic() - started
        states.apply(manifest)
        return replace(_applied(manifest, loaded=True, patched=patched), opened=self._loader.opened(source))

    def _destinations(self) -> "Mapping[str, torch.Tensor]":
        return self._target.destinations() if isinstance(self._target, InPlaceTarget) else {}

    async def commit(self, version: int, digest: str) -> ReceiverAck | ReceiverRefusal:
        """Handle COMMIT: serve the applied version and answer ACK; REFUSE if another version is applied. May be repeated.

        The commit is completed even if the caller cancels its call, because the engine may have begun to serve.
        """
        return await asyncio.shield(self._commit(version, digest))

    async def _commit(self, version: int, digest: str) -> ReceiverAck | ReceiverRefusal:
        async with self._engine_lock:
            if self.state is ReceiverState.SERVING and self.current() == (version, digest):
                return self._acknowledge()
            loaded = self._states.loaded
            if (
                self.state is not ReceiverState.APPLIED
                or loaded is None
                or (loaded.version, loaded.digest) != (version, digest)
            ):
                return ReceiverRefusal(reason=f"version {version} is not applied here, the state is {self.state.value}")
            await self._target.resume(version, digest)
            if self._states.loaded is None:
                return ReceiverRefusal(reason=f"version {version} went with the engine's memory")
            self._stop_timer()
            self._states.commit()
            return self._acknowledge()

    def _acknowledge(self) -> ReceiverAck:
        paused_at, self._paused_at = self._paused_at, None
        pause = time.monotonic() - paused_at if paused_at is not None else 0.0
        version, digest = self.current()
        return ReceiverAck(version=version, digest=digest, pause_seconds=pause, apply_seconds=self._load_seconds)

    async def relay(self, digest: str, encrypted: bool) -> StreamSource | ReceiverRefusal:
        """Return a stream of the version `digest` for another receiver; REFUSE if it is not loaded or cannot be read back."""
        loaded = self._states.loaded
        if (
            loaded is None
            or loaded.digest != digest
            or self.state not in (ReceiverState.APPLIED, ReceiverState.SERVING)
        ):
            return ReceiverRefusal(reason=f"digest {digest} is not proven here, the state is {self.state.value}")
        memory = {**(self._states.retained or {}), **writable_bytes(self._destinations())}
        if any(entry.alias_of is None and entry.name not in memory for entry in loaded.entries):
            return ReceiverRefusal(reason="the engine has tensors that cannot be read back")
        if encrypted and self._keys is None:
            return ReceiverRefusal(reason="a secret stream needs CURVE keys, there are none here")
        layout = Layout.of(loaded.entries, self._states.bucket_bytes)
        return self._relay.stream(loaded, layout, memory, encrypted=encrypted)

    # --- late joiners ----------------------------------------------------------------------------------------------

    async def pull(self, address: str, *, timeout: float | None = None) -> tuple[int, str]:
        """Load and serve the committed version of the publisher at `address`; return (version, digest).

        A failed transfer is repeated once. `timeout` is in seconds per call. Raises InfrastructureError if the version cannot be
        had, EpochFenced if the publisher is of an older epoch, DeadlineExceeded and WorkerLost as RPC does.
        """
        client = RpcClient(address, self._keys, self._identity, service="actor" if self._keys is not None else None)
        client.set_epoch(self.epoch)
        try:
            answer: ReceiverAnswer | None = None
            for is_retry in (False, True):
                answer = await self._pull_once(client, timeout, direct=is_retry)
                if isinstance(answer, ReceiverAck):
                    return self.current()
                if isinstance(answer, ReceiverRefusal):
                    break
            raise InfrastructureError(f"weights could not be pulled from {address}: {answer}")
        finally:
            client.close()

    async def _pull_once(self, client: RpcClient, timeout: float | None, *, direct: bool) -> ReceiverAnswer:
        request = PullRequest(host_token=tokens.host_token(), base=self._states.base, direct=direct)
        pulled = await client.call("weights_pull", request, timeout=timeout or self._deadlines.sync_seconds)
        if not isinstance(pulled, PullOffer):
            raise InfrastructureError(f"the publisher at {client.address} has no weights to give: {pulled.reason}")
        try:
            if pulled.epoch < self.epoch:
                raise EpochFenced(f"publisher at {client.address} is of epoch {pulled.epoch}, this is {self.epoch}")
            answer = await self.offer(pulled.offer)
            if isinstance(answer, ReceiverApplied):
                return await self.commit(pulled.version, pulled.offer.digest)
            return answer
        finally:
            await client.call("weights_pulled", pulled.ticket, timeout=self._deadlines.commit_seconds)

    # --- the end of a sync -----------------------------------------------------------------------------------------

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._expiry = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _stop_timer(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _expire(self) -> None:
        """End the sync: the publisher was silent for longer than any sync takes. It is dead, or it dropped this receiver."""
        self._expiry = None
        self._loader.cancel()
        # If the lock is held, its holder sees the cancellation and abandons the sync.
        if not self._engine_lock.locked():
            self._abandon("no COMMIT came")

    def _abandon(self, reason: str, *, touched: bool = False) -> None:
        logger.warning("weight sync abandoned, not serving: %s", reason)
        self._stop_timer()
        self._states.abandon(touched=touched)

    async def close(self) -> None:
        """Stop the transfer in progress and free groups, streams and the thread."""
        self._loader.cancel()
        self._stop_timer()
        self._states.clear_offer()
        await self._loader.close()
        self._reader.close()
        self._relay.close()


def _applied(manifest: WeightManifest, *, loaded: bool, patched: bool = False) -> ReceiverApplied:
    """Return the answer APPLIED. `loaded`: whether bytes were loaded; `patched`: whether a patch was applied."""
    return ReceiverApplied(version=manifest.version, digest=manifest.digest, loaded=loaded, patched=patched)


def _failed(reason: str) -> ReceiverFailure:
    return ReceiverFailure(names=(), reason=reason)
