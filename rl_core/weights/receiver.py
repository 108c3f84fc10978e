"""The receiving end of weight sync: proves a version before it is served (trainers.md 9, invariant I2).

A rollout worker owns one and serves its `handlers()`; `publisher` calls them. All state changes on the worker's event loop;
bytes move in one thread, those of a small model on the loop. Only COMMIT of a version whose every checksum held makes the
engine serve it; whatever ends a sync before that leaves the engine paused, and `current()` without a version once its memory
was touched. A patch is taken only over the version that is served; one that does not hold is answered with READY, for all of it.
"""

import asyncio
import enum
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_core.api.errors import DeadlineExceeded, EpochFenced, InfrastructureError, RLJobError
from rl_core.api.identity import Identity
from rl_core.api.job import RLJobSpec
from rl_core.messages.weights import (
    MessageSource,
    PatchSource,
    PullOffer,
    PullRequest,
    ReceiverAck,
    ReceiverAnswer,
    ReceiverApplied,
    ReceiverFailure,
    ReceiverReady,
    ReceiverRefusal,
    SharedSource,
    StreamSource,
    WeightOffer,
    WeightSource,
    WeightTransfer,
)
from rl_core.transports import tokens
from rl_core.transports.curve import KeyRing
from rl_core.transports.rpc import RpcClient
from rl_core.weights import words
from rl_core.weights.assembly import Assembly, places
from rl_core.weights.bucket import DEFAULT_BUCKET_BYTES, Layout
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.fit import misfit, shape_and_dtype
from rl_core.weights.manifest import WeightManifest
from rl_core.weights.relay import Relay
from rl_core.weights.sources import Sources
from rl_core.weights.target import InPlaceTarget, WeightTarget

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

NOTHING = (-1, "")
"""`current()` of a receiver that cannot prove any version."""
AT_ONCE_BYTES = 1 << 22
"""Models of this host up to this size are copied on the event loop: a hand-over to a thread takes as long."""
STOPPED = "replaced by a newer offer, or its time was over"


class ReceiverState(enum.Enum):
    """UNVERSIONED -> READY -> APPLIED -> SERVING -> READY ...; an abandoned sync leads to PAUSED or DIRTY, then READY."""

    UNVERSIONED = "unversioned"
    """Nothing was loaded yet, or the epoch changed."""
    READY = "ready"
    """Offered: paused, waiting for data or loading it."""
    APPLIED = "applied"
    """Loaded and verified, waiting for COMMIT."""
    SERVING = "serving"
    """Committed: the only state in which the engine serves."""
    PAUSED = "paused"
    """A sync was abandoned before it touched memory: the old version is intact, but not served."""
    DIRTY = "dirty"
    """A sync was abandoned or failed after it touched memory: no version is committed."""


class _Superseded(Exception):
    """A newer offer, an abort or a deadline ended the transfer under way."""


