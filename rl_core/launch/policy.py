"""Restart policy of a local run: what the launcher does when a pod ends, the run stalls or metrics go wrong.

It applies the same rules as the operator. Decisions are values that `local.LocalCluster` carries out; the clock is injected.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rl_core.api.failure import FailurePolicySpec
from rl_core.plan import failure_rules as rules
from rl_core.plan.failure_rules import Budget, PodEnd, PodFailures
from rl_core.plan.groups import BUILT_IN, CONTROL_GROUP, GroupKind
from rl_core.workers.supervisor import ExitCode


class Action(Enum):
    """What the launcher does next: see the members."""

    NONE = "none"
    FINISH = "finish"
    """The run has finished: end the other pods."""
    RESTART_POD = "restart_pod"
    RESTART_ROLE = "restart_role"
    RESTART_JOB = "restart_job"
    """Start the gang again under a new epoch; pods of elastic groups keep running."""
    PAUSE = "pause"
    """Save a checkpoint and end the run, which can be resumed."""
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartDecision:
    """An action of the launcher and its arguments."""

    action: Action
    code: int = 0
    """Exit code of the run, for FINISH and FAIL."""
    pause: float = 0.0
    """Seconds to wait before a pod is replaced."""
    role: str = ""
    """The group to restart, for RESTART_ROLE."""
    reason: str = ""
    limit: str = ""
    """For FAIL: the limit that forbids a restart; empty if the failure itself ends the run."""


class RestartPolicy:
    """Decides what to do, and counts restarts against failurePolicy.maxRestarts."""

    def __init__(
        self,
        spec: FailurePolicySpec,
        *,
        groups: Mapping[str, GroupKind] = BUILT_IN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._groups = groups
        self._clock = clock
        self._budget = Budget()
        self._step = 0
        """The last finished step that the runner reported."""
        self._failures: dict[str, PodFailures] = {}
        self._stall_acted_at: float | None = None

    @property
    def restarts(self) -> int:
        """Counted restarts that have not been forgiven."""
        return self._budget.restarts

    def pod_ended(self, role: str, index: int, code: int, reason: str) -> RestartDecision:
        """Decide what to do about a pod that ended with exit code `code` without a request to end."""
        if role == CONTROL_GROUP and code == ExitCode.DONE:
            return RestartDecision(action=Action.FINISH) if index == 0 else RestartDecision(action=Action.NONE)
        ruling = rules.rule_on(PodEnd(role=role, code=code, message=reason), self._spec.rules, self._groups)
        if ruling.action == "FailJob":
            return RestartDecision(action=Action.FAIL, code=ExitCode.of(code) or ExitCode.INFRASTRUCTURE, reason=reason)
        if ruling.action == "RestartJob":
            return self._restart_job(reason, counted=ruling.counted)
        if ruling.action == "RestartRole":
            return RestartDecision(action=Action.RESTART_ROLE, role=role, reason=reason)
        counted = ruling.counted and ruling.action != "Ignore"
        pause = self._pod_pause(f"{role}-{index}") if counted else 0.0
        return RestartDecision(action=Action.RESTART_POD, pause=pause, reason=reason)

    def reported(self, status: Mapping[str, Any]) -> RestartDecision:
        """Decide what to do after a new status of the runner, first by its metrics, then by a stall. Restarts are forgiven by its step."""
        step = status.get("step")
        if isinstance(step, int):
            self._step = step
            self._budget = self._budget.replenish(step, every=self._spec.forgive_after_steps)
        return self.numbers(status) or self.stalled(status.get("stall"))

    def numbers(self, status: Mapping[str, Any]) -> RestartDecision | None:
        """Decide what to do about metrics that violate a rule of failurePolicy; None if no rule is violated."""
        violation = rules.fired_rule(self._spec, status.get("streaks"), status.get("metrics"))
        if violation is None:
            return None
        reason = f"{violation.reason}: {violation.message}"
        if violation.action == "RestartFromCheckpoint":
            return self._restart_job(reason)
        if violation.action == "Pause":
            return RestartDecision(action=Action.PAUSE, reason=reason)
        return RestartDecision(action=Action.FAIL, code=ExitCode.INFRASTRUCTURE, reason=reason)

    def stalled(self, stall: Mapping[str, Any] | None) -> RestartDecision:
        """Decide what to do about `stall` of the status (None: no stall): first `stall.action`, at the next time a restart of the job."""
        if stall is None:
            self._stall_acted_at = None
            return RestartDecision(action=Action.NONE)
        now, cause = self._clock(), str(stall.get("reason"))
        num_acts = self._budget.stall_actions
        action, role = rules.rule_on_stall(self._spec.stall, cause, acts=num_acts, groups=self._groups)
        is_due = rules.stall_action_is_due(float(stall.get("since") or 0.0), at=now, acted_at=self._stall_acted_at)
        if action == "Ignore" or not is_due:
            return RestartDecision(action=Action.NONE)
        self._stall_acted_at = now
        self._charge(stall_actions=1)
        reason = f"stalled: {cause}: {stall.get('message')}"
        if action == "FailJob":
            return RestartDecision(action=Action.FAIL, code=ExitCode.INFRASTRUCTURE, reason=reason)
        if action == "Pause":
            return RestartDecision(action=Action.PAUSE, reason=reason)
        if action == "RestartRole":
            return RestartDecision(action=Action.RESTART_ROLE, role=role, reason=reason)
        return self._restart_job(reason)

    def _restart_job(self, reason: str, *, counted: bool = True) -> RestartDecision:
        if counted and self._budget.restarts >= self._spec.max_restarts:
            limit = f"all {self._spec.max_restarts} restarts of failurePolicy.maxRestarts are used"
            return RestartDecision(
                action=Action.FAIL, code=ExitCode.INFRASTRUCTURE, reason=f"{reason}; {limit}", limit=limit
            )
        if counted:
            self._charge(restarts=1)
        return RestartDecision(action=Action.RESTART_JOB, reason=reason)

    def _charge(self, **charges: int) -> None:
        self._budget = self._budget.consume(**charges, step=self._step, every=self._spec.forgive_after_steps)

    def _pod_pause(self, pod: str) -> float:
        self._failures[pod] = rules.add_failure(self._failures.get(pod) or PodFailures(), self._clock())
        return self._failures[pod].backoff
