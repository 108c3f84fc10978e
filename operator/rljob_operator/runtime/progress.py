"""Polls the `/status` of every runner, and sends control calls to runners.

A runner is addressed by the IP of its pod; calls and answers are signed with the job's token (plan/signatures.py). With many jobs the poll
interval grows, so that polling a thousand jobs costs no more than polling a hundred. Jobs whose pods start, drain or suspend wait for the
runner's answer and have a separate rate. Deadlines are short and few calls are made at the same time, so that a dead node does not delay
other jobs. A runner may be a program of a user: an invalid answer affects its own job only, and only the fields that are used are kept.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from rl_core.plan import keys
from rl_core.plan.signatures import NotTheRunner, Peer, sign
from rljob_operator.model import ControlCall, PodView, Progress
from rljob_operator.reconcile import runner_status
from rljob_operator.runtime.cache import JobKey
from rljob_operator.runtime.fairness import FairSlots
from rljob_operator.runtime.master_key import UnknownKey

logger = logging.getLogger(__name__)

CONTROL_PORT = 7702
DEADLINE = aiohttp.ClientTimeout(total=3.0, sock_connect=2.0)
IN_FLIGHT, PER_NAMESPACE = 32, 16
"""Most polls, in all and of one namespace, at the same time: silent runners of one namespace must not delay the others."""
JOBS_PER_SECOND = 20.0
"""Most polls per second of all jobs together. Jobs that wait for an answer of their runner have a second budget of the same size."""
LARGEST = 1 << 20
"""Largest answer that is read, in bytes; the status of a runner has a few KiB."""
REFUSED = (400, 409, 413, 422)
"""HTTP codes with which a runner refuses the content of a call. Others concern the token, the path or the state of the runner."""
LONGEST_WORDS = 1000
"""Bytes that are kept of the message of a runner."""
TICK = 0.5


class RunnerError(Exception):
    """The runner did not answer, or its answer is invalid."""


class RunnerRefused(RunnerError):
    """The runner refused the content of the call; it would refuse the same call again."""


class RunnerClient:
    """Signed HTTP calls to runners."""

    def __init__(
        self, *, master: Callable[[str], bytes], session: aiohttp.ClientSession, port: int = CONTROL_PORT
    ) -> None:
        self._master = master
        """The master key of the job of a uid; raises UnknownKey."""
        self._session = session
        self._port = port

    async def status(self, job_uid: str, ip: str, *, epoch: int) -> Mapping[str, Any]:
        """Return `/status` of the runner of this epoch. Raises RunnerError."""
        answer, _ = await self._request(self._peer(job_uid, epoch), "GET", ip, "/status", b"")
        if not isinstance(answer, dict):
            raise RunnerError(f"/status must be a JSON object, got {type(answer).__name__}")
        return answer

    async def call(self, job_uid: str, call: ControlCall) -> str:
        """Send a control call and return the message of a runner that refuses it; empty if it accepts it.

        Also empty if the runner does not answer: that is logged, and later reconciles send the call again while it is needed.
        """
        method, _, path = call.method.partition(" ")
        body = json.dumps(call.body).encode()
        try:
            peer = self._peer(job_uid, call.epoch)
            _, challenge = await self._request(peer, "GET", call.ip, "/status", b"")
            await self._request(peer, method, call.ip, path, body, challenge=challenge)
        except RunnerError as error:
            logger.info("control call %s was not taken: %s", call.method, error)
            return str(error) if isinstance(error, RunnerRefused) else ""
        return ""

    def _peer(self, job_uid: str, epoch: int) -> Peer:
        """Return the token, uid and epoch to sign with. Raises RunnerError if the job's master key is not known."""
        try:
            return Peer(token=keys.control_token(self._master(job_uid), job_uid), uid=job_uid, epoch=epoch)
        except UnknownKey as error:
            raise RunnerError(error.message) from error

    async def _request(
        self, peer: Peer, method: str, ip: str, path: str, body: bytes, *, challenge: str = ""
    ) -> tuple[Any, str]:
        """Return the decoded answer and the challenge that came with it; raises RunnerError, for an unsigned answer too."""
        host = f"[{ip}]" if ":" in ip else ip
        signed = sign(peer, method, path, body=body, challenge=challenge)
        try:
            async with self._session.request(
                method,
                f"http://{host}:{self._port}{path}",
                data=body or None,
                headers={**signed.headers, "Content-Type": "application/json"},
                timeout=DEADLINE,
                allow_redirects=False,
            ) as response:
                text = await _body(response)
                proof = signed.verify(response.status, response.headers, text)
                if response.status >= 400:
                    kind = RunnerRefused if response.status in REFUSED else RunnerError
                    raise kind(f"HTTP {response.status}: {text[:LONGEST_WORDS].decode(errors='replace')}")
                return (json.loads(text) if text else None), proof
        except (aiohttp.ClientError, NotTheRunner, TimeoutError, OSError, ValueError, RecursionError) as error:
            raise RunnerError(_words(error)) from error


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """Return the whole body of a response. Raises RunnerError for more than LARGEST bytes."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > LARGEST:
            raise RunnerError(f"an answer must have at most {LARGEST} bytes, got more")
    return bytes(body)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerTarget:
    """A runner to poll."""

    key: JobKey
    job_uid: str
    pod_uid: str
    ip: str
    epoch: int
    awaited: bool = False
    """Whether pods wait for the runner's answer; it is then polled at the shortest interval, however many jobs there are."""


