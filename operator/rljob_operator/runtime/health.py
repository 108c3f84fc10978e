"""The operator's HTTP server for /metrics, /healthz and /readyz.

It runs on the event loop that also reconciles: a blocked loop does not answer, and a slow one makes /healthz fail. Only the text of /metrics
is made in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from rljob_operator.runtime.metrics import Metrics

LAG_LIMIT = 10.0
"""Delay of the event loop, in seconds, above which /healthz answers 503."""
BEAT = 1.0


class Health:
    """Serves the three paths and measures the delay of the event loop."""

    def __init__(self, *, metrics: Metrics, ready: Callable[[], str]) -> None:
        self._metrics = metrics
        self._ready = ready
        """Returns why the replica is not ready; empty when it is."""
        self._beat = 0.0
        self._runner: web.AppRunner | None = None
        self.port = 0
        """The port in use, once started."""

    async def start(self, *, host: str, port: int) -> None:
        """Start to listen. Raises OSError if the port is in use."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._serve_metrics),
                web.get("/healthz", self._serve_health),
                web.get("/readyz", self._serve_ready),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self._beat = asyncio.get_running_loop().time()

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def run(self) -> None:
        """Measure the loop's lag until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._beat = loop.time()
            await asyncio.sleep(BEAT)
            self._metrics.loop_lag.set(max(loop.time() - self._beat - BEAT, 0.0))

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=await self._metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def _serve_health(self, _: web.Request) -> web.Response:
        delay = asyncio.get_running_loop().time() - self._beat - BEAT
        if delay > LAG_LIMIT:
            return web.Response(status=503, text=f"the event loop is {delay:.1f} s late\n")
        return web.Response(text="ok\n")

    async def _serve_ready(self, _: web.Request) -> web.Response:
        problem = self._ready()
        return web.Response(status=503 if problem else 200, text=(problem or "ok") + "\n")
