"""`ModelRelay`: the model as NeMo-Gym servers see it, at one address for all samples of a job.

    gym's model server --POST /v1/chat/completions {.., "rljob": {base_url, api_key}}--> relay --> endpoint of the sample's rollout

The servers are started with one address of the model and one API key, while every sample has a session of its own on one of the job's
rollouts. So the row of a sample carries its session, the model server merges it into the body of each call (`session_of_row`), and the relay
takes it out of the body again. The relay keeps no state: any process of an env pod may serve any call, on the same port.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp import web

from rl_core.api.errors import ConfigError, shown, text_of

logger = logging.getLogger(__name__)
SESSION = "rljob"
"""Field of a body with the session that the call belongs to."""
BODY_BYTES = 4 << 20
"""Largest body of a call; that of the endpoint."""
CONNECT_SECONDS = 10.0
"""Longest wait for a connection to the endpoint."""
STOP_SECONDS = 1.0
"""Seconds that a stop waits for calls in progress."""
GONE = 410
"""Status of a call whose endpoint does not answer, or whose session has ended. The servers repeat other failures, some of them without end,
and after a refused key they send no further call of any row."""


def session_of_row(row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Return `row` with the session in `responses_create_params.metadata.extra_body`, which model servers merge into their calls.

    Raises ValueError for a row whose parameters are no objects.
    """
    params = row.get("responses_create_params")
    if not isinstance(params, Mapping):
        raise ValueError(f"responses_create_params of a row must be an object, got {shown(params)}; correct the data")
    metadata = params.get("metadata") or {}
    try:
        body = json.loads(metadata.get("extra_body") or "{}")
        body |= {SESSION: {"base_url": base_url, "api_key": api_key}}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"metadata.extra_body of a row must be a JSON object in a text, got {shown(metadata)}"
        ) from error
    return {**row, "responses_create_params": {**params, "metadata": {**metadata, "extra_body": json.dumps(body)}}}


class ModelRelay:
    """Serves the model at one address, in a thread of its own: the servers call also while no row runs."""

    def __init__(self, host: str, port: int, *, model: str) -> None:
        """Listen at `host` and `port` (0 takes a free one) and offer the model of the name `model`. Raises ConfigError if that fails."""
        self._model = model
        self._loop = asyncio.new_event_loop()
        self._http: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="model-relay", daemon=True)
        self._thread.start()
        try:
            self.port = asyncio.run_coroutine_threadsafe(self._start(host, port), self._loop).result()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"env.options: modelHost and modelPort must be an address of this machine that is free, got {host}:{port}: {error}; choose another"
            ) from error

    async def _start(self, host: str, port: int) -> int:
        app = web.Application(client_max_size=BODY_BYTES)
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/chat/completions", self._chat)])
        # handler_cancellation: generation must stop for a row that is given up.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=STOP_SECONDS)
        self._runner = runner
        await runner.setup()
        # reuse_port: all processes of an env pod serve this address.
        await web.TCPSite(runner, host, port, backlog=1024, reuse_port=True).start()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout
        )
        bound_port: int = runner.addresses[0][1]
        return bound_port

    def close(self) -> None:
        """Stop listening and drop the calls in progress; idempotent."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._http is not None:
            await self._http.close()

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "rljob"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.Response:
        """Pass a call on to the endpoint of its session, and the answer back as it is."""
        assert self._http is not None, "bug: a call before the start"
        try:
            body = json.loads(await request.read())
            session = body.pop(SESSION)
            url, key = f"{session['base_url']}/chat/completions", f"{session['api_key']}"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return refusal(
                400,
                f"the body of a call must have {SESSION} with a session of the job; rows of rljob have it in metadata.extra_body",
            )
        # With the ids in the answer, the servers do not request them by a second call, which would carry no session.
        body |= {"return_token_ids": True}
        try:
            async with self._http.post(
                url, json=body, headers={"Authorization": f"Bearer {key}"}, allow_redirects=False
            ) as answer:
                if answer.status == HTTPStatus.UNAUTHORIZED:
                    return refusal(GONE, "the run of this call has ended: its sample is scored or run again")
                return web.Response(
                    body=await answer.read(), status=answer.status, headers={"Content-Type": answer.content_type}
                )
        except (aiohttp.ClientError, OSError, ValueError) as error:
            logger.warning("the endpoint %s does not answer: %s", shown(url), text_of(error))
            return refusal(GONE, f"the rollout of this sample does not answer: {type(error).__name__}")


def refusal(status: int, message: str, *, kind: str = "invalid_request_error") -> web.Response:
    """Return the refusal of a call in the form that OpenAI clients read; `kind` is its `type`."""
    return web.json_response({"error": {"message": message, "type": kind, "param": None, "code": None}}, status=status)
