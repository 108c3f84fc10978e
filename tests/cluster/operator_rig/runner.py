"""A runner that does as told: serves /status and takes control calls at an actor's address."""

import json
from typing import Any

from aiohttp import web

from rl_core.plan import keys
from rljob_operator.runtime.progress import CONTROL_PORT


class FakeRunner:
    """One job's runner; `status` is what it answers, `calls` what it was told."""

    def __init__(self, *, address: str, **status: Any) -> None:
        self._address = address
        self.status: dict[str, Any] = {
            "phase": "Running",
            "epoch": 1,
            "step": 0,
            "policyVersion": 0,
            "members": [],
            **status,
        }
        self.calls: list[tuple[str, Any]] = []
        self.tokens: set[str] = set()
        self.polls = 0
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> "FakeRunner":
        app = web.Application()
        app.router.add_get("/status", self._status)
        app.router.add_route("*", "/{path}", self._call)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._address, CONTROL_PORT).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def told(self, path: str) -> list[Any]:
        """Return the bodies of the calls of a path."""
        return [body for called, body in self.calls if called == path]

    async def _status(self, request: web.Request) -> web.Response:
        self.polls += 1
        self.tokens.add(request.headers.get("Authorization", ""))
        return web.json_response(self.status)

    async def _call(self, request: web.Request) -> web.Response:
        self.calls.append((f"{request.method} {request.path}", json.loads(await request.text() or "null")))
        return web.json_response({})


def token_of(master: bytes, uid: str) -> str:
    """Return the header by which the operator shows that it may ask."""
    return f"Bearer {keys.control_token(master, uid)}"
