"""The parent process of a pod: starts its processes, restarts those that may be restarted, ends all of them, and records why.

`python -m rl_core.launch.pod` runs it in a container and on one machine alike. Invariant: when `run` returns, or when the supervisor or its
launcher is killed, no process of the pod is left.

    child ends: 0 -> done | restartable and budget left -> started again, incarnation + 1 | else -> the pod ends with its code
    SIGTERM: runner first (it saves), then the others, SIGKILL before the grace ends; a second SIGTERM kills at once
"""

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.api.errors import ConfigError
from rl_core.observability import events
from rl_core.workers import devices, processes, termination
from rl_core.workers.budget import RestartBudget
from rl_core.workers.child import Child
from rl_core.workers.health import HealthServer
from rl_core.workers.probes import Probes, kind_of

if TYPE_CHECKING:
    from rl_core.plan.launch import PodPlan, ProcessPlan

logger = logging.getLogger(__name__)

DEFAULT_GRACE = 120.0
GANG_GRACE = 2.0
"""Seconds that the other processes of a pod have to end after one has failed. They have none after the runner, since nothing is saved
without it.
"""
_TICK = 1.0
_WARM_UP = 5.0
"""Seconds after the start at which the module for reports to the hub is imported, so that the end of a child is later reported without
delay.
"""


class ExitCode(IntEnum):
    """Exit codes of a process and of a pod. A process that a signal n ended has the code 128 + n.

    - DONE: the process has finished its work.
    - CONFIG: the job's configuration is wrong; a restart would fail again.
    - INFRASTRUCTURE: any other failure, which a restart may cure.
    - DATA: the job's data is wrong; a restart would fail again.
    """

    DONE = 0
    CONFIG = 2
    INFRASTRUCTURE = 3
    DATA = 4

    @classmethod
    def of(cls, code: int) -> int:
        """Return `code` if it is one of these codes or that of a signal, else INFRASTRUCTURE."""
        is_own = code in (cls.DONE, cls.CONFIG, cls.DATA) or processes.is_signalled(code)
        return code if is_own else cls.INFRASTRUCTURE


