"""Late joiners: receivers that ask the publisher for the committed version, at any time, training or not.

A joiner gets a ticket and the copy is held for it until it returns the ticket or its time is over. While a version is being
published there is none to give: the older one is of no use on policy, and its memory is being written. Joiners wait for the
commit. All of this is on the publisher's event loop, but for `withdraw`, which the publishing thread calls.
"""

import asyncio
import contextlib
import secrets
import threading

from rl_core.messages.weights import PullOffer, PullRefusal, PullRequest, WeightSource
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.fanout import Relays
from rl_core.weights.host_copy import HostCopies, HostCopy
from rl_core.weights.outlets import Outlets, offer_of


class LateJoiners:
    """Answers `weights_pull` and `weights_pulled`; `withdraw`, `commit` and `settle` say how a publish goes."""

    def __init__(
        self, copies: HostCopies, outlets: Outlets, deadlines: Deadlines, relays: Relays | None = None
    ) -> None:
        """`relays`: receivers that may give the version to joiners of other hosts."""
        self._copies, self._outlets, self._deadlines, self._relays = copies, outlets, deadlines, relays
        self._committed: HostCopy | None = None
        self._lock = threading.Lock()
        """Guards `_committed`: a pull must not begin to hold a copy that the publishing thread is giving up."""
        self._settled = asyncio.Event()
        """Set while no publish is under way."""
        self._settled.set()
        self._pulls: dict[str, tuple[HostCopy, asyncio.TimerHandle]] = {}

    @property
    def committed(self) -> HostCopy | None:
        """Return the copy that joiners get; None before the first commit and while a version is being published."""
        return self._committed

    def withdraw(self) -> None:
        """Give the committed copy up: a new version is about to be written. Joiners that read it still hold it. From any thread."""
        self._settled.clear()
        with self._lock:
            old, self._committed = self._committed, None
            if old is not None:
                self._copies.drop(old, self)

    def commit(self, copy: HostCopy) -> None:
        """Give `copy` to joiners from now on."""
        self._copies.hold(copy, self)
        self._committed = copy
        self._settled.set()

    def settle(self) -> None:
        """Let joiners wait no longer: the publish has ended, committed or not."""
        self._settled.set()

    async def pull(self, request: PullRequest) -> PullOffer | PullRefusal:
        """Answer with a source of the committed version, or refuse when there is none in time."""
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
        if self._relays is not None and not request.direct and not self._outlets.maps(copy, request.host_token):
            source = await self._relays.for_joiner(manifest.digest)
        if source is None:
            source = self._outlets.source(copy, request.host_token)
        offer = offer_of(copy, source, self._deadlines)
        return PullOffer(ticket=ticket, version=manifest.version, epoch=manifest.epoch, offer=offer)

    async def pulled(self, ticket: str) -> bool:
        """End a pull: its copy may be used again. False when the ticket is not known any more."""
        return self._release(ticket)

    def _release(self, ticket: str) -> bool:
        entry = self._pulls.pop(ticket, None)
        if entry is None:
            return False
        copy, expiry = entry
        expiry.cancel()
        self._copies.drop(copy, ticket)
        return True
