"""`SessionRouter`: a proxy at one address, through which the agent programs of an env pod call the rollouts that have their sessions.

    program --call--> router --call--> endpoint of the rollout that leased the sample
                        |  <--answer, record--
                        '- requests and records of the session: what the policy sampled, with log-probabilities and versions

All calls of a session go to one rollout, whose prefix cache has the conversation. If that rollout is lost, drained or returns the sample,
calls wait here until another rollout leases the sample. The router then copies the records into a session there, and the program continues:
it has only seen a slow call, and the tokens that were sampled before are kept.

The program is started again instead if the sample itself failed (another attempt has other seeds), if its tokens are too old to be trained,
or if no rollout leases the sample in time.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import aiohttp
from aiohttp import web

from rl_core.api.errors import InfrastructureError, text_of
from rl_core.envs.model_relay import BODY_BYTES, CONNECT_SECONDS, GONE, STOP_SECONDS, refusal
from rl_core.messages.agents import RECORD, RECORD_EVENT, REQUEST, RESULT, AgentRequest
from rl_core.messages.envs import EnvAnswer, EnvFailure, EnvRow

logger = logging.getLogger(__name__)
HOST = "127.0.0.1"
HOLD_SECONDS = 60.0
"""How long a call waits for a rollout to lease its sample, after the one before is lost. It then fails with status 410."""
RUNS = 8
"""Runs of a session that are remembered as ended."""
KEPT_BYTES = 64 << 20
"""Requests and records of ended sessions that are kept, since their group may not have ended yet; the oldest are forgotten first."""
_EVENT = f"event: {RECORD_EVENT}\ndata: ".encode()


class Steps(Protocol):
    """What runs the programs: `pool.EnvPool`."""

    async def step_rows(self, rows: Sequence[EnvRow]) -> list[EnvAnswer | EnvFailure]:
        """Return one answer per row, in order."""
        ...


class _Lost(Exception):
    """The endpoint of a session does not answer, or has given the session up."""


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """A session at a rollout."""

    base_url: str
    key: str

    def url(self, path: str) -> str:
        return self.base_url.removesuffix("/v1") + path


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that was answered."""

    path: str
    body: bytes
    record: bytes