class Supervisor:
    """Runs the processes of one pod, or of one of its containers."""

    def __init__(
        self,
        pod_plan: "PodPlan",
        *,
        container: str | None = None,
        environ: Mapping[str, str] | None = None,
        grace: float | None = None,
        host: str | None = None,
        health_port: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to run `pod_plan`; nothing starts before `run`.

        - `container`: name of the container whose processes are run; None runs those of all containers.
        - `environ`: environment for the processes; None takes that of this process.
        - `grace`: seconds from SIGTERM to the end of the pod; None takes RLJOB_GRACE_SECONDS, else 120.
        - `host`: address of the health server; None takes RLJOB_HEALTH_HOST, else all interfaces.
        - `health_port`: its port, 0 for a free one; None takes RLJOB_HEALTH_PORT, else the planned port.

        Raises ConfigError when there is no process to run.
        """
        self.plan = pod_plan
        self._environ = dict(os.environ if environ is None else environ)
        self._processes = [p for c in pod_plan.containers if container in (None, c.name) for p in c.processes]
        if not self._processes:
            raise ConfigError(
                f"pod {pod_plan.name} must have processes to run in container {container or 'any'}, got none"
            )
        self._grace = float(self._environ.get("RLJOB_GRACE_SECONDS", DEFAULT_GRACE)) if grace is None else grace
        planned_port = self._processes[0].env.get("RLJOB_HEALTH_PORT", "7703")
        self._port = int(self._environ.get("RLJOB_HEALTH_PORT", planned_port)) if health_port is None else health_port
        self._host = self._environ.get("RLJOB_HEALTH_HOST", "0.0.0.0") if host is None else host
        self._clock = clock
        self._earlier_children = processes.children()
        """Children that this process had before. The supervisor leaves them alone."""
        self._children: dict[str, Child] = {}
        self._restarts: dict[str, int] = {}
        self.probes = Probes(pod_plan, self._processes, self._children, self._restarts, clock=clock)
        self._budgets = {process.name: RestartBudget(clock=clock) for process in self._processes}
        self._plans = {process.name: process for process in self._processes}
        self._code: int | None = None
        """Exit code of the pod. None until it is decided; afterwards the remaining processes are being ended."""
        self.reason = ""
        """Why the pod ended."""
        self._ending_process = ""
        """Name of the process whose end ended the pod. Empty if there is none."""
        self._tail = ""
        """Last output lines of that process."""
        self._launcher: socket.socket | None = None
        self._signals = 0
        self._asked_to_end: set[int] = set()
        """Pids to which SIGTERM was sent."""
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self) -> int:
        """Run the pod until it ends and return its exit code: an ExitCode, or 128 + n when signal n ended a process."""
        return asyncio.run(self._main())

    def stop(self) -> None:
        """Ask the pod to end, as SIGTERM does. The second call kills all processes. May be called from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_signal)

    # --- life ------------------------------------------------------------------------------------------------------

    async def _main(self) -> int:
        self._loop = asyncio.get_running_loop()
        processes.adopt_orphans()
        self._listen()
        health = HealthServer(
            {"/healthz": self.probes.healthz, "/readyz": self.probes.readyz, "/metrics": self.probes.metrics}
        )
        try:
            await health.start(self._host, self._port)
            events.report("health", port=health.port)
            await asyncio.to_thread(self._check_devices)
            for process in self._processes:
                self._start(process)
            warm_up = self._loop.create_task(self._warm_up())
            await self._until_ended()
            warm_up.cancel()
        except (ConfigError, OSError) as error:
            self._decide(ExitCode.CONFIG if isinstance(error, ConfigError) else ExitCode.INFRASTRUCTURE, str(error))
            logger.error("%s", error)
        finally:
            self._kill_all()
            await self._reap_all()
            health.close()
        code = ExitCode.DONE if self._code is None else self._code
        self._write_termination(code)
        return int(code)

    def _check_devices(self) -> None:
        """Raise ConfigError if the container has fewer accelerators than its processes need. Called before any process starts."""
        visible = [process.visible_devices for process in self._processes]
        if any(visible):
            devices.check_visible_devices(visible, exclusive="RLJOB_POD_IP" in self._environ)

    async def _until_ended(self) -> None:
        while any(child.running for child in self._children.values()) or self._tasks:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _TICK)
            self._reap_orphans()

    async def _warm_up(self) -> None:
        if any("RLJOB_HUB" in self._env_of(process) for process in self._processes):
            await asyncio.sleep(_WARM_UP)
            await asyncio.to_thread(importlib.import_module, "rl_core.workers.report")

    def _listen(self) -> None:
        assert self._loop is not None
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(signum, self._on_signal)
        fd = events.descriptor()
        if fd is not None and stat.S_ISSOCK(os.fstat(fd).st_mode):
            self._launcher = socket.socket(fileno=os.dup(fd))
            self._launcher.setblocking(False)
            self._loop.add_reader(self._launcher, self._on_launcher)

    def _start(self, process: "ProcessPlan") -> None:
        restarts = self._restarts.get(process.name, 0)
        env = self._env_of(process)
        attempt = env.get("RLJOB_INCARNATION", "0").partition(".")[0]
        env |= {"RLJOB_INCARNATION": f"{attempt}.{restarts}", "PYTHONUNBUFFERED": "1"}
        child = Child(
            process.name,
            [sys.executable if argument == "python" else argument for argument in process.command],
            env,
            on_output=lambda line: self._relay(process.name, line),
            on_event=self._forward,
            on_end=self._on_end,
            clock=self._clock,
        )
        self._children[process.name] = child
        events.report("started", name=process.name, pid=child.pid, rank=process.rank, process=kind_of(process))

    def _env_of(self, process: "ProcessPlan") -> dict[str, str]:
        return {**self._environ, **process.env}

    def _on_end(self, child: Child) -> None:
        code = child.returncode
        assert code is not None
        process = self._plans[child.name]
        reason = _describe(child.name, code)
        (logger.info if code == 0 else logger.warning)("%s", reason)
        events.report("ended", name=child.name, pid=child.pid, code=code, reason=reason)
        self._kill_orphans()  # before a restart: what an ended child left behind may hold its devices and ports
        self._remove_shared_memory()
        self._changed.set()
        if self._code is not None:
            return
        ended_by_request = self._signals > 0
        report = None
        if kind_of(process) == "worker" and not ended_by_request and self._env_of(process).get("RLJOB_HUB"):
            restarts = self._restarts.get(process.name, 0)
            report = self._spawn_task(asyncio.to_thread(self._report_to_hub, process, restarts, code))
        if code == ExitCode.DONE:
            if kind_of(process) == "runner":
                self._decide(ExitCode.DONE, reason)
                self._spawn_task(self._end_others(self._grace))
        elif (
            process.restart
            and not ended_by_request
            and code not in (ExitCode.CONFIG, ExitCode.DATA)
            and self._budgets[child.name].take()
        ):
            self._spawn_task(self._restart(process, report))
        else:
            self._decide(ExitCode.of(code), reason, child)
            if not ended_by_request:
                self._spawn_task(self._end_others(0.0 if kind_of(process) == "runner" else GANG_GRACE))

    async def _restart(self, process: "ProcessPlan", report: "asyncio.Task[None] | None") -> None:
        """Start `process` again after the pause of its restart budget and after `report`. Do nothing if the pod is ending then.

        `report` tells the hub of the end of the process; None if nothing is reported. A successor that registered with the hub before it would hide
        the exit code: callers would only see that the process was replaced.
        """
        pause = asyncio.sleep(self._budgets[process.name].pause)
        await (pause if report is None else asyncio.gather(pause, report))
        # Meanwhile the pod may have failed, or been asked to end: nothing is started then.
        if self._code is None and not self._signals:
            self._restarts[process.name] = self._restarts.get(process.name, 0) + 1
            self._start(process)

    def _decide(self, code: int, reason: str, child: Child | None = None) -> None:
        if self._code is None:
            self._code, self.reason = code, reason
            if child is not None:
                self._ending_process, self._tail = child.name, b"\n".join(child.tail).decode(errors="replace")
            events.report("exit", code=int(code), reason=reason, tail=self._tail[-2000:])

    # --- ending ----------------------------------------------------------------------------------------------------

    def _on_signal(self) -> None:
        self._signals += 1
        self._changed.set()
        if self._signals == 1:
            logger.info("asked to end: %.0f s of grace", self._grace)
            self._spawn_task(self._drain())
        else:
            self._decide(ExitCode.INFRASTRUCTURE, "killed by a second signal")
            self._kill_all()

    def _on_launcher(self) -> None:
        assert self._launcher is not None
        try:
            launcher_gone = not self._launcher.recv(4096)
        except BlockingIOError:
            return
        except ConnectionError:
            launcher_gone = True
        if launcher_gone:
            assert self._loop is not None
            self._loop.remove_reader(self._launcher)
            logger.error("the launcher is gone: ending the pod")
            self._decide(ExitCode.INFRASTRUCTURE, "the launcher is gone")
            self._kill_all()

    async def _drain(self) -> None:
        """End the runner first, because it needs the other processes to save, then end these within the rest of the grace period."""
        # The kubelet kills the container when the grace is over: we kill a little earlier, to write down why the pod ended.
        deadline = self._clock() + self._grace - min(5.0, self._grace / 4)
        runner = [c for name, c in self._children.items() if kind_of(self._plans[name]) == "runner" and c.running]
        self._ask_to_end(runner)
        await self._wait_ended(runner, deadline)
        await self._end_others(max(deadline - self._clock(), 0.0))

    async def _end_others(self, seconds: float) -> None:
        """Send SIGTERM to all running processes, and SIGKILL to those that still run after `seconds`."""
        running = [child for child in self._children.values() if child.running]
        self._ask_to_end(running)
        await self._wait_ended(running, self._clock() + seconds)
        for child in running:
            if child.running:
                logger.warning("%s did not end in time: SIGKILL", child.name)
                child.kill()

    def _ask_to_end(self, children: list[Child]) -> None:
        """Send SIGTERM to each child, but not twice: children take a second SIGTERM as a request to end at once.

        This may be called twice, for the end of the runner and for a signal to this process.
        """
        for child in children:
            if child.pid not in self._asked_to_end:
                self._asked_to_end.add(child.pid)
                child.signal(signal.SIGTERM)

    async def _wait_ended(self, children: list[Child], deadline: float) -> None:
        while any(child.running for child in children) and self._clock() < deadline:
            await asyncio.sleep(0.05)

    def _kill_all(self) -> None:
        for child in self._children.values():
            if child.running:
                child.kill()
        self._kill_orphans()

    async def _reap_all(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._wait_ended(list(self._children.values()), self._clock() + 5)
        for _ in range(20):  # each generation that is killed leaves its own children to us
            self._kill_orphans()
            if not self._orphans():
                return
            await asyncio.sleep(0.05)

    def _orphans(self) -> set[int]:
        own_pids = {child.pid for child in self._children.values() if child.running}
        return processes.children() - own_pids - self._earlier_children

    def _kill_orphans(self) -> None:
        """Kill and reap the descendants of ended children. The kernel has made them children of this process."""
        for pid in self._orphans():
            processes.kill(pid, signal.SIGKILL)
            processes.reap(pid)

    def _reap_orphans(self) -> None:
        for pid in self._orphans():
            processes.reap(pid)

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the supervisor failed", exc_info=error)
            self._decide(ExitCode.INFRASTRUCTURE, f"the supervisor failed: {error}")
            self._kill_all()

    # --- reporting -------------------------------------------------------------------------------------------------

    def _relay(self, name: str, line: bytes) -> None:
        prefix = f"[{name}] ".encode() if len(self._processes) > 1 else b""
        try:
            sys.stdout.buffer.write(prefix + line + b"\n")
            sys.stdout.buffer.flush()
        except (OSError, AttributeError):  # the log's disk is full, or there is no stdout: neither must end a run
            return

    def _forward(self, child: Child, event: dict[str, Any]) -> None:
        events.report(event.pop("event"), **{"name": child.name, **event})

    def _report_to_hub(self, process: "ProcessPlan", restarts: int, code: int) -> None:
        from rl_core.workers.report import report_child_ended

        report_child_ended(self._env_of(process), restarts, code)

    def _remove_shared_memory(self) -> None:
        if any("RLJOB_UID" in environ for environ in (self._environ, *(process.env for process in self._processes))):
            self._spawn_task(asyncio.to_thread(_remove_orphaned_segments))

    def _write_termination(self, code: int) -> None:
        termination.write(
            Path(self._environ.get("RLJOB_TERMINATION_LOG", termination.DEFAULT_PATH)),
            reason=self.reason or ("asked to end" if self._signals else ""),
            code=code,
            process=self._ending_process,
            tail=self._tail,
            summary=self._summary(),
        )

    def _summary(self) -> dict[str, Any] | None:
        """Return the last status of the runner if it is a process of this pod; else None."""
        runner = next((process for process in self._processes if kind_of(process) == "runner"), None)
        folder = self._environ.get("RLJOB_OUTPUT")
        if runner is None or not folder:
            return None
        return termination.read_summary(Path(folder), epoch=int(self._env_of(runner).get("RLJOB_EPOCH", "0")))


def _describe(name: str, code: int) -> str:
    if processes.is_signalled(code):
        return f"{name} ended by signal {processes.signal_name(code - 128)} (code {code})"
    return f"{name} ended with code {code}"


def _remove_orphaned_segments() -> None:
    from rl_core.transports import tokens

    removed = tokens.remove_orphans()
    if removed:
        logger.info("removed %d shared-memory segments of ended processes", len(removed))