class WeightReceiver:
    """Feeds `target` with the versions offered to it. Use it on one event loop; `current` may be read anywhere.

    `device`: where the engine's weights are, "cpu" or "cuda:N"; `device_uuid` of it when it is not the CPU.
    `on_state(state, version, digest)` runs at each change.
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
        device_uuid: str | None = None,
        deadlines: Deadlines | None = None,
        on_state: Callable[[ReceiverState, int, str], None] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """`host`: the address at which other receivers reach this process."""
        self.cfg = RLJobSpec.model_validate(cfg) if isinstance(cfg, Mapping) else cfg
        self.epoch = epoch
        self.state = ReceiverState.UNVERSIONED
        self._identity, self._keys, self._target = identity, keys, target
        self._device = device_uuid or device
        self._deadlines = deadlines or (Deadlines.from_spec(self.cfg) if self.cfg is not None else Deadlines())
        self._on_state = on_state
        self._held: WeightManifest | None = None
        """What is proven to be in the target's memory."""
        self._kept: dict[str, np.ndarray] | None = None
        """The bytes of its tensors without a destination, for patches; None = the publisher sends none."""
        self._committed = False
        self._pending: WeightManifest | None = None
        self._layout: Layout | None = None
        self._stop = threading.Event()
        """Set by whatever ends the transfer under way; the thread that moves the bytes looks before each tensor."""
        self._turn = asyncio.Lock()
        """Guards the engine: a newer OFFER waits until the transfer that it replaced is out of the engine's memory."""
        self._expiry: asyncio.TimerHandle | None = None
        self._paused_at: float | None = None
        self._applied_seconds = 0.0
        self._bucket_bytes = DEFAULT_BUCKET_BYTES
        """By which the version offered last is cut."""
        self._relay = Relay(host, keys)
        self._sources = Sources(keys=keys, device=device, deadlines=self._deadlines)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rljob-weights")
        shapes = [shape_and_dtype(wanted)[0] for wanted in target.names_and_shapes().values()]
        self._kernels = self._thread.submit(words.kernels) if words.worth_compiling(shapes) else None

    def warm_up(self) -> None:
        """Wait until the compiled code, where the model is large enough for it, is loaded, so that the first transfer does not."""
        if self._kernels is not None:
            self._kernels.result()

    def handlers(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        """Return the RPC methods a worker must serve for its publisher."""
        return {
            "weights_offer": self.offer,
            "weights_transfer": self.transfer,
            "weights_commit": self.commit,
            "weights_abort": self.abort,
            "weights_relay": self.relay,
        }

    def current(self) -> tuple[int, str]:
        """Return (version, manifest digest) of the committed weights in memory; (-1, "") when there is no proof of any."""
        held = self._held
        return (held.version, held.digest) if held is not None and self._committed else NOTHING

    def set_epoch(self, epoch: int) -> None:
        """Enter `epoch`: a newer one ends the sync under way and makes the weights unversioned until the next offer."""
        if epoch <= self.epoch:
            return
        self.epoch = epoch
        self.forget()

    def forget(self) -> None:
        """End the sync under way and hold no version until the next offer: the memory is of an older epoch, or gone."""
        self._interrupt()
        self._relay.withdraw()
        self._forget_offer()
        self._held = None
        self._enter(ReceiverState.UNVERSIONED)

    # --- the handshake ---------------------------------------------------------------------------------------------

    async def offer(self, offer: WeightOffer) -> ReceiverAnswer:
        """Answer READY, ACK (this digest is served), APPLIED (it waits for COMMIT) or REFUSE.

        READY means paused: nothing is served any more. With a source in the offer a paused receiver loads at once and
        answers as `transfer`.
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
        if self.state is ReceiverState.SERVING and self.current()[1] == manifest.digest:
            return ReceiverAck(version=manifest.version, digest=manifest.digest)
        self._interrupt()  # a transfer under way is of a replaced offer, or of this one whose publisher starts again
        async with self._turn:
            self._arm(offer.deadline)
            self._pending = manifest
            self._bucket_bytes = offer.bucket_bytes
            self._layout = layout = Layout.of(manifest.entries, offer.bucket_bytes)
            self._kept = (self._kept or {}) if offer.keep else None
            answer = await self._accept(manifest)
            patch = offer.patch
            if isinstance(answer, ReceiverReady) and patch is not None and patch.base == self.current()[1]:
                answer = await self._load(manifest, layout, patch)
            if isinstance(answer, ReceiverReady) and offer.source is not None:
                answer = await self._load(manifest, layout, offer.source)
            return answer

    async def _accept(self, manifest: WeightManifest) -> ReceiverAnswer:
        if self._held is not None and self._held.digest == manifest.digest:
            self._enter(ReceiverState.APPLIED)
            return _applied(manifest, loaded=False)
        self._stop.clear()
        self._sources.ready()
        if self._paused_at is None:
            self._paused_at = time.monotonic()
        self._enter(ReceiverState.READY)
        try:
            await self._target.prepare(self._deadlines.ready_seconds)
        except DeadlineExceeded as error:
            self._abandon(f"the engine did not stop: {error}")
            return ReceiverRefusal(reason=f"requests in flight did not end: {error}")
        return self._ready()

    def _ready(self) -> ReceiverReady:
        return ReceiverReady(have=self.current(), device=self._device, group=self._sources.group)

    def _problem(self, manifest: WeightManifest) -> str:
        known = ((one.epoch, one.version) for one in (self._held, self._pending) if one is not None)
        newest = max(known, default=None)
        if newest is not None and (manifest.epoch, manifest.version) < newest:
            return f"older: offered version {manifest.version}, this receiver is at {newest[1]} of epoch {newest[0]}"
        held = self._held
        same = held is not None and (held.epoch, held.version) == (manifest.epoch, manifest.version)
        if held is not None and self._committed and same and held.digest != manifest.digest:
            return f"version {manifest.version} is held with digest {held.digest}, got {manifest.digest}; raise the version"
        return misfit(manifest, self._target.names_and_shapes())

    async def transfer(self, transfer: WeightTransfer) -> ReceiverAnswer:
        """Load and verify the offered version; answer APPLIED, FAILED, or READY for all of it after a patch that does not hold."""
        async with self._turn:
            manifest, layout = self._pending, self._layout
            if manifest is None or layout is None or manifest.digest != transfer.digest:
                return _failed(f"digest {transfer.digest} is not on offer here; offer it first")
            if self.state is ReceiverState.APPLIED:
                return _applied(manifest, loaded=False)
            return await self._load(manifest, layout, transfer.source)

    async def _load(self, manifest: WeightManifest, layout: Layout, source: WeightSource) -> ReceiverAnswer:
        self._relay.withdraw()
        assembly = Assembly(
            manifest,
            layout,
            destinations=self._destinations(),
            wanted=self._target.names_and_shapes(),
            check=self._go_on,
            kept=self._kept,
            base=self._held if self._committed else None,
        )
        started = time.monotonic()
        patch = source if isinstance(source, PatchSource) else None
        at_once = isinstance(self._target, InPlaceTarget) and isinstance(
            patch.data if patch else source, SharedSource | MessageSource
        )
        if at_once and manifest.total_bytes <= AT_ONCE_BYTES:
            reason = self._feed(assembly, source)
        else:
            reason = await self._feed_in_thread(assembly, source)
        if assembly.bad:
            reason = f"{len(assembly.bad)} tensors do not have the checksum of the manifest"
        if reason and patch is not None and not self._stop.is_set():
            return self._ask_for_all(manifest, reason, assembly)
        if reason or self._stop.is_set():
            self._abandon(reason or STOPPED, touched=assembly.touched)
            aborted = not assembly.bad and self._sources.group_ended(source)
            return ReceiverFailure(names=tuple(assembly.bad), reason=reason or STOPPED, aborted=aborted)
        self._held, self._committed = manifest, False
        self._applied_seconds = time.monotonic() - started
        self._enter(ReceiverState.APPLIED)
        return _applied(manifest, loaded=True, patched=patch is not None)

    def _destinations(self) -> "Mapping[str, torch.Tensor]":
        return self._target.destinations() if isinstance(self._target, InPlaceTarget) else {}

    def _ask_for_all(self, manifest: WeightManifest, reason: str, assembly: Assembly) -> ReceiverReady:
        """Hold no version any more and answer READY: what a patch was written to cannot be told from what it should have been."""
        names = f", first {assembly.bad[0]!r}" if assembly.bad else ""
        logger.warning(
            "the patch to version %s does not hold, all of it is needed: %s%s", manifest.version, reason, names
        )
        self._held = None
        self._enter(ReceiverState.DIRTY)
        self._enter(ReceiverState.READY)
        return self._ready()

    async def _feed_in_thread(self, assembly: Assembly, source: WeightSource) -> str:
        feeding = asyncio.get_running_loop().run_in_executor(self._thread, self._feed, assembly, source)
        try:
            return await asyncio.shield(feeding)
        except asyncio.CancelledError:  # the publisher gave up; the thread must be out of the target's memory first
            self._interrupt()
            await asyncio.wait([feeding])
            self._abandon("the publisher gave the transfer up", touched=assembly.touched)
            raise

    def _feed(self, assembly: Assembly, source: WeightSource) -> str:
        """Move the bytes and return "", or why that failed."""
        try:
            with self._sources.open(source, assembly) as tensors:
                self._target.load(tensors, assembly.manifest.version)
                left = next(tensors, None)
            if left is not None:
                return f"{type(self._target).__name__}.load must take every tensor, it left {left[0]!r}"
        except _Superseded:
            return STOPPED
        except RLJobError as error:
            return f"{type(error).__name__}: {error}"
        except Exception as error:  # the engine's code: whatever it raises, it does not serve this version
            logger.exception("the engine failed to load version %s", assembly.manifest.version)
            return f"{type(error).__name__}: {error}"
        return ""

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise _Superseded

    def _interrupt(self) -> None:
        self._stop.set()
        self._sources.interrupt()

    async def commit(self, version: int, digest: str) -> ReceiverAck | ReceiverRefusal:
        """Serve the applied version and answer ACK; REFUSE when it is not the one applied. Repeating it is harmless.

        It is carried out also when its caller gives it up meanwhile: the engine may serve already, and must not do so unversioned.
        """
        return await asyncio.shield(self._commit(version, digest))

    async def _commit(self, version: int, digest: str) -> ReceiverAck | ReceiverRefusal:
        async with self._turn:
            if self.state is ReceiverState.SERVING and self.current() == (version, digest):
                return self._acknowledge()
            if (
                self.state is not ReceiverState.APPLIED
                or self._held is None
                or (self._held.version, self._held.digest) != (version, digest)
            ):
                return ReceiverRefusal(reason=f"version {version} is not applied here, the state is {self.state.value}")
            await self._target.resume(version, digest)
            if self._held is None:
                return ReceiverRefusal(reason=f"version {version} went with the engine's memory")
            self._committed = True
            self._forget_offer()
            self._enter(ReceiverState.SERVING)
            return self._acknowledge()

    def _acknowledge(self) -> ReceiverAck:
        paused, self._paused_at = self._paused_at, None
        pause = time.monotonic() - paused if paused is not None else 0.0
        version, digest = self.current()
        return ReceiverAck(version=version, digest=digest, pause_seconds=pause, apply_seconds=self._applied_seconds)

    async def abort(self, generation: int) -> None:
        """Leave the process group `generation`, so that a transfer blocked in it ends at once; it will be offered again."""
        self._sources.abort_group(self.epoch, generation, "the publisher ended it: a member was lost")

    async def relay(self, digest: str, encrypted: bool) -> StreamSource | ReceiverRefusal:
        """Return a stream of the version `digest` for another receiver; REFUSE when it is not proven here or cannot be read back."""
        held = self._held
        if held is None or held.digest != digest or self.state not in (ReceiverState.APPLIED, ReceiverState.SERVING):
            return ReceiverRefusal(reason=f"digest {digest} is not proven here, the state is {self.state.value}")
        memory = {**(self._kept or {}), **places(self._destinations())}
        if any(entry.alias_of is None and entry.name not in memory for entry in held.entries):
            return ReceiverRefusal(reason="the engine has tensors that cannot be read back")
        if encrypted and self._keys is None:
            return ReceiverRefusal(reason="a secret stream needs CURVE keys, there are none here")
        return self._relay.stream(held, Layout.of(held.entries, self._bucket_bytes), memory, encrypted=encrypted)

    # --- late joiners ----------------------------------------------------------------------------------------------

    async def pull(self, address: str, *, timeout: float | None = None) -> tuple[int, str]:
        """Fetch, verify and serve the committed version of the publisher at `address`; return (version, digest).

        One damaged transfer is repeated. Raises InfrastructureError when it cannot be had (the second failure included),
        EpochFenced when the publisher is of an older epoch, DeadlineExceeded and WorkerLost as RPC does.
        """
        client = RpcClient(address, self._keys, self._identity, service="actor" if self._keys is not None else None)
        client.set_epoch(self.epoch)
        try:
            answer: ReceiverAnswer | None = None
            for again in (False, True):
                answer = await self._pull_once(client, timeout, direct=again)
                if isinstance(answer, ReceiverAck):
                    return self.current()
                if isinstance(answer, ReceiverRefusal):
                    break
            raise InfrastructureError(f"weights could not be pulled from {address}: {answer}")
        finally:
            client.close()

    async def _pull_once(self, client: RpcClient, timeout: float | None, *, direct: bool) -> ReceiverAnswer:
        request = PullRequest(host_token=tokens.host_token(), direct=direct)
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

    def _arm(self, seconds: float) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        """The publisher is silent for longer than any sync takes: it is dead, or it dropped this receiver."""
        self._expiry = None
        self._interrupt()
        if not self._turn.locked():  # else whoever holds the turn meets the stop and abandons the sync
            self._abandon("no COMMIT came", touched=False)

    def _abandon(self, reason: str, *, touched: bool = False) -> None:
        logger.warning("weight sync abandoned, not serving: %s", reason)
        if touched:
            self._held = None
        applied = self._held is not None and not self._committed
        self._forget_offer()
        if touched or applied:
            self._enter(ReceiverState.DIRTY)
        else:
            self._enter(ReceiverState.PAUSED if self._held is not None else ReceiverState.UNVERSIONED)

    def _forget_offer(self) -> None:
        self._pending = self._layout = None
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _enter(self, state: ReceiverState) -> None:
        if state is not self.state:
            self.state = state
            if self._on_state is not None:
                self._on_state(state, *self.current())

    async def close(self) -> None:
        """Stop the transfer under way and free groups, streams and the thread."""
        self._interrupt()
        self._forget_offer()
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        self._sources.close()
        self._relay.close()


def _applied(manifest: WeightManifest, *, loaded: bool, patched: bool = False) -> ReceiverApplied:
    """`loaded`: whether bytes had to move for it; `patched`: those of a patch."""
    return ReceiverApplied(version=manifest.version, digest=manifest.digest, loaded=loaded, patched=patched)


def _failed(reason: str) -> ReceiverFailure:
    return ReceiverFailure(names=(), reason=reason)