@dataclass(eq=False, slots=True)
class _Session:
    """One attempt at a sample."""

    name: str
    """Sample id."""
    key: str
    """API key of the program, without the id of its run."""
    attempt: int
    endpoint: _Endpoint | None
    """None while no rollout has the session."""
    answer: asyncio.Future[EnvAnswer | EnvFailure]
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a rollout has the session, and when it has ended."""
    run: str = ""
    calls: list[_Call] | None = field(default_factory=list)
    """Answered calls of the run, in the order of their answers; None = they are too large to be sent again."""
    ended: bool = False
    moves: int = 0
    """Number of times that the session was to be moved to another rollout."""
    old_runs: deque[str] = field(default_factory=lambda: deque(maxlen=RUNS))

    @property
    def bytes(self) -> int:
        """Return the size of the answered calls."""
        return sum(len(call.body) + len(call.record) for call in self.calls or ())

    def enter(self, run: str) -> bool:
        """Record that a call of `run` has arrived; return False if a newer run has replaced it. The first call of a run empties the session."""
        if run != self.run:
            if run in self.old_runs:
                return False
            if self.run:
                self.old_runs.append(self.run)
            self.run, self.calls = run, []
        return True

    def keep(self, call: _Call) -> None:
        """Keep an answered call."""
        if len(call.body) + len(call.record) > BODY_BYTES:
            self.calls = None
        elif self.calls is not None:
            self.calls.append(call)

    def lose(self, endpoint: _Endpoint) -> None:
        """Note that `endpoint` does not have the session any more."""
        if self.endpoint is endpoint and not self.ended:
            self.endpoint = None
            self.changed.clear()

    def end(self) -> None:
        """Refuse further calls, and those that wait."""
        self.ended = True
        self.changed.set()

    def continues(self, request: AgentRequest) -> bool:
        """Return whether the run can go on for `request`: for the same attempt, with all calls recorded and no token that is too old."""
        if not request["resumed"] or request["attempt"] != self.attempt or self.calls is None:
            return False
        outputs = [output for call in self.calls for output in json.loads(call.record)]
        return all(version >= request["oldest_version"] for *_, versions, _ in outputs for _, _, version in versions)


class SessionRouter:
    """Runs agent programs with `steps` and passes their calls on."""

    def __init__(self, steps: Steps, *, hold_seconds: float = HOLD_SECONDS) -> None:
        """Run programs with `steps`; a call waits `hold_seconds` for a rollout. `start` must have returned before rows are stepped."""
        self._steps, self._hold_seconds = steps, hold_seconds
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._by_key: dict[str, _Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._http: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self._base_url = ""
        self.counters: Counter[str] = Counter()

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._answer)
        # handler_cancellation: when a client disconnects, its row is dropped from the engine.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=STOP_SECONDS)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0, backlog=1024).start()
        self._base_url = f"http://{HOST}:{self._runner.addresses[0][1]}/v1"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout, auto_decompress=False
        )

    async def close(self) -> None:
        """Stop listening and end all sessions."""
        self.end_all()
        for task in list(self._tasks):
            task.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._http is not None:
            await self._http.close()

    def end_all(self) -> None:
        """End all sessions: their programs cannot call any more, and none is continued."""
        for session in list(self._sessions.values()):
            self._forget(session)

    def held(self, names: Sequence[str]) -> list[str]:
        """Return the subset of `names`, ids of samples, that have a session here."""
        return [name for name in names if name in self._sessions]

    async def step_rows(self, rows: Sequence[EnvRow]) -> list[EnvAnswer | EnvFailure]:
        """Return one answer per row, in order. A row whose program runs here already is answered by that run."""
        sessions, new_sessions, to_move = [], [], []
        for row in rows:
            request: AgentRequest = (row.metadata or {})[REQUEST]
            endpoint = _Endpoint(request["base_url"], request["api_key"])
            session = self._sessions.get(row.key)
            if session is not None and session.continues(request):
                to_move.append((session, endpoint))
            else:
                if session is not None:
                    self._forget(session)
                session = self._open(row.key, request["attempt"], endpoint)
                address = {"base_url": self._base_url, "api_key": session.key}
                new_sessions.append(
                    (session, replace(row, metadata={**(row.metadata or {}), REQUEST: {**request, **address}}))
                )
            sessions.append(session)
        if new_sessions:
            self._spawn(self._run(new_sessions))
        moves = [self._spawn(self._move(session, endpoint)) for session, endpoint in to_move]
        # The answer of a run cannot be trained without the calls that led to it.
        await asyncio.gather(*map(asyncio.shield, moves))
        return list(await asyncio.gather(*(asyncio.shield(session.answer) for session in sessions)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- sessions ----------------------------------------------------------------------------------------------------

    def _open(self, name: str, attempt: int, endpoint: _Endpoint) -> _Session:
        answer = asyncio.get_running_loop().create_future()
        session = _Session(name, f"rl-{secrets.token_hex(16)}", attempt, endpoint, answer)
        session.changed.set()
        self._sessions[name] = self._by_key[session.key] = session
        return session

    def _forget(self, session: _Session) -> None:
        session.end()
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
        if not session.answer.done():
            session.answer.set_result(_failure(f"the run of sample {session.name} was given up; it is run again"))

    async def _run(self, runs: Sequence[tuple[_Session, EnvRow]]) -> None:
        """Run the programs of new sessions."""
        answers: list[EnvAnswer | EnvFailure]
        try:
            answers = await self._steps.step_rows([row for _, row in runs])
        except Exception as error:  # noqa: BLE001 - task boundary: whoever waits for the rows gets the failure
            answers = [_failure(f"the programs could not be run: {text_of(error)}")] * len(runs)
        for (session, _), answer in zip(runs, answers, strict=True):
            session.end()
            self._by_key.pop(session.key, None)
            if not session.answer.done():
                session.answer.set_result(answer)
            if isinstance(answer, EnvFailure) or (answer.metadata or {})[RESULT]["error"]:
                self._forget(session)
            elif session.name in self._sessions:
                self._sessions.move_to_end(session.name)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        ended_sessions = [session for session in self._sessions.values() if session.ended]
        size = sum(session.bytes for session in ended_sessions)
        for session in ended_sessions:
            if size > KEPT_BYTES:
                size -= session.bytes
                self._forget(session)

    async def _move(self, session: _Session, endpoint: _Endpoint) -> None:
        """Enter the answered calls of `session` into the one at `endpoint`, which then gets the next calls."""
        session.endpoint = None
        session.moves = move = session.moves + 1
        if not session.ended:
            session.changed.clear()
        try:
            for call in list(session.calls or ()):
                await self._replay(endpoint, session.run, call)
        except (aiohttp.ClientError, OSError, _Lost) as error:
            if session.moves == move:
                logger.warning("the run of sample %s cannot be continued: %s", session.name, text_of(error))
                self._forget(session)
            return
        if session.moves != move:  # another rollout has leased the sample since
            return
        self.counters["sessions_moved"] += 1
        logger.info("the run of sample %s goes on at %s", session.name, endpoint.base_url)
        session.endpoint = endpoint
        session.changed.set()

    async def _replay(self, endpoint: _Endpoint, run: str, call: _Call) -> None:
        assert self._http is not None, "bug: a call before the start"
        headers = {"Authorization": f"Bearer {endpoint.key}.{run}", RECORD: str(len(call.body))}
        async with self._http.post(
            endpoint.url(call.path), data=io.BytesIO(call.body + call.record), headers=headers
        ) as answer:
            text = await answer.text()
            if answer.status != 200 and not (answer.status == 400 and call.record == b"[]"):
                raise _Lost(f"status {answer.status}: {text[:200]}")

    # --- calls -------------------------------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Pass a call on to the rollout that has its session, and the answer back."""
        key = request.headers.get("x-api-key")
        scheme, _, token = request.headers.get("Authorization", f"Bearer {key}").partition(" ")
        name, _, run = token.strip().partition(".")
        session = self._by_key.get(name) if scheme.lower() == "bearer" else None
        if session is None or session.ended or not session.enter(run):
            self.counters["calls_refused"] += 1
            return refusal(
                401, "the API key must be that of a run that goes on, got another", kind="authentication_error"
            )
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return refusal(413, f"the body of a call must have at most {BODY_BYTES} bytes")
        while True:
            if not session.changed.is_set():
                try:
                    async with asyncio.timeout(self._hold_seconds):
                        await session.changed.wait()
                except TimeoutError:
                    return refusal(
                        GONE, f"the rollout of this sample was lost, and no other has it after {self._hold_seconds:g} s"
                    )
            endpoint = session.endpoint
            if session.ended or session.run != run or endpoint is None:
                return refusal(
                    401, "this run has ended: its sample is scored or run again", kind="authentication_error"
                )
            try:
                return await self._pass(request, body, session, endpoint)
            except (aiohttp.ClientError, OSError, _Lost) as error:
                if session.endpoint is endpoint:
                    logger.warning("calls of sample %s wait, its rollout is lost: %s", session.name, text_of(error))
                session.lose(endpoint)

    async def _pass(
        self, request: web.Request, body: bytes, session: _Session, endpoint: _Endpoint
    ) -> web.StreamResponse:
        """Forward a call to `endpoint` and return its answer.

        Raises _Lost, or the error of the connection, if there is no answer and the client has not got any part of one.
        """
        assert self._http is not None, "bug: a call before the start"
        headers = {"Authorization": f"Bearer {endpoint.key}.{session.run}", RECORD: "ask"}
        run = session.run

        def keep(record: bytes) -> None:
            if session.endpoint is not endpoint:  # The session was moved meanwhile, without this call.
                raise _Lost("the session was moved")
            if session.run == run:
                session.keep(_Call(request.path, body, record))

        async with self._http.request(
            request.method, endpoint.url(request.path), data=io.BytesIO(body), headers=headers, allow_redirects=False
        ) as answer:
            if answer.status in (401, 503):  # The rollout has closed the session, or lost its engine.
                raise _Lost(f"status {answer.status}")
            if answer.content_type == "text/event-stream":
                return await _pass_events(request, answer, keep)
            text = await answer.read()
            if RECORD in answer.headers:
                length = int(answer.headers[RECORD])
                text, record = text[:length], text[length:]
                keep(record)
            return web.Response(
                body=text, status=answer.status, headers={"Content-Type": answer.headers.get("Content-Type", "")}
            )


