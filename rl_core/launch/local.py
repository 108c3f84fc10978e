"""LocalCluster runs a launch plan as processes of this machine. It does for `rljob run` what the operator does on a cluster.

A thread runs an event loop that starts the pods (`local_pods`), polls the status of the runner, and acts on it by `policy`. When `wait`
has returned, or this process was killed, no process of the run is left: a supervisor ends when its socket to the launcher closes, its
children end with it, and a final sweep kills processes that escaped.
"""

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rl_core.api.failure import FailurePolicySpec
from rl_core.launch.control import ControlClient
from rl_core.launch.local_plan import control_port, localise, under_epoch
from rl_core.launch.local_pod import LocalPod
from rl_core.launch.local_pods import LAST_SWEEP_SECONDS, LocalPods
from rl_core.launch.policy import Action, RestartDecision, RestartPolicy
from rl_core.launch.ports import free_ports
from rl_core.launch.registry import ProcessEntry
from rl_core.launch.replicas import follow_workload
from rl_core.launch.scaling import PodChanges, follow
from rl_core.launch.workspace import INTERRUPTED, Workspace
from rl_core.plan.groups import BUILT_IN, CONTROL_GROUP, GroupKind
from rl_core.plan.launch import LaunchPlan, PodPlan
from rl_core.workers.supervisor import ExitCode

if TYPE_CHECKING:
    from rl_core.api.job import RLJob

logger = logging.getLogger(__name__)

STOP_SECONDS = 10.0
"""Seconds from the first Ctrl-C until all processes have ended."""
RUNNER_SHARE = 0.7
"""Share of STOP_SECONDS in which the runner may save a checkpoint."""
STATUS_SECONDS = 1.0
ANNOUNCED = {
    Action.PAUSE: "ending the run until somebody resumes it",
    Action.RESTART_POD: "starting a new pod",
    Action.RESTART_ROLE: "restarting all pods of the role",
    Action.RESTART_JOB: "restarting the actors from the newest checkpoint",
}
FIRST_STEP = "restarting the actors at step 0, as there is no checkpoint yet"


def brief(reason: str) -> str:
    """Return the first and the last line of a reason that holds the end of a log; the log file has the rest.

    A process that a signal ended could not log why, so its last line is left out.
    """
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    if lines and "by signal" in lines[0]:
        return lines[0]
    return "; ".join(lines if len(lines) < 2 else (lines[0], lines[-1]))


