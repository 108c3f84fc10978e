"""The use of kopf: it runs the watches and passes each event to the cache and the queue.

Only `on.event` handlers are registered, and all are coroutines. With none of kopf's create, update, delete, field, timer, daemon or
index handlers the watched objects carry no annotation and no finalizer of kopf's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from rljob_operator.kinds import RLJOB, Kind
from rljob_operator.naming import LABEL_JOB
from rljob_operator.runtime.cache import Cache, JobKey

IDENTITY: Any = "rljob-operator"
"""Identity for kopf, which has no peers here. Without it kopf looks up the name of its user, and a pod's user id may have none."""
logger = logging.getLogger(__name__)

WATCH_SECONDS = 600
PAGE = 500
BURST_SECONDS = 0.1
"""Seconds by which the reconcile after a change of a pod is delayed, because such changes come in bursts: one reconcile handles all."""


class Watches:
    """Handles the watch events of kopf and counts them for the metrics."""

    def __init__(
        self,
        *,
        cache: Cache,
        enqueue: Callable[[JobKey, float], None],
        suspect: Callable[[Kind], None],
        count: Callable[..., None] = lambda plural, anew: None,
    ) -> None:
        self._cache = cache
        self._enqueue = enqueue
        self._suspect = suspect
        self._count = count
        self._listing: set[Kind] = set()

    def take(self, kind: Kind, type_: str | None, obj: dict[str, Any]) -> None:
        """Put the object of a watch event into the cache, and enqueue its job if the cache has changed."""
        self._count(kind.plural, anew=type_ is None and kind not in self._listing)
        if type_ is None:
            self._listing.add(kind)
            self._suspect(kind)
        else:
            self._listing.discard(kind)
        key = self._cache.drop(kind, obj) if type_ == "DELETED" else self._cache.put(kind, obj)
        if key is not None:
            self._enqueue(key, 0.0 if kind == RLJOB or type_ == "DELETED" else BURST_SECONDS)


class NoDiffs(kopf.DiffBaseStorage):  # type: ignore[misc]
    """Turns off kopf's diffs. Otherwise kopf would copy each object to compute differences that no handler uses."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        """Return an empty essence, without the deep copy of the object."""
        return {}

    def fetch(self, *, body: Any) -> None:
        """Return None: nothing is stored."""
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        """Store nothing: a stored essence would be an annotation."""


def registry(watches: Watches, *, kinds: Sequence[Kind], configuration: Callable[[], Any]) -> kopf.OperatorRegistry:
    """Return a registry with the login handler and one event handler per kind."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)  # type: ignore[untyped-decorator]
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return connection(await configuration())

    for kind in kinds:
        _register(handlers, watches, kind)
    return handlers


def _register(handlers: kopf.OperatorRegistry, watches: Watches, kind: Kind) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, registry=handlers, id=kind.plural)  # type: ignore[untyped-decorator]
    async def take(event: Any, **_: Any) -> None:
        watches.take(kind, event["type"], event["object"])


def connection(configuration: Configuration) -> kopf.ConnectionInfo:
    """Return kopf's credentials from the client's configuration, so that both speak as the same user.

    They carry no expiration: when a token has been renewed on disk, the old one's 401 makes kopf log in again.
    """
    token = configuration.api_key.get("BearerToken", "")
    scheme, _, credentials = token.partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme="Bearer" if token else None,
        token=(credentials or scheme) if token else None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )


def settings(*, kinds: Sequence[Kind], initial_streaming: bool) -> kopf.OperatorSettings:
    """Return kopf's settings: only watches, short deadlines, no writing of any kind."""
    result = kopf.OperatorSettings()
    result.peering.standalone = True
    result.posting.enabled = False
    result.scanning.disabled = True
    result.networking.request_timeout = 30.0
    result.networking.connect_timeout = 10.0
    result.watching.connect_timeout = 10.0
    result.watching.server_timeout = WATCH_SECONDS
    result.watching.inactivity_timeout = 70.0
    result.watching.chunk_size = PAGE
    result.watching.initial_streaming = initial_streaming
    result.queueing.idle_timeout = 0.5  # Workers per object hold memory; with this timeout they end soon after a burst.
    result.queueing.exit_timeout = 1.0
    # With a timeout, kopf would send SIGKILL to the process. The grace period of the pod is the bound.
    result.process.ultimate_exiting_timeout = None
    result.persistence.diffbase_storage = NoDiffs()
    for kind in kinds:
        if kind != RLJOB:
            result.watching.label_selectors[kind.group, kind.version, kind.plural] = LABEL_JOB
    return result


async def watch(
    handlers: kopf.OperatorRegistry,
    *,
    kinds: Sequence[Kind],
    namespaces: Sequence[str],
    initial_streaming: bool,
    ready: asyncio.Event,
) -> None:
    """Run kopf's watches until cancelled; sets `ready` once they may begin, and raises what ends them otherwise.

    `kopf.operator` is not used, because at its end it cancels every task of the loop that it did not find at its start, ours included.
    """
    tasks = await kopf.spawn_tasks(
        registry=handlers,
        settings=settings(kinds=kinds, initial_streaming=initial_streaming),
        clusterwide=not namespaces,
        namespaces=list(namespaces),
        standalone=True,
        identity=IDENTITY,
        ready_flag=ready,
    )
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