async def _pass_events(
    request: web.Request, answer: aiohttp.ClientResponse, keep: Callable[[bytes], None]
) -> web.StreamResponse:
    """Forward a stream without the record at its end. If the stream breaks off, the client, which has got a part of it, gets an event `error`."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

    async def send(data: bytes) -> bool:
        """Return whether the client is still there."""
        try:
            if not response.prepared:
                await response.prepare(request)
            await response.write(data)
        except ConnectionError:
            return False
        return True

    buffer = b""
    try:
        async for chunk in answer.content.iter_any():
            *events, buffer = (buffer + chunk).split(b"\n\n")
            for event in events:
                if event.startswith(_EVENT):
                    keep(event.removeprefix(_EVENT))
            passed = b"".join(event + b"\n\n" for event in events if not event.startswith(_EVENT))
            if passed and not await send(passed):
                break
    except (aiohttp.ClientError, OSError, _Lost) as error:
        if not response.prepared:
            raise
        text = f"the rollout of this stream was lost: {type(error).__name__}; call again"
        await send(b"data: " + json.dumps({"error": {"message": text, "type": "server_error"}}).encode() + b"\n\n")
    return response


def _failure(message: str) -> EnvFailure:
    return EnvFailure(type=InfrastructureError.__name__, message=message)
