"""Answers every operator's poll as a healthy run at step 1 does, on all of the machine's addresses.

    _fake_runner.py FILE

FILE holds the operator's master key, as soon as there is one: answers are signed with each job's token.
"""

import functools
import json
import sys
from pathlib import Path

from aiohttp import web

from rl_core.plan import keys
from rl_core.plan.signatures import Guard, Peer, ReceivedCall

PORT = 7702
STATUS = {
    "schema": 1,
    "phase": "Generating",
    "epoch": 1,
    "step": 1,
    "totalSteps": 1000,
    "policyVersion": 1,
    "reward": 0.5,
    "metrics": {},
    "checkpoint": {},
    "failures": {},
    "failure": None,
    "appliedGeneration": 1,
    "suspended": False,
    "streaks": {},
    "roles": [],
    "members": [],
    "waits": [],
    "missing": [],
    "stall": None,
}


@functools.cache
def guard(uid: str) -> Guard:
    """The guard of one job's runner."""
    return Guard(Peer(token=keys.control_token(Path(sys.argv[1]).read_bytes(), uid), uid=uid, epoch=STATUS["epoch"]))


async def status(request: web.Request) -> web.Response:
    headers, body = {name.lower(): value for name, value in request.headers.items()}, json.dumps(STATUS).encode()
    call = ReceivedCall.read(request.method, request.path, headers)
    signed = guard(call.uid).sign_answer(call, 200, body)
    return web.Response(body=body, content_type="application/json", headers=signed)


if __name__ == "__main__":
    app = web.Application()
    app.router.add_get("/status", status)
    app.router.add_route("*", "/{call}", status)
    web.run_app(app, host="0.0.0.0", port=PORT, print=None, access_log=None)
