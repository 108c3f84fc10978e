"""The client of the Kubernetes API, a thin port over `kubernetes.aio`. All requests for objects go through it but the watches of kopf.

Objects are plain dictionaries, because the generated models of the client cost more to build than the calls themselves. This module adds
a short timeout for each call, support for `Retry-After`, a bounded number of retries of transient failures, and exceptions by meaning
instead of by status code. The rest of the operator depends on the protocol `Cluster`; tests replace it with fakes or fault injectors.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio import client

from rljob_operator.errors import TooManyRequests, Unavailable, error_of
from rljob_operator.kinds import Kind
from rljob_operator.naming import FIELD_MANAGER
from rljob_operator.runtime.backoff import Backoff

logger = logging.getLogger(__name__)

Json = dict[str, Any]

TIMEOUT = aiohttp.ClientTimeout(total=30.0, sock_connect=10.0)
ATTEMPTS = 5
"""Attempts of one call in all, while its failures are transient."""
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 10.0
PAGE = 500

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"

Observer = Callable[[str, str, str, float], None]
"""Called with (verb, plural, status code or error, seconds) of every request."""


class Cluster(Protocol):
    """The calls to the API server that the operator needs; implemented by `ApiCluster` and by fault injectors in tests."""

    async def read(self, kind: Kind, namespace: str, name: str) -> Json:
        """Return one object; raises NotFound."""

    async def list(self, kind: Kind, namespace: str | None, *, selector: str = "") -> AsyncIterator[list[Json]]:
        """Yield the objects of a kind page by page; raises NotFound when the kind is not served."""
        yield []

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Json:
        """Create an object and return it; raises AlreadyExists, Forbidden, Invalid."""

    async def apply(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> Json:
        """Apply an object server-side with our field manager, forcing conflicts, and return it."""

    async def patch(
        self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any], *, subresource: str | None = None
    ) -> Json:
        """Merge-patch an object or its subresource and return the object.

        Raises Conflict when the body has a metadata.resourceVersion that is not the current one.
        """

    async def replace(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> Json:
        """Update an object and return it; raises Conflict when its resourceVersion is not the current one."""

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> Json:
        """Delete the object with this uid; raises NotFound when it does not exist and Conflict when the name has another uid."""


class ApiCluster:
    """`Cluster` over one `kubernetes.aio` client."""

    def __init__(
        self,
        api: client.ApiClient,
        *,
        observe: Observer | None = None,  # None = no metrics
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._observe = observe
        self._sleep = sleep

    async def read(self, kind: Kind, namespace: str, name: str) -> Json:
        """See Cluster."""
        return await self._call("GET", kind, kind.path(namespace, name))

    async def list(self, kind: Kind, namespace: str | None, *, selector: str = "") -> AsyncIterator[list[Json]]:
        """See Cluster. Raises Expired (410) when the snapshot of the list is gone; the caller starts the list again."""
        continue_token = ""
        while True:
            query = {"limit": str(PAGE)} | ({"labelSelector": selector} if selector else {})
            page = await self._call(
                "GET",
                kind,
                kind.path(namespace),
                query=query | ({"continue": continue_token} if continue_token else {}),
            )
            items: list[Json] = page["items"]
            for item in items:  # The items of a list have neither apiVersion nor kind.
                item.setdefault("apiVersion", kind.api_version)
                item.setdefault("kind", kind.kind)
            yield items
            continue_token = page["metadata"].get("continue", "")
            if not continue_token:
                return

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Json:
        """See Cluster. A create that timed out is repeated. It may have succeeded, so callers read the object on AlreadyExists."""
        return await self._call("POST", kind, kind.path(namespace), query={"fieldManager": FIELD_MANAGER}, body=body)

    async def apply(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> Json:
        """See Cluster."""
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self._call("PATCH", kind, kind.path(namespace, name), query=query, body=body, content=APPLY)

    async def patch(
        self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any], *, subresource: str | None = None
    ) -> Json:
        """See Cluster."""
        path = kind.path(namespace, name, subresource)
        return await self._call("PATCH", kind, path, query={"fieldManager": FIELD_MANAGER}, body=body, content=MERGE)

    async def replace(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> Json:
        """See Cluster."""
        return await self._call(
            "PUT", kind, kind.path(namespace, name), query={"fieldManager": FIELD_MANAGER}, body=body
        )

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> Json:
        """See Cluster."""
        body: Json = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        return await self._call("DELETE", kind, kind.path(namespace, name), body=body)

    async def _call(
        self,
        method: str,
        kind: Kind,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content: str = "application/json",
    ) -> Json:
        """Send one call and return the decoded answer. Transient failures are retried."""
        url = self._api.configuration.host + quote(path) + ("?" + urlencode(query) if query else "")
        backoff = Backoff(first=FIRST_PAUSE, longest=LONGEST_PAUSE, jitter=lambda: random.uniform(0.5, 1.0))
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._send(method, kind, url, body, content)
            except (Unavailable, TooManyRequests) as error:
                if attempt == ATTEMPTS:
                    raise
                pause = backoff.step(asyncio.get_running_loop().time(), at_least=error.retry_after or 0.0)
                logger.debug("%s %s failed (%s); retrying in %.2f s", method, path, error, pause)
                await self._sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    async def _send(self, method: str, kind: Kind, url: str, body: Mapping[str, Any] | None, content: str) -> Json:
        loop = asyncio.get_running_loop()
        start = loop.time()
        code = "error"
        try:
            headers = {"Accept": "application/json", "Content-Type": content}
            await self._api.update_params_for_auth(headers, [], ["BearerToken"], url, method, body)
            response = await self._api.call_api(method, url, headers, body=body, _request_timeout=TIMEOUT)
            text = await response.read()
            code = str(response.status)
            if response.status >= 400:
                raise error_of(response.status, text, retry_after=response.headers.get("Retry-After"))
            return json.loads(text)  # type: ignore[no-any-return]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"{method} {url}: {error!r}") from error
        finally:
            if self._observe is not None:
                self._observe(method, kind.plural, code, loop.time() - start)
