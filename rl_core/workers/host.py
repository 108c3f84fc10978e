"""The generic worker process: `python -m rl_core.workers.host`. It registers, keeps in touch, and holds one worker object.

    main thread: control loop (hello, heartbeats, signals)      handler loop: async methods      one thread: sync methods

The control loop runs no user code, so a busy worker keeps its heartbeat. Torch is imported only by classes that need it.

    start -> hello -(accepted)-> heartbeats -(hub silent for `lost` s, or the hub does not know us)-> reset -> hello ...
    fenced or refused for good -> exit 3 (wire version: 2)      SIGTERM -> drain -> goodbye -> exit 0
    SIGTERM at an actor pod of a cluster without the runner -> the runner saves and ends -> exit 3
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.api.errors import (
    ConfigError,
    DeadlineExceeded,
    EpochFenced,
    InfrastructureError,
    RLJobError,
    exit_code,
)
from rl_core.api.identity import Identity
from rl_core.api.user_code import load_extensions
from rl_core.observability import events
from rl_core.observability.logging import configure_logging
from rl_core.transports import shared_memory
from rl_core.transports.curve import KeyRing
from rl_core.transports.handlers import HandlerLoop
from rl_core.transports.rpc import RpcClient, RpcServer
from rl_core.transports.sockets import split_address
from rl_core.workers.cluster import ELASTIC_ROLES
from rl_core.workers.context import WorkerContext
from rl_core.workers.devices import device_uuids
from rl_core.workers.member import WIRE_VERSION, MemberState
from rl_core.workers.servant import Servant

if TYPE_CHECKING:
    from rl_core.api.job import RLJob

logger = logging.getLogger("rl_core.workers.host")

HELLO_TRY = 5.0
"""Seconds of one attempt to say hello."""
GOODBYE = 0.5
"""Seconds to say goodbye; a hub that is gone as well does not miss it."""
RECONNECT = 3.0
"""Silence of the hub after which it is looked up and connected to afresh, as its successor may be there."""
FIRST_HEARTBEAT = 2.0
"""Seconds between heartbeats until the hub says otherwise."""
DEFAULT_LOST = 15.0
DEFAULT_READY = 600.0
DEFAULT_DRAIN = 8.0


class Ended(Exception):
    """The process must end with `code`."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Host:
    """One worker process from start to end."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.keys = KeyRing(Path(identity.curve_dir), identity.role) if identity.curve_dir else None
        self.context = WorkerContext(identity, keys=self.keys)
        self.context.device_uuids = device_uuids(identity.visible_devices)
        self.elastic = identity.role in ELASTIC_ROLES
        self._in_cluster = identity.in_cluster
        self._report_now = asyncio.Event()
        self._stop = asyncio.Event()
        self._heartbeat_seconds = FIRST_HEARTBEAT
        self._welcomed = threading.Event()
        """Set when the hub's answer to hello was taken in; a runner may call before it was."""
        self._extended = False
        self._signals = 0
        self._registrations = 0
        self._retiring: asyncio.Future[None] | None = None
        self._callers: dict[str, set[str]] = {}
        """Methods of this process by the role that may call them."""

    async def run(self) -> int:
        """Serve until the job ends for this process; return the exit code."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        self.context.on_change = lambda: _wake(loop, self._report_now)
        self.servant = await self._on_handlers(self._make_servant())
        self._start_server()
        _connect_channel(self.identity, self.keys, self.context.epoch)
        try:
            await self._until_stopped(self._serve())
            await self._leave()
            return 0
        except Ended as end:
            logger.error("ending with code %s: %s", end.code, end)
            return end.code
        finally:
            self.context.close()

    async def _serve(self) -> None:
        while True:
            await self._register()
            await self._keep_in_touch()
            await self._reset(None)

    # --- hello -----------------------------------------------------------------------------------------------------

    async def _register(self) -> None:
        """Say hello until the hub accepts. Raises Ended when it never will."""
        began, told = time.monotonic(), 0.0
        self._registrations += 1
        self._beat()
        while True:
            waited = time.monotonic() - began
            if not self.elastic and not self._in_cluster and waited > DEFAULT_READY:
                raise Ended(
                    3, f"the hub {self.identity.hub} must answer hello within {DEFAULT_READY:.0f} s, got nothing"
                )
            if waited - told >= 10:
                told = waited
                logger.warning("the hub %s has not accepted a hello for %.0f s", self.identity.hub, waited)
                self._beat()
            self.context.hub = self._connect()
            try:
                answer = await self.context.hub.call("hello", self._hello_report(), timeout=HELLO_TRY, idempotent=True)
            except (DeadlineExceeded, InfrastructureError) as error:
                logger.debug("hello: %s", error)
                self.context.hub.close()
                continue
            except RLJobError as error:
                raise Ended(exit_code(error), f"the hub refused: {error}") from error
            if answer["accepted"]:
                await self._accepted(answer)
                return
            await self._refused(answer)
            self.context.hub.close()

    def _connect(self) -> RpcClient:
        client = RpcClient(self.identity.hub, self.keys, self.identity, service="hub")
        client.set_epoch(self.context.epoch)
        return client

    def _hello_report(self) -> dict[str, Any]:
        identity, context = self.identity, self.context
        return {
            "uid": identity.uid,
            "epoch": context.epoch,
            "role": identity.role,
            "group": identity.group,
            "rank": identity.rank,
            "world_size": identity.world_size,
            "incarnation": list(identity.incarnation),
            "registration": self._registrations,
            "address": context.address,
            "pod": identity.pod,
            "pid": os.getpid(),
            "host_token": shared_memory.host_token(),
            "versions": {"python": sys.version.split()[0]},
            "device_uuids": list(context.device_uuids),
            "wire_version": WIRE_VERSION,
            **({"state": context.state.value} if context.retired else {}),
        }

    async def _accepted(self, answer: dict[str, Any]) -> None:
        context = self.context
        self._heartbeat_seconds = answer["heartbeat_seconds"]
        if answer["job"] is not None and context.job is None:
            context.job = _read_job(answer["job"])
        context.files = dict(answer["files"]) or context.files
        context.forget_view()
        context.update_view(answer["view"])
        self._welcomed.set()
        self._report_now.set()
        logger.info("registered with the hub at %s, epoch %s", self.identity.hub, context.epoch)

    async def _refused(self, answer: dict[str, Any]) -> None:
        reason, epoch = answer["reason"], answer["epoch"]
        if reason == "older_epoch" and self.elastic:
            logger.info("the job is at epoch %s, this process was at %s: starting over", epoch, self.context.epoch)
            await self._reset(epoch)
        elif reason == "newer_epoch":
            logger.warning(
                "the hub is of epoch %s, older than ours (%s): waiting for its successor", epoch, self.context.epoch
            )
            await asyncio.sleep(1.0)
        else:
            raise Ended(
                2 if reason == "wire_version" else 3,
                f"the hub refused hello: {reason} (its epoch is {epoch}, ours {self.context.epoch})",
            )

    # --- heartbeats ------------------------------------------------------------------------------------------------

    async def _keep_in_touch(self) -> None:
        """Send heartbeats; return when the hub is silent for `lost` seconds or has forgotten us."""
        assert self.context.hub is not None
        last_heard = time.monotonic()
        while time.monotonic() - last_heard < self._lost_seconds:
            self._report_now.clear()
            self._beat()
            try:
                answer = await self._report(self.context.hub)
            except EpochFenced as error:
                raise Ended(3, str(error)) from error
            except (DeadlineExceeded, InfrastructureError) as error:
                logger.debug("heartbeat: %s", error)
                await asyncio.sleep(min(0.2, self._heartbeat_seconds))
                if time.monotonic() - last_heard > RECONNECT:
                    self.context.hub.close()
                    self.context.hub = self._connect()
                continue
            if "refused" in answer:
                logger.warning("the hub does not know this process (%s)", answer["refused"])
                return
            last_heard = time.monotonic()
            self.context.update_view(answer.get("view"))
            await self._pause()
        logger.warning("the hub has been silent for %.0f s", self._lost_seconds)

    async def _report(self, hub: RpcClient) -> dict[str, Any]:
        timeout = max(self._heartbeat_seconds, 1.0)
        name, incarnation = self.identity.name, list(self.identity.incarnation)
        answer: dict[str, Any] = await hub.call(
            "heartbeat", name, incarnation, self.context.report(), timeout=timeout, idempotent=True
        )
        return answer

    async def _tell_ready(self) -> None:
        """Have the hub know the new state before the runner hears that the construction is done. On the handlers' loop."""
        if self.context.hub is not None:
            try:
                await self._report(self.context.hub)
            except (DeadlineExceeded, InfrastructureError) as error:
                logger.debug("the next heartbeat will tell: %s", error)

    async def _pause(self) -> None:
        try:
            await asyncio.wait_for(self._report_now.wait(), self._heartbeat_seconds)
        except TimeoutError:
            return

    @property
    def _lost_seconds(self) -> float:
        return self.context.job.spec.runtime.deadlines.lost if self.context.job is not None else DEFAULT_LOST

    def _beat(self) -> None:
        events.report("alive", state=self.context.state.value, version=self.context.policy_version)

    # --- epochs and ends -------------------------------------------------------------------------------------------

    async def _reset(self, epoch: int | None) -> None:
        """Drop everything of the old epoch; `epoch` None: the hub is gone and its successor will tell."""
        if not self.elastic and epoch is None:
            raise Ended(3, "the hub is gone, and this role ends with it")
        context = self.context
        if epoch is not None:
            context.enter_epoch(epoch)
            self._server.set_epoch(epoch)
        if self.servant.worker is not None:
            context.set_state(MemberState.JOINING)
        context.set_policy_version(None, None)
        await self._on_handlers(self.servant.new_epoch(context.epoch))
        context.close()
        if epoch is None and context.hub is not None:
            context.hub.close()
        _connect_channel(self.identity, self.keys, context.epoch)

    async def _retire(self) -> None:
        """RPC of the runner: begin to drain for good. Returns at once; the heartbeats tell `draining`, then `drained`."""
        if not self.context.retired:
            self.context.retired = True
            self.context.set_state(MemberState.DRAINING)
            self._retiring = asyncio.ensure_future(self._drain_for_good())

    async def _drain_for_good(self) -> None:
        """Drain within `drainSeconds`, then rest without work until the pod is deleted. On the handlers' loop."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.servant.drain(), self._drain_seconds)
        self.context.set_state(MemberState.DRAINED)

    @property
    def _drain_seconds(self) -> float:
        return self.context.job.spec.runtime.drain_seconds if self.context.job is not None else DEFAULT_DRAIN

    async def _leave(self) -> None:
        """Drain within `drainSeconds` and say goodbye."""
        self.context.set_state(MemberState.DRAINING)
        self._beat()
        try:
            await asyncio.wait_for(self._on_handlers(self.servant.drain()), self._drain_seconds)
            if self.context.hub is not None:
                await self.context.hub.call(
                    "goodbye", self.identity.name, list(self.identity.incarnation), timeout=GOODBYE
                )
            await asyncio.wait_for(self._on_handlers(self.servant.close()), 2.0)
        except (TimeoutError, RLJobError) as error:
            logger.info("ended without a goodbye, the hub is gone or slow: %s", error or "time is up")

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(128 + signal.SIGTERM)
        if self._saved_by_runner:
            logger.info("asked to end: the runner saves first, this process ends with it")
            self.context.set_state(MemberState.DRAINING)
        else:
            self._stop.set()

    @property
    def _saved_by_runner(self) -> bool:
        """Return whether a checkpoint of the whole gang is to be awaited: an actor of another pod than the runner's.

        The runner sees `draining`, saves and ends; then the hub is silent and this process ends with code 3. In the runner's own pod
        the supervisor has ended the runner before; a local run ends all its pods by itself.
        """
        identity = self.identity
        return (
            identity.in_cluster and identity.role == "actor" and identity.pod_index > 0 and self.context.hub is not None
        )

    async def _until_stopped(self, work: Any) -> None:
        serving = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            serving.cancel()
            stopped.cancel()

    # --- wiring ----------------------------------------------------------------------------------------------------

    async def _make_servant(self) -> Servant:
        return Servant(
            self.context,
            before_build=self._load_extensions,
            on_methods=self._serve_methods,
            on_ready=self._tell_ready,
        )

    def _load_extensions(self) -> None:
        """Import the job's extensions, once. In the worker's thread: an import may take minutes, and heartbeats must go on."""
        if not self._welcomed.wait(DEFAULT_READY):
            raise InfrastructureError(f"the hub's answer to hello must come within {DEFAULT_READY:.0f} s, got none")
        if self.context.job is not None and not self._extended:
            load_extensions(self.context.job.spec.extensions)
            self._extended = True

    def _serve_methods(self, methods: dict[str, Callable[..., Any]]) -> None:
        """Serve the methods of the worker object, to the roles that it names."""
        assert self.servant.worker is not None
        self._callers["runner"] |= methods.keys()
        for role, names in self.servant.worker.peer_methods.items():
            self._callers.setdefault(role, set()).update(names)
        self._server.add_handlers(methods)

    def _start_server(self) -> None:
        host = "127.0.0.1" if self.keys is None or split_address(self.identity.hub)[0] == "127.0.0.1" else "0.0.0.0"
        handlers = {"construct": self.servant.construct, "execute": self.servant.execute, "retire": self._retire}
        bind = f"tcp://{host}:{self.identity.rpc_port}"
        self._callers = {"runner": set(handlers)}
        allowed = self._callers if self.keys is not None else None
        self._server = RpcServer(
            bind, handlers, self.keys, self.identity, max_concurrency=1024, allowed=allowed
        ).start()
        own, port = split_address(self._server.address)
        self.context.address = f"tcp://{(self.identity.pod_ip or own) if host == '0.0.0.0' else own}:{port}"

    async def _on_handlers(self, work: Any) -> Any:
        """Run a coroutine on the loop of RPC handlers, where the worker's async code lives."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, HandlerLoop.shared().loop))


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


def _read_job(told: dict[str, Any]) -> "RLJob":
    from rl_core.api.job import RLJob

    try:
        return RLJob.model_validate(told)
    except ValueError as error:
        raise Ended(
            2, f"the runner must tell a job as this version knows it, got: {error}; use images of the same release"
        ) from error


def _connect_channel(identity: Identity, keys: KeyRing | None, epoch: int) -> None:
    """Connect to the channel server, in place of an earlier connection."""
    if identity.channel:
        from rl_core.channel import client

        client.configure(identity.channel, keys, identity).set_epoch(epoch)


def main() -> int:
    """Run a worker process; return its exit code."""
    faulthandler.enable()
    events.descriptor()
    try:
        identity = Identity.from_env()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    configure_logging(identity)
    try:
        return asyncio.run(Host(identity).run())
    except RLJobError as error:
        logger.error("%s", error)
        return exit_code(error)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # method threads may still run user code nobody waits for
