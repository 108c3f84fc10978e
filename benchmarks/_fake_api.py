"""An API server in memory over HTTP, for one question: what does the operator hold, and ask, when nothing happens?

It lists by pages, holds watches open and silent, keeps the operator's Lease and its master key, and counts every request by verb and
resource. Everything else is answered with 404, and counted.
"""

import asyncio
import base64
import collections
import json
from collections.abc import Iterable

from aiohttp import web

from rljob_operator import kinds
from rljob_operator.runtime import master_key

MASTER = bytes(range(32))
KINDS = {kind.path(None): kind for kind in kinds.WATCHED}
PLURALS = {kind.plural for kind in kinds.WATCHED} | {"secrets", "events"}
GROUPS = {kind.api_version for kind in KINDS.values()}


class FakeApi:
    """Serves `objects` on a port of this machine; `asked` counts requests by (verb, resource)."""

    def __init__(self, objects: Iterable[dict]) -> None:
        self.asked: collections.Counter[tuple[str, str]] = collections.Counter()
        self._by_path: dict[str, list[bytes]] = {path: [] for path in KINDS}
        paths = {(kind.api_version, kind.kind): path for path, kind in KINDS.items()}
        for obj in objects:
            self._by_path[paths[obj["apiVersion"], obj["kind"]]].append(json.dumps(obj).encode())
        self._lease: dict | None = None
        self.port = 0

    async def __aenter__(self) -> "FakeApi":
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path == "/version":
            return web.json_response({"major": "1", "minor": "33", "gitVersion": "v1.33.0"})
        if path.removeprefix("/api/").removeprefix("/apis/") in GROUPS:
            return web.json_response(_discovery(path.removeprefix("/api/").removeprefix("/apis/")))
        if path == "/api":
            return web.json_response({"kind": "APIVersions", "versions": ["v1"]})
        if path == "/apis":
            return web.json_response({"kind": "APIGroupList", "groups": [_group(one) for one in GROUPS if "/" in one]})
        if "/leases" in path:
            return await self._leases(request)
        if path.endswith(f"/secrets/{master_key.NAME}"):
            data = {master_key.FIELD: base64.b64encode(MASTER).decode()}
            return web.json_response({"kind": "Secret", "metadata": {"name": master_key.NAME}, "data": data})
        if path in KINDS and request.method == "GET":
            return await (self._watch if "watch" in request.query else self._list)(request, path)
        plural = next((part for part in path.split("/") if part in PLURALS), path)
        self.asked[request.method, plural] += 1
        if path.endswith("/secrets"):
            return _status(409, "AlreadyExists")
        return _status(404, "NotFound")

    async def _list(self, request: web.Request, path: str) -> web.Response:
        self.asked["LIST", KINDS[path].plural] += 1
        begin, limit = int(request.query.get("continue", 0)), int(request.query.get("limit", 10**9))
        items = self._by_path[path][begin : begin + limit]
        more = str(begin + limit) if begin + limit < len(self._by_path[path]) else ""
        head = {"apiVersion": KINDS[path].api_version, "kind": f"{KINDS[path].kind}List"}
        text = json.dumps(head | {"metadata": {"resourceVersion": "1", "continue": more}})[:-1].encode()
        return web.Response(body=text + b', "items": [' + b",".join(items) + b"]}", content_type="application/json")

    async def _watch(self, request: web.Request, path: str) -> web.StreamResponse:
        self.asked["WATCH", KINDS[path].plural] += 1
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while True:
            bookmark = {
                "kind": KINDS[path].kind,
                "apiVersion": KINDS[path].api_version,
                "metadata": {"resourceVersion": "1"},
            }
            await response.write(json.dumps({"type": "BOOKMARK", "object": bookmark}).encode() + b"\n")
            await asyncio.sleep(20)

    async def _leases(self, request: web.Request) -> web.Response:
        self.asked[request.method, "leases"] += 1
        if request.method == "GET" and self._lease is None:
            return _status(404, "NotFound")
        if request.method != "GET":
            self._lease = await request.json()
            self._lease["metadata"] |= {"resourceVersion": str(sum(self.asked.values())), "uid": "lease"}
        return web.json_response(self._lease)


def _group(api_version: str) -> dict:
    name, _, version = api_version.partition("/")
    served = {"groupVersion": api_version, "version": version}
    return {"name": name, "versions": [served], "preferredVersion": served}


def _discovery(api_version: str) -> dict:
    found = [kind for kind in KINDS.values() if kind.api_version == api_version]
    verbs = ["get", "list", "watch", "create", "patch", "delete"]
    resources = [
        {"name": kind.plural, "singularName": "", "namespaced": True, "kind": kind.kind, "verbs": verbs}
        for kind in found
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version, "resources": resources}


def _status(code: int, reason: str) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": reason,
        "reason": reason,
        "code": code,
    }
    return web.json_response(body, status=code)