class LocalCluster:
    """Runs a launch plan on this machine. Call `start` and then `wait`, or `run`, which does both."""

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        workdir: str | os.PathLike[str] | Workspace,
        plan_for: Callable[..., LaunchPlan] | None = None,
        policy: FailurePolicySpec | None = None,
        resume: str = "none",
        job: "RLJob | None" = None,
        groups: Mapping[str, GroupKind] = BUILT_IN,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare to run `plan`.

        - `workdir`: the output folder, or the workspace of a folder that the caller has locked.
        - `plan_for(epoch, replicas)` returns the plan of a later epoch; `replicas` is given for a run that was scaled. None: `plan` is used
        with another epoch, and the run cannot be scaled.
        - `policy`: None means that of `job`, or the defaults without a job.
        - `resume` (auto, none or a path) is used in the first epoch; later epochs resume from what the run has saved.
        - `job` is written for the runner if the file of RLJOB_CONFIG does not exist; `groups` are its worker groups.
        - `environ`: None means the environment of this process.
        """
        self._space = workdir if isinstance(workdir, Workspace) else Workspace(workdir)
        self.status: dict[str, Any] = {}
        """The last status of the runner."""
        self.failure = ""
        """Why the run failed, with the last lines of the process that caused it."""
        self._first_plan = plan
        self._plan_for = plan_for
        self._job = job
        self._resume = resume
        self._environ = dict(os.environ if environ is None else environ)
        spec = policy if policy is not None else (job.spec.failure_policy if job is not None else FailurePolicySpec())
        self._groups = groups
        self._policy = RestartPolicy(spec, groups=self._groups)
        self._ports = free_ports()
        self._replicas: dict[str, int] = {}
        """Group -> pods, of the groups that were scaled up."""
        self._code: int | None = None
        self._done = threading.Event()
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners: list[Callable[[dict[str, Any]], None]] = []
        self._say: Callable[[str], None] = lambda text: logger.warning("%s", text)
        self._interrupts = 0
        self._step_at_restart = 0
        """Step of the newest checkpoint when the present attempt began: a runner that starts does not report it yet."""
        self._ending = asyncio.Event()

    # --- public methods (any thread) ------------------------------------------------------------------------------

    @property
    def ending(self) -> bool:
        """Whether a signal arrived or the run is over. The waits of its members are then expected."""
        return self._interrupts > 0 or self._ending.is_set()

    @property
    def epoch(self) -> int:
        """Present epoch."""
        return self._plan.epoch

    @property
    def restarts(self) -> int:
        """Counted restarts of the gang that have not been forgiven."""
        return self._policy.restarts

    def start(self) -> "LocalCluster":
        """Start all pods; return self. Raises ConfigError when the folder cannot be used or another run uses it."""
        self._prepare()
        threading.Thread(target=self._thread, name="local-cluster", daemon=True).start()
        self._started.wait()
        if self._error is not None:
            self._done.wait()
            raise self._error
        return self

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit code when the run has ended and all processes are gone; None after `timeout` seconds.

        The code is 0, 2, 3, 4, or 130 when the run was interrupted.

        On the main thread the first Ctrl-C or SIGTERM stops the run in order, the second one at once.
        """
        with self._signals():
            deadline = None if timeout is None else time.monotonic() + timeout
            while not self._done.wait(0.5 if deadline is None else max(0.0, min(0.5, deadline - time.monotonic()))):
                if deadline is not None and time.monotonic() >= deadline:
                    return None
        if self._error is not None:
            raise self._error
        return self._code

    def run(
        self,
        *,
        on_status: Callable[[dict[str, Any]], None] | None = None,
        on_interrupt: Callable[[str], None] | None = None,
    ) -> int:
        """Start, wait and return the exit code.

        `on_status` is called with each new status, `on_interrupt` with a line of text when a signal arrives.
        """
        self._listeners += [on_status] if on_status is not None else []
        self._say = on_interrupt or self._say
        with self._signals():
            self.start()
            code = self.wait()
        assert code is not None
        return code

    def stop(self, grace: float = STOP_SECONDS) -> None:
        """Ask for a checkpoint and end all processes within `grace` seconds. Returns at once; `wait` returns at the end."""
        self._schedule(lambda: self._begin_end(INTERRUPTED, "stopped on request", grace))

    def kill(self) -> None:
        """End all processes now. Returns at once; `wait` returns at the end."""
        self._schedule(self._kill)

    def pids(self) -> list[ProcessEntry]:
        """Return the live processes, as in processes.json."""
        return self._pods.entries()

    # --- start -----------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._space.open(uid=self._first_plan.uid, job=self._job)
        self._plan = self._localised(self._first_plan)
        port = control_port(self._plan)
        self._control = self._client(port) if port else None
        constant = {"RLJOB_GRACE_SECONDS": str(STOP_SECONDS), "RLJOB_FIRST_EPOCH": str(self._first_plan.epoch)}
        self._pods = LocalPods(
            self._space,
            environ={**self._environ, **constant},
            on_end=self._on_pod_end,
            say=lambda text: self._say(text),  # A lambda, because `run` replaces `_say`.
        )

    def _client(self, port: int) -> ControlClient:
        """Return the client of the runner; it signs each call with the epoch at that time."""
        return ControlClient(port, self._space.token_file, uid=self._plan.uid, epoch=lambda: self._plan.epoch)

    def _localised(self, plan: LaunchPlan) -> LaunchPlan:
        return localise(plan, ports=self._ports, curve_dir=self._space.key_folder, config=self._space.config)

    def _thread(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:
            logger.exception("the local cluster failed")
            self._error = error
        finally:
            self._pods.sweep(seconds=LAST_SWEEP_SECONDS)
            self._started.set()
            self._done.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        try:
            for pod in self._plan.pods:
                self._start_pod(pod)
            self._started.set()
            poll = self._spawn(self._poll_status())
            await self._ending.wait()
            await self._end()
            poll.cancel()
        finally:
            for task in self._tasks:
                task.cancel()
            await self._pods.kill(list(self._pods))
            self._publish(self._space.final_status(self._code, self.failure, epoch=self.epoch))
            self._space.close()

    def _start_pod(self, plan: PodPlan) -> None:
        """Start a pod. `resume` of the user is used in the first epoch; a restart resumes from what the run has saved."""
        as_asked = self._plan.epoch == self._first_plan.epoch or self._resume != "none"
        self._pods.start(plan, RLJOB_RESUME=self._resume if as_asked else "auto")

    # --- watching --------------------------------------------------------------------------------------------------

    def _on_pod_end(self, pod: LocalPod) -> None:
        if pod.expected or self._ending.is_set():
            return
        assert pod.returncode is not None
        reason = f"pod {pod.plan.name} ended with code {pod.returncode}" + (f": {pod.reason}" if pod.reason else "")
        # A runner whose metrics break a rule ends by itself, perhaps before the next poll of its status.
        status = self._space.read_status() if pod.role == CONTROL_GROUP and self._space.is_final(self.epoch) else {}
        decide = self._policy.pod_ended
        self._carry_out(self._policy.numbers(status) or decide(pod.role, pod.index, pod.returncode, reason), pod)

    def _carry_out(self, decision: RestartDecision, pod: LocalPod | None = None) -> None:
        action = decision.action
        if action is Action.NONE:
            return
        if action is Action.FINISH:
            self._begin_end(decision.code, "", STOP_SECONDS)
            return
        if action is not Action.FAIL:
            announced = FIRST_STEP if action is Action.RESTART_JOB and not self._saved_step else ANNOUNCED[action]
            self._say(f"{announced}: {brief(decision.reason)}")
        elif decision.limit:  # the reason itself is printed once, at the end
            self._say(f"ending the run: {decision.limit}")
        if action is Action.FAIL:
            self._begin_end(decision.code, decision.reason, STOP_SECONDS)
        elif action is Action.PAUSE:
            self._begin_end(INTERRUPTED, decision.reason, STOP_SECONDS)
        elif action is Action.RESTART_POD and pod is not None:
            self._spawn(self._replace_pod(pod.plan.name, decision.pause))
        elif action is Action.RESTART_ROLE:
            self._spawn(self._restart_role(decision.role))
        elif action is Action.RESTART_JOB:
            for gang_pod in self._gang():
                gang_pod.expected = True  # The rest of the gang ends too, and one restart is enough.
            self._spawn(self._restart_job())

    @property
    def _saved_step(self) -> int:
        """Step of the newest checkpoint that the run has written or was resumed from; 0 if there is none."""
        checkpoint = self._space.read_status().get("checkpoint") or {}
        return int(checkpoint.get("lastStep") or checkpoint.get("resumedFrom") or self._step_at_restart)

    async def _replace_pod(self, name: str, pause: float) -> None:
        if pause:
            logger.warning("pod %s ended too often: waiting %.0f s", name, pause)
            await asyncio.sleep(pause)
        if not self._ending.is_set() and not self._pods[name].running:
            self._start_pod(next(plan for plan in self._plan.pods if plan.name == name))

    async def _restart_role(self, role: str) -> None:
        pods = [pod for pod in self._pods.of_role(role) if not pod.retired]
        if not pods:  # The processes of the role run in pods of the actor and restart with these.
            await self._restart_job()
            return
        await self._pods.kill(pods)
        for pod in pods:
            await self._replace_pod(pod.plan.name, 0.0)

    async def _restart_job(self) -> None:
        """Begin the next epoch: end what is left of the gang and start it again. Members of elastic groups keep running and reconnect."""
        if self._ending.is_set():
            return
        epoch = self._plan.epoch + 1
        plan = self._planned(epoch) if self._plan_for is not None else under_epoch(self._plan, epoch)
        self._plan = self._localised(plan)
        self.status, self._step_at_restart = {}, self._saved_step
        status = self._space.read_status()
        failures = {**(status.get("failures") or {})}
        restarts = failures.get("actor/restart", 0)
        failures["actor/restart"] = restarts + 1  # the next runner continues the count from the file
        self._publish({**status, "phase": "Restarting", "epoch": epoch, "stall": None, "failures": failures})
        await self._pods.kill(self._gang())
        if self._ending.is_set():
            return
        for pod in self._plan.pods:
            if self._is_gang(pod.role):
                self._start_pod(pod)

    def _is_gang(self, role: str) -> bool:
        return role in self._groups and not self._groups[role].elastic

    def _gang(self) -> list[LocalPod]:
        """Return the pods that restart together under a new epoch."""
        return [pod for pod in self._pods if self._is_gang(pod.role)]

    async def _poll_status(self) -> None:
        while self._control is not None:
            await asyncio.sleep(STATUS_SECONDS)
            epoch = self._plan.epoch
            status = await asyncio.to_thread(self._control.status)
            outdated = epoch != self._plan.epoch  # The answer comes from a gang that is being ended.
            if status is None or outdated or status.get("epoch", epoch) != epoch or self._ending.is_set():
                continue
            self.status = status
            if not self._space.is_final(epoch):
                self._publish(status)
            self._carry_out(self._policy.reported(status))
            if self._plan_for is not None:
                await self._autoscale(status)
                pods = {pod.plan.name: not pod.retired for pod in self._pods}
                draining = [pod.plan.name for pod in self._pods if pod.draining]
                await self._scale(follow(status, pods, self._groups, draining=draining))

    async def _autoscale(self, status: Mapping[str, Any]) -> None:
        """Apply `rollout.autoscale` where the job has it."""
        config = self._space.job_file
        if self._control is None or not config.is_file():
            return
        if reason := await asyncio.to_thread(follow_workload, self._control, config, status):
            self._say(reason)

    async def _scale(self, changes: PodChanges) -> None:
        """Start the pods that a changed spec asks for, drain those that it no longer needs, end those that have drained."""
        assert self._control is not None
        for name in changes.end:
            self._say(f"{name} has drained: ending it")
            self._pods[name].terminate()
        if changes.drain:
            self._say(f"scaling down: {', '.join(changes.drain)} drain")
            for name in changes.drain:
                self._pods[name].draining = True
            await asyncio.to_thread(self._control.drain, changes.drain)
        new_pods = [name for name in changes.start if name not in self._pods or self._pods[name].retired]
        if new_pods:
            self._say(f"scaling up: starting {', '.join(new_pods)}")
            for name in new_pods:
                role, _, index = name.removeprefix(f"{self._plan.job}-").rpartition("-")
                self._replicas[role] = max(self._replicas.get(role, 0), int(index) + 1)
            self._plan = self._localised(self._planned(self._plan.epoch))
            for plan in self._plan.pods:
                if plan.name in new_pods:
                    self._start_pod(plan)

    def _planned(self, epoch: int) -> LaunchPlan:
        assert self._plan_for is not None
        if not self._replicas:
            return self._plan_for(epoch)
        planned = {role: max(count, len(self._first_plan.pods_of(role))) for role, count in self._replicas.items()}
        return self._plan_for(epoch, planned)

    def _publish(self, status: dict[str, Any]) -> None:
        self._space.write_status(status, restarts=self._policy.restarts)
        for listener in self._listeners:
            try:
                listener(status)
            except Exception:  # A failure of the display must not end the run.
                logger.exception("a status listener failed")

    # --- ending ----------------------------------------------------------------------------------------------------

    def _begin_end(self, code: int, reason: str, grace: float) -> None:
        if self._ending.is_set():
            return
        self._code, self.failure, self._deadline = code, reason if code else "", time.monotonic() + grace
        self._grace = grace
        self._ending.set()

    async def _end(self) -> None:
        """Let the runner save a checkpoint when the user stopped the run, then terminate all pods, then kill those that are left."""
        if self._code == INTERRUPTED:
            await self._finish_runner()
        pods = [pod for pod in self._pods if pod.running]
        for pod in pods:
            pod.terminate()
        await self._pods.wait_ended(pods, self._deadline - time.monotonic() - min(1.0, self._grace / 4))

    async def _finish_runner(self) -> None:
        """Ask the runner to save a checkpoint and end, by its control port or, where that does not answer, by SIGTERM."""
        actors = [pod for pod in self._pods.of_role(CONTROL_GROUP) if pod.running]
        first_pods = [pod for pod in actors if pod.index == 0]
        for pod in actors:
            pod.expected = True
        accepted = self._control is not None and await asyncio.to_thread(self._control.finish)
        if not accepted:
            for pod in first_pods:
                pod.terminate()
        await self._pods.wait_ended(first_pods, self._grace * RUNNER_SHARE)

    def _kill(self) -> None:
        self._begin_end(INTERRUPTED, "killed on request", 0.0)
        for pod in self._pods:
            pod.kill()

    # --- signals and threads ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) == self._on_signal
        ):
            yield
            return
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = {signum: signal.signal(signum, self._on_signal) for signum in handled}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: object) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            if self.status.get("step"):
                action = "saving a checkpoint and ending"
            elif self._saved_step:
                action = f"ending; the newest checkpoint is of step {self._saved_step}"
            else:
                action = "ending; no step is trained yet"
            self._say(f"{signal.Signals(signum).name}: {action}; again to end at once")
            self.stop()
        else:
            self._say("ending at once")
            self.kill()

    def _schedule(self, work: Callable[[], None]) -> None:
        if self._loop is not None and not self._done.is_set():
            with contextlib.suppress(RuntimeError):  # The event loop has just closed, so everything has ended.
                self._loop.call_soon_threadsafe(work)

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the local cluster failed", exc_info=error)
            self._begin_end(ExitCode.INFRASTRUCTURE, f"the launcher failed: {error}", STOP_SECONDS)
