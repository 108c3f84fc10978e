"""What the local launcher does when a pod ends or the run stalls: the operator's rules (protocol.md 4), pure.

The decisions are values; `local.LocalCluster` carries them out. The clock is injected.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rl_core.api.failure import FailurePolicySpec
from rl_core.workers.budget import RestartBudget
from rl_core.workers.supervisor import ExitCode

POD_RESTARTS = 5
POD_WINDOW = 600.0
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 300.0
_ROLE_OF_STALL = {"WaitingForRollout": "rollout", "WaitingForEnv": "env"}


class Action(Enum):
    """What to do."""

    NONE = "none"
    FINISH = "finish"
    """The run is done: end everything else."""
    RESTART_POD = "restart_pod"
    RESTART_ROLE = "restart_role"
    RESTART_JOB = "restart_job"
    """New actor gang under a new epoch; rollouts and envs stay."""
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """An action with its arguments."""

    action: Action
    code: int = 0
    """Exit code of the run, for FINISH and FAIL."""
    pause: float = 0.0
    """Seconds to wait before a pod is replaced."""
    role: str = ""
    """For RESTART_ROLE."""
    reason: str = ""


class RestartPolicy:
    """Counts restarts and decides."""

    def __init__(self, spec: FailurePolicySpec, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec = spec
        self._clock = clock
        self.restarts = 0
        """Counted restarts of the job."""
        self._pods: dict[str, RestartBudget] = {}
        self._pauses: dict[str, float] = {}
        self._stall_acts = 0
        self._stall_acted_at: float | None = None

    def pod_ended(self, role: str, index: int, code: int, reason: str) -> Decision:
        """Decide on a pod that ended with `code` although nobody asked it to."""
        if code in (ExitCode.CONFIG, ExitCode.DATA):
            return Decision(action=Action.FAIL, code=code, reason=reason)
        if role != "actor":
            return Decision(action=Action.RESTART_POD, pause=self._pod_pause(f"{role}-{index}"), reason=reason)
        if code == ExitCode.DONE:
            return Decision(action=Action.FINISH) if index == 0 else Decision(action=Action.NONE)
        return self._restart_job(reason)

    def stalled(self, stall: Mapping[str, Any] | None) -> Decision:
        """Decide on `/status.stall`: the first time by `stall.action`, then by restarting the job; each stall once per its own duration."""
        if stall is None:
            self._stall_acted_at = None
            return Decision(action=Action.NONE)
        since = float(stall.get("since") or 0.0)
        recently = self._stall_acted_at is not None and self._clock() - self._stall_acted_at < max(since, 60.0)
        if stall.get("reason") == "WaitingForPods" or recently:
            return Decision(action=Action.NONE)
        self._stall_acted_at = self._clock()
        self._stall_acts += 1
        reason = f"stalled: {stall.get('reason')}: {stall.get('message')}"
        wanted = self._spec.stall.action
        if wanted == "FailJob":
            return Decision(action=Action.FAIL, code=ExitCode.INFRASTRUCTURE, reason=reason)
        role = _ROLE_OF_STALL.get(str(stall.get("reason")))
        if wanted == "RestartRole" and self._stall_acts == 1 and role is not None:
            return Decision(action=Action.RESTART_ROLE, role=role, reason=reason)
        return self._restart_job(reason)

    def _restart_job(self, reason: str) -> Decision:
        if self.restarts >= self._spec.max_restarts:
            text = f"{reason}; all {self._spec.max_restarts} restarts of failurePolicy.maxRestarts are used up"
            return Decision(action=Action.FAIL, code=ExitCode.INFRASTRUCTURE, reason=text)
        self.restarts += 1
        return Decision(action=Action.RESTART_JOB, reason=reason)

    def _pod_pause(self, pod: str) -> float:
        budget = self._pods.setdefault(pod, RestartBudget(POD_RESTARTS, POD_WINDOW, clock=self._clock))
        if budget.take():
            self._pauses.pop(pod, None)
            return 0.0
        pause = min(2 * self._pauses.get(pod, FIRST_PAUSE / 2), LONGEST_PAUSE)
        self._pauses[pod] = pause
        return pause
