"""A runner that does as told: serves /status and takes control calls at an actor's address."""

import base64
import json
from typing import Any

from aiohttp import web

from rl_core.plan.keys import TOKEN_FILE
from rl_core.plan.signatures import Guard, Peer, ReceivedCall
from rljob_operator import kinds
from rljob_operator.runtime.progress import CONTROL_PORT
from tests.cluster.operator_rig.jobs import Jobs


class FakeRunner:
    """One job's runner; `status` is what it answers, `calls` what it was told. It takes signed calls under `status["epoch"]` only."""

    def __init__(self, jobs: Jobs, *, address: str, **status: Any) -> None:
        self._jobs, self._address = jobs, address
        self._guards: dict[tuple[str, int], Guard] = {}
        self.status: dict[str, Any] = {
            "phase": "Running",
            "epoch": 1,
            "step": 0,
            "policyVersion": 0,
            "members": [],
            **status,
        }
        self.calls: list[tuple[str, Any]] = []
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
        return await self._answer(request, self.status)

    async def _call(self, request: web.Request) -> web.Response:
        return await self._answer(request, {})

    async def _answer(self, request: web.Request, value: Any) -> web.Response:
        headers, given = {name.lower(): value for name, value in request.headers.items()}, await request.read()
        call = ReceivedCall.read(request.method, request.path, headers)
        guard = await self._guard(call.uid)
        refusal = guard.check(call)
        if refusal is None and call.matches_body(given) and request.method != "GET":
            self.calls.append((f"{request.method} {request.path}", json.loads(given or b"null")))
        body = json.dumps(value if refusal is None else {"error": refusal.message}).encode()
        status = 200 if refusal is None else refusal.status.value
        signed = guard.sign_answer(call, status, body)
        return web.Response(status=status, body=body, headers=signed)

    async def _guard(self, uid: str) -> Guard:
        """Return the guard that has the token of the job's Secret, as its runner does."""
        epoch = self.status["epoch"]
        if (uid, epoch) not in self._guards:
            secrets = await self._jobs.list(kinds.SECRET)
            owned = [o for o in secrets if [r["uid"] for r in o["metadata"].get("ownerReferences", [])] == [uid]]
            token = base64.b64decode(owned[0]["data"][TOKEN_FILE]).decode()
            self._guards[uid, epoch] = Guard(Peer(token=token, uid=uid, epoch=epoch))
        return self._guards[uid, epoch]
