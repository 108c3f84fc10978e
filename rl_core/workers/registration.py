"""Registers a worker process with the hub and sends its heartbeats.

    register -(accepted)-> keep_in_touch -(the hub is silent for `lost` s, or does not know us)-> returns; the host starts over
    register -(refused for good)-> Ended          keep_in_touch -(a newer process has our name)-> Ended

Both coroutines run on the control loop of the worker process. User code runs in other threads, so a busy worker still sends heartbeats.
"""

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from rl_core.api.errors import DeadlineExceeded, EpochFenced, FrameError, InfrastructureError, RLJobError, exit_code
from rl_core.messages.members import (
    WIRE_VERSION,
    HeartbeatAnswer,
    HelloAccepted,
    HelloRefused,
    HelloReport,
    MemberId,
    MemberState,
    MemberView,
)
from rl_core.observability import events
from rl_core.plan.groups import BUILT_IN, GroupKind
from rl_core.transports import tokens
from rl_core.transports.rpc import RpcClient
from rl_core.workers.context import WorkerContext

if TYPE_CHECKING:
    from rl_core.api.job import RLJob

logger = logging.getLogger(__name__)

HELLO_TRY = 5.0
"""Seconds of one attempt to say hello."""
HELLO_DEADLINE = 600.0
"""Seconds within which a hub must accept a member of a gang in a local run."""
RETRY_PAUSE = 0.2
"""Seconds between two attempts to reach the hub, because a hub that does not run refuses connections without delay."""
SUCCESSOR_PAUSE = 1.0
"""Seconds between two hellos to a hub of an older epoch, whose successor is about to take its address."""
RECONNECT = 3.0
"""Seconds of silence of the hub after which its host name is resolved again. A restarted runner may have another IP address."""
FIRST_HEARTBEAT = 2.0
"""Seconds between heartbeats until the hub says otherwise."""
GATHER_S = 0.1
"""Seconds that a heartbeat which reports a change waits for further changes, because a weight sync changes the state of a member twice."""
DEFAULT_LOST = 15.0
"""Seconds of silence after which the hub counts as lost, in a process that has not received a job."""
_STILL_WAITING = 10.0
"""Seconds between two log lines about a hub that does not answer."""


