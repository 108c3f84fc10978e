"""`NemoGymEnvironment`: the HTTP client of NeMo-Gym servers.

    head server: GET /server_instances -> addresses of the agents
    agent:       POST /run with one row -> the whole episode, scored

A row is one call, which may last as long as the episode, and closing the connection cancels the episode. Answers are matched to rows by the
connection, because the servers return a row's own fields only where a verifier repeats them. Every wait has a limit: connecting, the calls
of a row, and through the caller the whole group.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import aiohttp

from rl_core.api.errors import ConfigError, RolloutDataFailure, shown, text_of
from rl_core.nemo_gym.answers import ROW_ID, GymProtocolFailure, RowFailure, failure_of, row_result

logger = logging.getLogger(__name__)

RETRIED_STATUS = frozenset({408, 429, 502, 503, 504})
"""HTTP statuses after which the same call may succeed."""
KEPT_BODY_BYTES = 2048
"""Beginning of the body of a failed call that is kept in its error."""


class _Unavailable(Exception):
    """A call failed in a way that another try may mend."""


class NemoGymEnvironment:
    """Runs rows on the agents of NeMo-Gym servers. All methods run on one event loop."""

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        connect_seconds: float = 10.0,
        row_seconds: float | None = 3600.0,
        tries: int = 5,
        backoff_seconds: float = 0.5,
        max_backoff_seconds: float = 8.0,
        concurrency: int = 256,
        max_answer_bytes: int = 64 * 2**20,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        """Use the servers whose head servers listen at `urls`, such as `http://host:port`.

        Args:
            urls: Address of the head server, or several for several copies of the same servers.
            connect_seconds: Longest wait for a connection.
            row_seconds: Longest time of a row, all tries included; None = only the deadline of its group.
            tries: Calls of a row in total, where connections fail or a server is overloaded.
            backoff_seconds: Seconds before the second try; doubles with every try.
            max_backoff_seconds: Longest delay between tries.
            concurrency: Most rows in flight.
            max_answer_bytes: Largest answer to a row.
            sleep: Waits for the given seconds.

        Raises ConfigError for addresses that are no HTTP addresses and for limits below 1.
        """
        self._heads = [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]
        if not self._heads or not all(url.startswith(("http://", "https://")) for url in self._heads):
            raise ConfigError(f"urls must be addresses like http://host:port of head servers, got {shown(urls)}")
        for name, value in (("tries", tries), ("concurrency", concurrency), ("max_answer_bytes", max_answer_bytes)):
            if value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}; raise it")
        self._connect_seconds = connect_seconds
        self._head_timeout = aiohttp.ClientTimeout(total=3 * connect_seconds, sock_connect=connect_seconds)
        self._row_seconds = row_seconds
        self._tries = tries
        self._backoff, self._max_backoff = backoff_seconds, max_backoff_seconds
        self._places = asyncio.Semaphore(concurrency)
        self._max_bytes = max_answer_bytes
        self._sleep = sleep
        self._agents: dict[str, list[str]] = {}
        """Addresses by name of the agent; empty = ask the head servers."""
        self._lookup = asyncio.Lock()
        """Held while the head servers are asked, so that the rows of a group ask once."""
        self._session: aiohttp.ClientSession | None = None

    async def run_rollouts(
        self, rows: Sequence[Mapping[str, Any]], tokenizer: Any = None, timer_prefix: str = ""
    ) -> AsyncIterator[tuple[int, dict[str, Any] | RowFailure]]:
        """Run all rows concurrently, and yield `(_rowidx, result)` of each row as it finishes.

        The result is what `row_result` returns for the answer, or a RowFailure if the servers gave no answer. `timer_prefix` is not used;
        NeMo-RL passes it. Closing the generator cancels the rows in flight. Raises RolloutDataFailure for a row that the servers refuse and
        for a malformed answer.
        """
        tasks = [asyncio.ensure_future(self._run_row(row, tokenizer)) for row in rows]
        try:
            for next_row in asyncio.as_completed(tasks):
                yield await next_row
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Close all connections; idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def not_ready(self) -> str:
        """Return why no head server is ready, "" if one is. While servers start, the head server answers 503, or nothing yet."""
        reasons = []
        for head in self._heads:
            try:
                async with self._http().get(f"{head}/readyz", timeout=self._head_timeout) as response:
                    if response.status != HTTPStatus.SERVICE_UNAVAILABLE:
                        return ""
                    reasons.append(f"{head} answered {response.status}")
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reasons.append(f"{head}: {type(error).__name__}: {text_of(error)}")
        return ", ".join(reasons)

    async def run_row(self, row: Mapping[str, Any]) -> Mapping[str, Any] | RowFailure:
        """Return the answer of the agent to `row`, which has a `_rowidx` of its own, or why it has none.

        Raises RolloutDataFailure for a row that the servers refuse, and GymProtocolFailure for an answer that is no object, or not this row's.
        """
        failures: list[str] = []
        async with self._places:
            try:
                async with asyncio.timeout(self._row_seconds) as limit:
                    return await self._answer(row, failures)
            except TimeoutError:
                if not limit.expired():
                    raise
                last_failure = f" after {failures[-1]}" if failures else ""
                return RowFailure(reason=f"no answer in {self._row_seconds:g} s{last_failure}")

    async def _run_row(self, row: Mapping[str, Any], tokenizer: Any) -> tuple[int, dict[str, Any] | RowFailure]:
        answer = await self.run_row(row)
        return row["_rowidx"], answer if isinstance(answer, RowFailure) else row_result(answer, tokenizer)

    async def _answer(self, row: Mapping[str, Any], failures: list[str]) -> Mapping[str, Any] | RowFailure:
        """Return the answer to `row`, called as often as `tries` allows; `failures` receives what happened."""
        for attempt in range(self._tries):
            if attempt:
                await self._sleep(min(self._max_backoff, self._backoff * 2.0 ** (attempt - 1)))
            try:
                return await self._call(row, attempt)
            except (_Unavailable, aiohttp.ClientError, TimeoutError, OSError) as error:
                name = ""
                if not isinstance(error, _Unavailable):
                    name = f"{type(error).__name__}: "
                    self._agents = {}  # a restarted agent has another address
                failures.append(f"{name}{text_of(error, limit=KEPT_BODY_BYTES)}")
        return RowFailure(reason=f"{self._tries} tries failed, the last: {failures[-1]}")

    async def _call(self, row: Mapping[str, Any], attempt: int) -> Mapping[str, Any] | RowFailure:
        addresses = await self._addresses(row)
        url = f"{addresses[(row['_rowidx'] + attempt) % len(addresses)]}/run"
        headers = {"X-Row-Id": str(row[ROW_ID])} if ROW_ID in row else {}
        async with self._http().post(url, json=row, headers=headers, allow_redirects=False) as response:
            body = await self._body(response)
        if response.status == 200:
            return _checked(_parsed(body, url), row, url)
        text = f"{url} answered {response.status}: {body[:KEPT_BODY_BYTES].decode(errors='replace')}"
        if response.status in RETRIED_STATUS:
            raise _Unavailable(text)
        if 400 <= response.status < 500:
            raise RolloutDataFailure(f"row {row['_rowidx']} was refused: {text}")
        return RowFailure(reason=text)

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body; that of a failed call is cut. Raises GymProtocolFailure for an answer that is too long."""
        limit = self._max_bytes if response.status == 200 else KEPT_BODY_BYTES
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > limit:
                break
        if len(body) > limit and response.status == 200:
            raise GymProtocolFailure(
                f"an answer must have at most {limit} bytes (max_answer_bytes), got more from {response.url}"
            )
        return bytes(body)

    async def _addresses(self, row: Mapping[str, Any]) -> list[str]:
        """Return the addresses of the agent that `row` names. Raises RolloutDataFailure for an unknown agent."""
        name = row["agent_ref"]["name"]
        async with self._lookup:
            if not self._agents:
                self._agents = await self._ask_heads()
            agents = self._agents
        if name not in agents:
            raise RolloutDataFailure(
                f"agent_ref.name must be one of the servers {sorted(agents)}, got {shown(name)}; correct the row or start that agent"
            )
        return agents[name]

    async def _ask_heads(self) -> dict[str, list[str]]:
        """Return the addresses of all servers by name; a head server that does not answer is left out while another does."""
        agents: dict[str, list[str]] = {}
        errors: list[Exception] = []
        for head in self._heads:
            try:
                instances = await self._instances(f"{head}/server_instances")
            except (_Unavailable, aiohttp.ClientError, TimeoutError, OSError) as error:
                logger.warning("head server %s does not answer: %s", head, error)
                errors.append(error)
                continue
            for name, url in instances:
                agents.setdefault(name, []).append(url.rstrip("/"))
        if not agents:
            raise errors[0] if errors else _Unavailable(f"no servers are registered at {self._heads}")
        return agents

    async def _instances(self, url: str) -> list[tuple[str, str]]:
        """Return (name, address) of the servers that a head server lists."""
        async with self._http().get(url, timeout=self._head_timeout, allow_redirects=False) as response:
            body = await self._body(response)
        if response.status != 200:
            text = body[:KEPT_BODY_BYTES].decode(errors="replace")
            raise _Unavailable(f"{url} answered {response.status}: {text}")
        listed = _parsed(body, url)
        if not isinstance(listed, list) or not all(isinstance(row, Mapping) for row in listed):
            raise GymProtocolFailure(f"{url} must answer a list of servers, got {shown(listed)}")
        return [
            (str(row.get("process_name") or row.get("name")), row["url"])
            for row in listed
            if isinstance(row.get("url"), str)
        ]

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The session of an episode is a cookie: with a jar, one row would send that of another.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_seconds),
            )
        return self._session


def _parsed(body: bytes, url: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        text = body[:KEPT_BODY_BYTES].decode(errors="replace")
        raise GymProtocolFailure(f"{url} must answer JSON, got {error}: {text}") from error


def _checked(answer: Any, row: Mapping[str, Any], url: str) -> Mapping[str, Any] | RowFailure:
    """Return `answer`, or the failure it reports. Raises GymProtocolFailure if it is no object, or the answer to another row."""
    if not isinstance(answer, Mapping):
        raise GymProtocolFailure(f"{url} must answer an object, got {shown(answer)}")
    echoed = answer.get("_rowidx", row["_rowidx"])
    if echoed != row["_rowidx"]:
        raise GymProtocolFailure(
            f"{url} must answer the row it was sent, {row['_rowidx']}, got the answer to row {shown(echoed)}"
        )
    return failure_of(answer) or answer
