"""Answers every operator's poll as a healthy run at step 1 does, on all of the machine's addresses."""

from aiohttp import web

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


async def status(_request: web.Request) -> web.Response:
    return web.json_response(STATUS)


if __name__ == "__main__":
    app = web.Application()
    app.router.add_get("/status", status)
    app.router.add_route("*", "/{call}", status)
    web.run_app(app, host="0.0.0.0", port=PORT, print=None, access_log=None)
