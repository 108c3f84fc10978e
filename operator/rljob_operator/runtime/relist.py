"""Lists every watched kind: at start, at an interval of minutes, and shortly after a watch of kopf has restarted.

kopf does not report that its watch had a gap, nor deletions during the gap; the only sign are the events of type None that follow. Each
kind is therefore also listed here, page by page, and objects that a list does not contain are removed from the cache.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from rljob_operator.errors import ApiError, Expired, Forbidden, NotFound
from rljob_operator.kinds import RLJOB, WATCHED, Kind
from rljob_operator.naming import LABEL_JOB
from rljob_operator.runtime.cache import Cache, JobKey
from rljob_operator.runtime.cluster import Cluster

logger = logging.getLogger(__name__)

QUIET_SECONDS = 2.0
"""Seconds without events of type None after which a suspected kind is listed. They arrive in a burst."""
ATTEMPTS = 3
FAILED_PAUSE = 5.0


class Relister:
    """Lists kinds into the cache and enqueues the jobs that changed by it."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        cache: Cache,
        enqueue: Callable[[JobKey], None],
        namespaces: Sequence[str] = (),
        interval: float = 300.0,
        kinds: Sequence[Kind] = WATCHED,
        alternatives: Sequence[Kind] = (),
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._enqueue = enqueue
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._interval = interval
        self._kinds = tuple(kinds)
        self._alternatives = alternatives
        """Alternatives: the first kind that is served and that the operator may list is used, if there is one."""
        self._suspected: dict[Kind, float] = {}
        """Kinds whose watch has restarted, with the time of the newest event that indicates it."""
        self._wake = asyncio.Event()
        self.filled = asyncio.Event()
        """Set when every kind has been listed once."""
        self.served: tuple[Kind, ...] = ()
        """The kinds in use, as the first lists found them served."""

    def suspect(self, kind: Kind) -> None:
        """Record that the watch of a kind has restarted, so that deleted objects may still be in the cache."""
        self._suspected[kind] = asyncio.get_running_loop().time()
        self._wake.set()

    async def fill(self) -> None:
        """List every kind once. Raises NotFound if the RLJob resource is not served, ApiError if the API server does not answer."""
        served = [kind for kind in self._kinds if await self.list(kind)]
        for kind in self._alternatives:
            if await self.list(kind):
                served.append(kind)
                break
        self._kinds = self.served = tuple(served)
        self.filled.set()

    async def run(self) -> None:
        """List suspected kinds after their burst of events, and every kind once per interval, until cancelled."""
        loop = asyncio.get_running_loop()
        next_lists = {kind: loop.time() + self._interval * random.uniform(0.5, 1.0) for kind in self._kinds}
        while True:
            await self._sleep_until(min(next_lists.values()))
            now = loop.time()
            for kind, suspected_at in list(self._suspected.items()):
                if now - suspected_at >= QUIET_SECONDS:
                    del self._suspected[kind]
                    next_lists[kind] = now
            for kind in [kind for kind in self._kinds if next_lists[kind] <= now]:
                next_lists[kind] = loop.time() + (self._interval if await self._try(kind) else FAILED_PAUSE)

    async def list(self, kind: Kind) -> bool:
        """List one kind in every watched namespace and remove deleted objects from the cache; return False if the kind is not available.

        A namespace in which listing is forbidden, for example because it was deleted together with the operator's rights, is left out as
        long as another one can be listed.
        """
        refused: dict[str | None, Forbidden | NotFound] = {}
        for namespace in self._namespaces:
            try:
                await self._list_patiently(kind, namespace)
            except (Forbidden, NotFound) as error:
                refused[namespace] = error
        if len(refused) < len(self._namespaces):
            for namespace, refusal in refused.items():
                logger.warning("%s of namespace %s are left out: %s", kind.plural, namespace, refusal)
            return True
        first_error = next(iter(refused.values()))
        if isinstance(first_error, NotFound) and kind != RLJOB:
            return False
        if isinstance(first_error, Forbidden) and kind in self._alternatives:
            logger.warning("%s.%s are not used, for want of rights: %s", kind.plural, kind.group, first_error)
            return False
        raise first_error

    async def _list_patiently(self, kind: Kind, namespace: str | None) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._list(kind, namespace)
            except Expired:  # The snapshot of the pages has expired meanwhile.
                if attempt == ATTEMPTS:
                    raise

    async def _list(self, kind: Kind, namespace: str | None) -> None:
        read_at = self._cache.now()
        alive: set[str] = set()
        async for page in self._cluster.list(kind, namespace, selector="" if kind == RLJOB else LABEL_JOB):
            for obj in page:
                alive.add(obj["metadata"]["uid"])
                if (key := self._cache.put(kind, obj, read_at=read_at)) is not None:
                    self._enqueue(key)
            await asyncio.sleep(0)  # A page has hundreds of objects; other tasks of the event loop run in between.
        keys_of_lost = self._cache.sweep(
            kind, alive=alive, began=read_at, within=lambda key: namespace is None or key.namespace == namespace
        )
        for key in keys_of_lost:
            self._enqueue(key)
        if keys_of_lost:
            logger.info("listing %s found objects gone without an event, of %d jobs", kind.plural, len(keys_of_lost))

    async def _try(self, kind: Kind) -> bool:
        try:
            await self.list(kind)
        except ApiError as error:
            logger.warning("listing %s failed, again in %.0f s: %s", kind.plural, FAILED_PAUSE, error)
            return False
        return True

    async def _sleep_until(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        quiet = [suspected_at + QUIET_SECONDS for suspected_at in self._suspected.values()]
        self._wake.clear()
        try:
            async with asyncio.timeout_at(min([deadline, *quiet])):
                await self._wake.wait()
        except TimeoutError:
            return
        # Suspicions come in bursts, which are answered by one listing.
        await asyncio.sleep(min(0.05, max(deadline - loop.time(), 0.0)))
