"""`Endpoint`: the HTTP server of a rollout, on the event loop of its worker.

It answers `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages`, `/inference/v1/generate`, `/v1/models` and `/tokenize`.
Every failure is an answer of the form that OpenAI clients read, and is raised nowhere: the result of its program decides about a sample.
Bodies, calls of a session and calls in total are bounded.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from aiohttp import web

from rl_core.api.errors import RLJobError, RolloutDataFailure, text_of
from rl_core.data.tokenizer import Tokenizer
from rl_core.messages.agents import RECORD_EVENT
from rl_core.rollouts.endpoint import chat, chat_stream, messages, record, responses, tokens
from rl_core.rollouts.endpoint.episodes import CONTEXT_LENGTH, AgentEpisode, Episodes, plain_messages
from rl_core.rollouts.endpoint.errors import EndpointError, bad_request
from rl_core.rollouts.endpoint.pieces import Piece, pieces, server_sent

logger = logging.getLogger(__name__)
BODY_BYTES = 4 << 20
"""Largest body of a request."""
CALLS_AT_ONCE = 2048
"""Most calls of all sessions in progress; further ones are refused with status 429."""
STOP_SECONDS = 1.0
"""How long a stop waits for answers on their way."""
SETTINGS_OF_THE_JOB = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "seed")
"""Fields of a request that are not applied: see `chat`."""
OnChoice = Callable[[int, list[int]], None]
"""Gets the index of a choice and its new ids."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """Serves the sessions of `episodes`."""

    def __init__(self, episodes: Episodes, tokenizer: Tokenizer, *, model: str, max_new_tokens: int) -> None:
        """`model` is the name of the served model; a reply has at most `max_new_tokens` tokens."""
        self._episodes = episodes
        self._tokenizer = tokenizer
        self.model = model
        self._max_new_tokens = max_new_tokens
        self._runner: web.AppRunner | None = None
        self._calls = 0
        self._warned: set[str] = set()
        self.port = 0

    async def start(self, host: str, port: int = 0) -> None:
        """Listen on `host`; `port` 0 takes a free one."""
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[self._answer_errors])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/messages", self._messages)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        # handler_cancellation: when a client disconnects, its row is dropped from the engine.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=STOP_SECONDS)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=1024)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop serving; idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._calls += 1
        try:
            if self._calls > CALLS_AT_ONCE:
                raise EndpointError(
                    429, "rate_limit_error", f"at most {CALLS_AT_ONCE} calls may be in progress; try again later"
                )
            return await handler(request)
        except web.HTTPException as error:
            refusal = EndpointError(
                error.status, "invalid_request_error", f"{error.reason}: {request.method} {request.path}"
            )
        except EndpointError as error:
            refusal = error
        except Exception as error:  # noqa: BLE001 - task boundary: the client must get an answer
            refusal = _refusal(error)
        finally:
            self._calls -= 1
        text = json.dumps(refusal.body()).encode()
        # This refusal is part of the episode, which ends because its sequence is full.
        if refusal.code == CONTEXT_LENGTH:
            return record.answer(request, text, record.NOTHING, status=refusal.status)
        return web.Response(body=text, status=refusal.status, content_type="application/json", charset="utf-8")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        episode, body = await self._read(request)
        call = chat.ChatRequest.read(body)
        if call.stream:
            records, parts = self._pieces(call, episode)
            return await self._send(
                request, chat_stream.events(call, parts, model=self.model, tokenizer=self._tokenizer), records
            )
        completed = await self._complete(call, episode)
        body = chat.answer(call, completed, model=self.model, tokenizer=self._tokenizer)
        return _answer(request, body, completed)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        episode, body = await self._read(request)
        call = chat.ChatRequest.read(messages.as_chat(body))
        if call.stream:
            records, parts = self._pieces(call, episode)
            return await self._send(request, messages.events(parts, model=self.model), records)
        completed = await self._complete(call, episode)
        return _answer(request, messages.answer(completed, model=self.model), completed)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        episode, body = await self._read(request)
        call = chat.ChatRequest.read(responses.as_chat(body))
        if call.stream:
            records, parts = self._pieces(call, episode)
            return await self._send(request, responses.events(parts, model=self.model), records)
        completed = await self._complete(call, episode)
        return _answer(request, responses.answer(completed, model=self.model), completed)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        episode, body = await self._read(request)
        call = tokens.CompletionRequest.read(body)
        if call.stream:
            records: list[bytes] = []
            start = partial(self._continue, call, episode)
            parts = record.noted(pieces(call, start, self._tokenizer, tools=False), records)
            events = tokens.events(call, parts, model=self.model, tokenizer=self._tokenizer)
            return await self._send(request, events, records)
        completed = await self._continue(call, episode)
        body = tokens.answer(call, completed, model=self.model, tokenizer=self._tokenizer)
        return _answer(request, body, completed)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        episode, body = await self._read(request)
        call = tokens.CompletionRequest.read(tokens.as_completion(body))
        completed = await self._continue(call, episode)
        return _answer(request, tokens.generated(completed, tokenizer=self._tokenizer), completed)

    async def _read(self, request: web.Request) -> tuple[AgentEpisode, Any]:
        """Return the session of the request's key, and its body."""
        key = request.headers.get("x-api-key")
        episode = self._episodes.find(request.headers.get("Authorization", f"Bearer {key}" if key else None))
        text, recorded = record.split(request, await request.read())
        body = _object(text)
        episode.recorded = None if recorded is None else deque(recorded)
        if recorded is not None:
            body["stream"] = False
        self._warn_of_ignored(body)
        return episode, body

    async def _complete(
        self, call: chat.ChatRequest, episode: AgentEpisode, *, on_tokens: OnChoice | None = None
    ) -> chat.Completed:
        return await chat.complete(
            call, episode, self._tokenizer, max_new_tokens=self._max_new_tokens, on_tokens=on_tokens
        )

    def _pieces(
        self, call: chat.ChatRequest, episode: AgentEpisode
    ) -> tuple[list[bytes], AsyncGenerator[Piece | chat.Completed]]:
        """Return a list that gets the record of the call when it is finished, and the parts of the streamed call."""
        records: list[bytes] = []
        start = partial(self._complete, call, episode)
        parts = pieces(call, start, self._tokenizer, tools=bool(call.offered_tools))
        return records, record.noted(parts, records)

    async def _continue(
        self, call: tokens.CompletionRequest, episode: AgentEpisode, *, on_tokens: OnChoice | None = None
    ) -> chat.Completed:
        return await tokens.complete(
            call, episode, self._tokenizer, max_new_tokens=self._max_new_tokens, on_tokens=on_tokens
        )

    async def _send(
        self, request: web.Request, events: AsyncGenerator[bytes], records: list[bytes]
    ) -> web.StreamResponse:
        """Send server-sent events. A failure before the first one is an ordinary answer, a later one an event `error`.

        A record that the caller asked for comes before the events that say that the call is finished.
        """

        def take_records() -> bytes:
            text = b"".join(records).decode() if record.asked(request) else ""
            records.clear()
            return server_sent(text, event=RECORD_EVENT) if text else b""

        async with aclosing(events):
            first_event = await anext(events)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            try:
                await response.write(take_records() + first_event)
                async for event in events:
                    await response.write(take_records() + event)
            except ConnectionError:
                logger.debug("the client of a stream is gone")
            except Exception as error:  # noqa: BLE001 - the status is sent, so that the client must get the failure as an event
                await response.write(server_sent(_refusal(error).body()))
            return response

    def _warn_of_ignored(self, body: Mapping[str, Any]) -> None:
        """Log, once for each field, that the job's sampling settings are used in place of those of a request."""
        ignored = {name for name in SETTINGS_OF_THE_JOB if body.get(name) is not None} - self._warned
        if ignored:
            self._warned |= ignored
            logger.warning(
                "the request's %s is not applied: tokens are sampled with rollout.sampling of the job, as the trainer scores them",
                ", ".join(sorted(ignored)),
            )

    async def _models(self, request: web.Request) -> web.StreamResponse:
        limit = self._episodes.max_seq_len
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "rljob", "max_model_len": limit}
        return web.json_response({"object": "list", "data": [model]})

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body = _object(await request.read())
        if isinstance(body.get("prompt"), str):
            ids = self._tokenizer(body["prompt"], add_special_tokens=bool(body.get("add_special_tokens", True)))[
                "input_ids"
            ]
        else:
            call = chat.ChatRequest.read(body)
            ids = self._episodes.template.whole(plain_messages(call.messages), call.settings)
        return web.json_response({"count": len(ids), "max_model_len": self._episodes.max_seq_len, "tokens": ids})


def _object(text: bytes) -> dict[str, Any]:
    """Return the body of a request. Raises EndpointError unless it is a JSON object."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body must be JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("the body must be an object")
    return body


def _answer(request: web.Request, body: Mapping[str, Any], completed: chat.Completed) -> web.Response:
    return record.answer(request, json.dumps(body).encode(), record.record_of(completed))


def _refusal(error: BaseException) -> EndpointError:
    if isinstance(error, ExceptionGroup):  # Several choices may fail; the first failure is reported.
        return _refusal(error.exceptions[0])
    if isinstance(error, EndpointError):
        return error
    if isinstance(error, ValueError | RolloutDataFailure) and not isinstance(error, UnicodeError):
        return bad_request(text_of(error))
    if isinstance(error, RLJobError):
        return EndpointError(503, "server_error", text_of(error), code="unavailable")
    logger.error("a call failed", exc_info=error)
    return EndpointError(500, "server_error", f"{type(error).__name__}: {text_of(error)}")