class Ended(Exception):
    """Raised when this process must end. `code` is its exit code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Registration:
    """Registers the process of `context` with the hub. It can register again after the hub was lost."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        connect: Callable[[], Awaitable[RpcClient]],
        start_over: Callable[[int], Awaitable[None]],
        kinds: Mapping[str, GroupKind] = BUILT_IN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to register the process of `context`.

        `connect` returns a new RPC client of the hub, or raises InfrastructureError. `start_over(epoch)` drops everything that belongs to
        older epochs. `kinds` are the groups of the job. `clock` returns seconds.
        """
        kind = kinds.get(context.identity.group)
        self.elastic = kind is not None and kind.elastic
        self.accepted = threading.Event()
        """Set once the hub has accepted a hello and its answer is applied. The runner may already call this process shortly before."""
        self._context = context
        self._identity = context.identity
        self._connect = connect
        self._start_over = start_over
        self._clock = clock
        self._count = 0
        self._heartbeat_seconds = FIRST_HEARTBEAT
        self._loop: asyncio.AbstractEventLoop | None = None
        self._report_now = asyncio.Event()

    # --- hello -----------------------------------------------------------------------------------------------------

    async def register(self) -> None:
        """Send `hello` to the hub until it is accepted. Raises Ended when the hub refuses this process for good."""
        self._loop = asyncio.get_running_loop()
        self._count += 1
        start, warned = self._clock(), 0.0
        self.report_alive()
        while True:
            elapsed = self._clock() - start
            self._check_hello_deadline(elapsed)
            if elapsed - warned >= _STILL_WAITING:
                warned = elapsed
                logger.warning("the hub %s has not accepted a hello for %.0f s", self._identity.hub, elapsed)
                self.report_alive()
            if await self._say_hello():
                return

    async def _say_hello(self) -> bool:
        """Return whether the hub accepted. Raises Ended when it never will."""
        try:
            hub = await self._connect()
            self._context.replace_hub(hub)
            answer: HelloAccepted | HelloRefused = await hub.call(
                "hello", self._report(), timeout=HELLO_TRY, idempotent=True
            )
        except FrameError as error:
            raise Ended(
                2, f"the hub speaks another wire version than {WIRE_VERSION}: {error}; use images of one release"
            ) from error
        except (DeadlineExceeded, InfrastructureError) as error:
            logger.debug("hello: %s", error)
            await asyncio.sleep(RETRY_PAUSE)
            return False
        except RLJobError as error:
            raise Ended(exit_code(error), f"the hub refused: {error}") from error
        if isinstance(answer, HelloRefused):
            await self._refused(answer)
            return False
        self._take_in(answer)
        return True

    def _check_hello_deadline(self, elapsed: float) -> None:
        """Raise Ended if a gang member of a local run has waited too long. Elastic members and members in a cluster wait without a limit."""
        if not self.elastic and not self._identity.in_cluster and elapsed > HELLO_DEADLINE:
            hub = self._identity.hub
            raise Ended(3, f"the hub {hub} must answer hello within {HELLO_DEADLINE:.0f} s, got nothing")

    def _report(self) -> HelloReport:
        identity, context = self._identity, self._context
        member = MemberView(
            name=identity.name,
            role=identity.role,
            group=identity.group,
            rank=identity.rank,
            pod=identity.pod,
            address=context.address,
            pid=os.getpid(),
            host_token=tokens.host_token(),
            incarnation=identity.incarnation,
            world_size=identity.world_size,
            state=context.state if context.retired else MemberState.JOINING,
        )
        return HelloReport(
            wire_version=WIRE_VERSION,
            uid=identity.uid,
            epoch=context.epoch,
            member=member,
            registration=self._count,
            device_uuids=context.device_uuids,
            python=sys.version.partition(" ")[0],
        )

    def _take_in(self, answer: HelloAccepted) -> None:
        self._heartbeat_seconds = answer.heartbeat_seconds
        job = self._context.job
        self._context.welcome(job or _read_job(answer.job), answer.files, answer.view)
        self.accepted.set()
        self._report_now.set()
        logger.info("registered with the hub at %s, epoch %s", self._identity.hub, self._context.epoch)

    async def _refused(self, answer: HelloRefused) -> None:
        """Start over at the epoch of a newer hub, or wait for the successor of an older one. Raises Ended for any other reason."""
        own_epoch, hub_epoch = self._context.epoch, answer.epoch
        if answer.reason == "older_epoch" and self.elastic:
            logger.info("the job is at epoch %s, this process was at %s: starting over", hub_epoch, own_epoch)
            await self._start_over(hub_epoch)
        elif answer.reason == "newer_epoch":
            logger.warning(
                "the hub is of epoch %s, older than ours (%s): waiting for its successor", hub_epoch, own_epoch
            )
            await asyncio.sleep(SUCCESSOR_PAUSE)
        else:
            code = 2 if answer.reason == "wire_version" else 3
            raise Ended(code, f"the hub refused hello: {answer.reason} (its epoch is {hub_epoch}, ours {own_epoch})")

    # --- heartbeats ------------------------------------------------------------------------------------------------

    async def keep_in_touch(self) -> None:
        """Send heartbeats until the hub is silent for `deadlines.lost` seconds or no longer knows this process.

        When it returns, the caller registers again. Raises Ended when a newer process has taken over the name of this one.

        The silence is the sum of the times of heartbeats without an answer. Each counts at most with its timeout: if it took longer, this
        process itself was paused, for example by imports or a busy machine, which says nothing about the hub.
        """
        silence = 0.0
        while silence < self._lost_seconds:
            if silence > RECONNECT:
                await self._reconnect()
            # Cleared before the report is made: what changes while it is under way is reported by the next one, at once.
            self._report_now.clear()
            self.report_alive()
            start = self._clock()
            try:
                answer = await self.send_heartbeat()
            except EpochFenced as error:
                raise Ended(3, str(error)) from error
            except (DeadlineExceeded, InfrastructureError) as error:
                logger.debug("heartbeat: %s", error)
                await asyncio.sleep(RETRY_PAUSE)
                silence += min(self._clock() - start, self._heartbeat_timeout + RETRY_PAUSE)
                continue
            if not answer.known:
                logger.warning("the hub does not know this process")
                return
            silence = 0.0
            self._context.hub_answered()
            self._context.num_serving = answer.num_serving
            self._context.update_view(answer.view)
            await self._pause()
        logger.warning("the hub has been silent for %.0f s", self._lost_seconds)

    async def _reconnect(self) -> None:
        """Resolve the name of the hub again and connect to it. The current connection stays if the name cannot be resolved."""
        try:
            self._context.reconnect_hub(await self._connect())
        except InfrastructureError as error:
            logger.debug("%s", error)

    async def send_heartbeat(self) -> HeartbeatAnswer:
        """Send one heartbeat to the hub and return its answer. May be called on any event loop."""
        beat = self._context.heartbeat()
        answer: HeartbeatAnswer = await self._context.hub_client().call(
            "heartbeat", self.id, beat, timeout=self._heartbeat_timeout, idempotent=True
        )
        return answer

    def report_soon(self) -> None:
        """Send the next heartbeat within GATHER_S. May be called from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._report_now.set)

    def report_alive(self) -> None:
        """Report to the supervisor of the pod that this process is alive, with its state and policy version."""
        events.report("alive", state=self._context.state.value, version=self._context.policy_version)

    @property
    def id(self) -> MemberId:
        """Name and incarnation of this process, by which the hub knows it."""
        return MemberId(name=self._identity.name, incarnation=self._identity.incarnation)

    @property
    def _heartbeat_timeout(self) -> float:
        return max(self._heartbeat_seconds, 1.0)

    @property
    def _lost_seconds(self) -> float:
        job = self._context.job
        return DEFAULT_LOST if job is None else job.spec.runtime.deadlines.lost

    async def _pause(self) -> None:
        try:
            await asyncio.wait_for(self._report_now.wait(), self._heartbeat_seconds)
        except TimeoutError:
            return
        await asyncio.sleep(GATHER_S)


def _read_job(text: str | None) -> "RLJob | None":
    if text is None:
        return None
    from rl_core.api import document
    from rl_core.api.job import RLJob

    try:
        return document.read(RLJob, text)
    except ValueError as error:
        raise Ended(
            2, f"the runner's job must be one that this version knows, got: {error}; use images of the same release"
        ) from error
