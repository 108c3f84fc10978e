"""The generic worker process, `python -m rl_core.workers.host`. It registers with the hub, sends heartbeats, and holds one worker object.

    main thread: control loop (hello, heartbeats, signals)      handler loop: async methods      one thread: sync methods

The control loop runs no user code, so that a busy worker still sends heartbeats. Torch is imported only by the classes that need it.

    start -> register -> keep in touch -(the hub is silent or does not know us)-> reset -> register ...          (registration.py)
    refused for good, or replaced by a newer process -> exit 3      the hub has another wire version -> exit 2
    SIGTERM -> drain -> goodbye -> exit 0

An actor pod that does not contain the runner cannot save a checkpoint by itself. On SIGTERM in Kubernetes it reports `draining` and goes
on. The runner then saves with the help of all actors and ends, and the actor ends with exit code 3.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rl_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError, RLJobError, exit_code
from rl_core.api.identity import Identity
from rl_core.api.user_code import load_extensions
from rl_core.messages.members import MemberState
from rl_core.observability import events
from rl_core.observability.logging import configure_logging
from rl_core.plan.groups import ACTOR, SCRIPT_WORKERS, kinds_of_environment
from rl_core.plan.placement import Placement
from rl_core.transports.curve import KeyRing
from rl_core.transports.handlers import HandlerLoop
from rl_core.transports.names import numeric_address
from rl_core.transports.rpc import RpcClient, RpcServer
from rl_core.transports.sockets import split_address
from rl_core.workers.context import WorkerContext
from rl_core.workers.devices import device_uuids
from rl_core.workers.method_server import MethodServer
from rl_core.workers.registration import HELLO_DEADLINE, Ended, Registration

logger = logging.getLogger("rl_core.workers.host")

GOODBYE = 0.5
"""Seconds that the `goodbye` call may take. The hub may have ended too."""
CLOSE = 2.0
"""Seconds that the `close` hook of the worker object may take."""
DEFAULT_DRAIN = 8.0
"""Seconds to drain for a process that has not received a job."""
MOST_CALLS = 1024
"""Largest number of RPC calls in progress. The method server has lower limits of its own."""


class Host:
    """One worker process from its start to its end."""

    def __init__(self, identity: Identity, placement: Placement) -> None:
        """Start the RPC server of the process.

        `identity` and `placement` come from the environment that the launcher has set. Raises ConfigError when an assigned accelerator
        cannot be found.
        """
        self.identity = identity
        kinds = kinds_of_environment()
        self._keys = KeyRing(Path(identity.curve_dir), identity.role, kinds) if identity.curve_dir else None
        self._callers: dict[str, set[str]] = {"runner": {"construct", "execute", "retire"}}
        """Methods of this process by the group that may call them."""
        self._local = self._keys is None or split_address(identity.hub)[0] == "127.0.0.1"
        """Whether the whole job runs on the loopback interface of this machine."""
        self._server = self._start_server()
        self._context = WorkerContext(
            identity,
            placement=placement,
            keys=self._keys,
            address=self._reachable_address(),
            device_uuids=device_uuids(tuple(placement.visible_accelerators)),
            on_change=lambda: self._registration.report_soon(),
        )
        self._registration = Registration(self._context, connect=self._connect_hub, start_over=self._reset, kinds=kinds)
        self._methods = MethodServer(
            self._context,
            before_build=self._load_extensions,
            on_methods=self._serve_methods,
            on_ready=self._report_ready,
            requests=self._server,
        )
        self._stop = asyncio.Event()
        self._extended = False
        self._signals = 0
        self._retiring: asyncio.Future[None] | None = None

    async def run(self) -> int:
        """Register and serve until this process must end; return its exit code."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        methods = self._methods
        self._server.add_handlers({"construct": methods.construct, "execute": methods.execute, "retire": self._retire})
        self._connect_channel()
        try:
            await self._until_stopped(self._serve())
            await self._leave()
            return 0
        except Ended as end:
            logger.error("ending with code %s: %s", end.code, end)
            return end.code
        finally:
            self._context.close()

    async def _serve(self) -> None:
        while True:
            await self._registration.register()
            await self._registration.keep_in_touch()
            if not self._registration.elastic:
                raise Ended(3, "the hub is gone, and this role ends with it")
            await self._reset(self._context.epoch)

    async def _until_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        serving = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            serving.cancel()
            stopped.cancel()

    # --- epochs and ends -------------------------------------------------------------------------------------------

    async def _reset(self, epoch: int) -> None:
        """Drop everything that belongs to the old hub and enter `epoch`. If only the next hub knows the new epoch, pass the current one."""
        context = self._context
        context.enter_epoch(epoch)
        self._server.set_epoch(epoch)
        if self._methods.worker is not None:
            context.set_state(MemberState.JOINING)
        context.set_policy_version(None, None)
        await _on_handlers(self._methods.new_epoch(epoch))
        context.close()
        self._connect_channel()

    async def _retire(self) -> None:
        """Handle the runner's request to drain and take no more work. Returns at once; the heartbeats report `draining`, then `drained`."""
        if not self._context.retired:
            self._context.retire()
            self._retiring = asyncio.ensure_future(self._drain_for_good())

    async def _drain_for_good(self) -> None:
        """Drain within `drainSeconds`, then stay idle until the pod is deleted. Runs on the event loop of the RPC handlers."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._methods.drain(), self._drain_seconds)
        self._context.set_state(MemberState.DRAINED)

    @property
    def _drain_seconds(self) -> float:
        job = self._context.job
        return DEFAULT_DRAIN if job is None else job.spec.runtime.drain_seconds

    async def _leave(self) -> None:
        """Drain within `drainSeconds` and say goodbye."""
        self._context.set_state(MemberState.DRAINING)
        self._registration.report_alive()
        try:
            await asyncio.wait_for(_on_handlers(self._methods.drain()), self._drain_seconds)
            if self._context.hub is not None:
                await self._context.hub.call("goodbye", self._registration.id, timeout=GOODBYE)
            await asyncio.wait_for(_on_handlers(self._methods.close()), CLOSE)
        except (TimeoutError, RLJobError) as error:
            logger.info("the runner has already ended (%s)", error or "it did not answer")

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(128 + signal.SIGTERM)
        if self._saved_by_runner:
            logger.info("asked to end: the runner saves first, this process ends with it")
            self._context.set_state(MemberState.DRAINING)
        else:
            self._stop.set()

    @property
    def _saved_by_runner(self) -> bool:
        """Return whether this process waits for a checkpoint of the whole gang: it is an actor of another pod than the runner's.

        The runner sees the state `draining`, saves and ends. The hub is silent then, and this process ends with code 3. In the runner's own pod
        the supervisor has ended the runner before; a local run ends all its pods by itself.
        """
        identity = self.identity
        registered = self._context.hub is not None
        return identity.in_cluster and identity.group == ACTOR and identity.pod_index > 0 and registered

    # --- what the method server calls ---------------------------------------------------------------------------------------

    def _load_extensions(self) -> None:
        """Import the modules in `spec.extensions`, once. Runs in the worker's thread, because an import may take minutes."""
        if not self._registration.accepted.wait(HELLO_DEADLINE):
            raise InfrastructureError(f"the hub's answer to hello must come within {HELLO_DEADLINE:.0f} s, got none")
        if self._context.job is not None and not self._extended:
            load_extensions(self._context.job.spec.extensions)
            self._extended = True

    def _serve_methods(self, methods: dict[str, Callable[..., Any]]) -> None:
        """Serve the methods of the worker object by RPC.

        The runner may call all of them, and other groups those in `peer_methods`. In a script all workers may call all methods, because the
        same user has started them.
        """
        assert self._methods.worker is not None
        self._callers["runner"] |= methods.keys()
        for role, names in self._methods.worker.peer_methods.items():
            self._callers.setdefault(role, set()).update(names)
        if self.identity.role == SCRIPT_WORKERS:
            self._callers.setdefault(SCRIPT_WORKERS, set()).update(methods)
        self._server.add_handlers(methods)

    async def _report_ready(self) -> None:
        """Send the new state to the hub, before `construct` is answered. Runs on the event loop of the RPC handlers."""
        try:
            await self._registration.send_heartbeat()
        except (DeadlineExceeded, InfrastructureError) as error:
            logger.debug("the next heartbeat will report it: %s", error)

    # --- connections -----------------------------------------------------------------------------------------------

    def _start_server(self) -> RpcServer:
        bind = f"tcp://{'127.0.0.1' if self._local else '0.0.0.0'}:{self.identity.rpc_port}"
        allowed = self._callers if self._keys is not None else None
        return RpcServer(bind, {}, self._keys, self.identity, max_concurrency=MOST_CALLS, allowed=allowed).start()

    def _reachable_address(self) -> str:
        """Return the address at which other processes reach the RPC server. A socket on all interfaces does not know the pod's address."""
        address, pod_ip = self._server.address, self.identity.pod_ip
        return address if self._local or not pod_ip else f"tcp://{pod_ip}:{split_address(address)[1]}"

    async def _connect_hub(self) -> RpcClient:
        """Return a new client of the hub. Raises InfrastructureError when the name of its host is not resolved in time."""
        client = RpcClient(await numeric_address(self.identity.hub), self._keys, self.identity, service="hub")
        client.set_epoch(self._context.epoch)
        return client

    def _connect_channel(self) -> None:
        """Connect to the channel server. This replaces an earlier connection."""
        if self.identity.channel:
            from rl_core.channel import client

            connection = client.configure(self.identity.channel, self._keys, self.identity)
            connection.set_epoch(self._context.epoch)
            connection.waiting = self._context.waiting


async def _on_handlers(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on the event loop of the RPC handlers, which also runs the async methods of the worker, and wait for it."""
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, HandlerLoop.shared().loop))


async def _run(identity: Identity, placement: Placement) -> int:
    return await Host(identity, placement).run()


def main() -> int:
    """Run a worker process; return its exit code."""
    faulthandler.enable()
    events.descriptor()  # Called before anything is started that could inherit the variable.
    try:
        identity, placement = Identity.from_env(), Placement.from_env()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    configure_logging(identity)
    try:
        return asyncio.run(_run(identity, placement))
    except RLJobError as error:
        logger.error("%s", error)
        return exit_code(error)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # Threads of methods may still run user code, which nobody waits for.
