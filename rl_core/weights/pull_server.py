"""Serves the committed version to late joiners: receivers that start or reconnect between two publishes.

A joiner gets a ticket, and the copy is held until the joiner returns the ticket or its time is over. While a version is being published
there is nothing to pull, because the memory of the previous one is being overwritten; joiners wait for the commit. All methods run
on the publisher's event loop, except `withdraw`, which the publishing thread calls.
"""

import asyncio
import contextlib
import secrets
import threading

from rl_core.messages.weights import PullOffer, PullRefusal, PullRequest, WeightSource
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.fanout import RelayPool
from rl_core.weights.host_copy import HostCopies, HostCopy
from rl_core.weights.source_factory import SourceFactory, make_offer


class PullServer:
    """Handles `weights_pull` and `weights_pulled`. `withdraw`, `commit` and `settle` report the progress of a publish."""

    def __init__(
        self, copies: HostCopies, source_factory: SourceFactory, deadlines: Deadlines, relays: RelayPool | None = None
    ) -> None:
        """`relays`: receivers that may stream the version to joiners on other hosts."""
        self._copies, self._source_factory, self._deadlines, self._relays = copies, source_factory, deadlines, relays
        self._committed: HostCopy | None = None
        self._lock = threading.Lock()
        """Guards `_committed`: a pull must not start to hold a copy that the publishing thread is releasing."""
        self._settled = asyncio.Event()
        """Set while no publish is under way."""
        self._settled.set()
        self._pulls: dict[str, tuple[HostCopy, asyncio.TimerHandle]] = {}

    @property
    def committed(self) -> HostCopy | None:
        """Return the copy that joiners get; None before the first commit and while a version is being published."""
        return self._committed

    def withdraw(self) -> None:
        """Release the committed copy because a new version is about to be written. Joiners that still read it keep it. Callable from any thread."""
        self._settled.clear()
        with self._lock:
            previous, self._committed = self._committed, None
            if previous is not None:
                self._copies.drop(previous, self)

    def commit(self, copy: HostCopy) -> None:
        """Serve `copy` to joiners from now on."""
        self._copies.hold(copy, self)
        self._committed = copy
        self._settled.set()

    def settle(self) -> None:
        """Let `pull` go on for the joiners that wait. Must be called when a publish has ended, with or without a commit."""
        self._settled.set()

    async def pull(self, request: PullRequest) -> PullOffer | PullRefusal:
        """Return a source of the committed version, or refuse if there is none within the deadline."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), self._deadlines.pull_seconds)
        ticket = secrets.token_hex(16)
        with self._lock:
            copy = self._committed
            if copy is not None:
                self._copies.hold(copy, ticket)
        if copy is None:
            return PullRefusal(reason="no version is committed yet")
        manifest = copy.manifest
        expiry = asyncio.get_running_loop().call_later(
            self._deadlines.total(manifest.total_bytes), self._release, ticket
        )
        self._pulls[ticket] = (copy, expiry)
        source: WeightSource | None = None
        has_base = copy.patch is not None and copy.patch.base == request.base
        if (
            self._relays is not None
            and not has_base
            and not request.direct
            and not self._source_factory.maps(copy, request.host_token)
        ):
            source = await self._relays.for_joiner(manifest.digest)
        if source is None:
            source = self._source_factory.source(copy, request.host_token, request.base)
        offer = make_offer(copy, source, self._deadlines)
        return PullOffer(ticket=ticket, version=manifest.version, epoch=manifest.epoch, offer=offer)

    async def pulled(self, ticket: str) -> bool:
        """End a pull so that the memory can be reused. Returns False if the ticket is unknown or expired."""
        return self._release(ticket)

    def _release(self, ticket: str) -> bool:
        entry = self._pulls.pop(ticket, None)
        if entry is None:
            return False
        copy, expiry = entry
        expiry.cancel()
        self._copies.drop(copy, ticket)
        return True