def is_runner(pod: PodView, *, job_uid: str) -> bool:
    """Return whether this pod runs a runner of the job that can be polled: the job owns it, it runs, and it has an address."""
    return pod.job_uid == job_uid and pod.phase == "Running" and bool(pod.ip) and not pod.ended


class Poller:
    """Polls every runner in turn and reports changed answers."""

    def __init__(
        self,
        *,
        client: RunnerClient,
        targets: Callable[[], Iterable[RunnerTarget]],
        known: Callable[[JobKey], Progress | None],
        report: Callable[[JobKey, str, Progress], None],
        enqueue: Callable[[JobKey], None],
        interval: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._targets = targets
        self._progress_of = known
        self._report = report
        self._enqueue = enqueue
        self._interval = interval
        self._clock = clock
        self._last_asked: dict[JobKey, tuple[str, float, float]] = {}
        """By job: uid of the pod that was polled last, the time, and a random factor on the interval, which spreads the polls."""
        self._asking: set[JobKey] = set()
        self._in_flight: FairSlots[str] = FairSlots(total=IN_FLIGHT, per_key=PER_NAMESPACE)

    async def run(self) -> None:
        """Poll until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for target in self._due_targets():
                    self._asking.add(target.key)
                    group.create_task(self._ask(target), name=f"poll {target.key}")
                await asyncio.sleep(TICK)

    def _due_targets(self) -> list[RunnerTarget]:
        """Return the runners whose poll is due. A new pod is polled at once; the others are spread over the interval."""
        targets = list(self._targets())
        now = self._clock()
        awaited = sum(target.awaited for target in targets)
        shared = max(self._interval, (len(targets) - awaited) / JOBS_PER_SECOND)
        prompt = max(self._interval, awaited / JOBS_PER_SECOND)
        present = {target.key for target in targets}
        self._last_asked = {key: entry for key, entry in self._last_asked.items() if key in present}
        ready = []
        for target in targets:
            pod_uid, asked_at, spread = self._last_asked.get(target.key, ("", 0.0, 1.0))
            next_poll = asked_at + spread * (prompt if target.awaited or self._failed_once(target) else shared)
            if target.key in self._asking or (pod_uid == target.pod_uid and now < next_poll):
                continue
            self._last_asked[target.key] = (target.pod_uid, now, random.uniform(0.9, 1.1))
            ready.append(target)
        return ready

    def _failed_once(self, target: RunnerTarget) -> bool:
        """Return whether only the newest poll has failed. The next poll then follows soon, because a single call may have been lost."""
        progress = self._progress_of(target.key)
        return progress is not None and progress.failures == 1

    async def _ask(self, target: RunnerTarget) -> None:
        previous = self._progress_of(target.key)
        if previous is not None and previous.pod_uid != target.pod_uid:
            previous = None
        try:
            async with self._in_flight.hold(target.key.namespace):
                status = await self._client.status(target.job_uid, target.ip, epoch=target.epoch)
        except RunnerError as error:
            progress = self._failed(target, previous, str(error))
        except Exception as error:
            # An exception must not leave the task: it would end the polls of all jobs, and the leader with them.
            logger.warning("polling %s failed", target.key, exc_info=error)
            progress = self._failed(target, previous, _words(error))
        else:
            progress = Progress(status=runner_status.kept(status), at=self._clock(), pod_uid=target.pod_uid)
        finally:
            self._asking.discard(target.key)
        self._report(target.key, target.job_uid, progress)
        changed = previous is None or progress.status != previous.status or progress.error != previous.error
        if changed or progress.error or target.awaited:
            self._enqueue(target.key)

    def _failed(self, target: RunnerTarget, previous: Progress | None, error: str) -> Progress:
        now = self._clock()
        if previous is None:
            return Progress(status={}, at=now, pod_uid=target.pod_uid, error=error, failing_since=now, failures=1)
        since = previous.failing_since if previous.failing_since is not None else now
        return replace(previous, error=error, failing_since=since, failures=previous.failures + 1)
