"""Failure rules: the action for the end of a pod, a stall, or metrics that violate a rule.

The user's rules are matched before the default ones.

The functions are pure. The operator and the local launcher both use them, so that a job fails and restarts alike on a laptop and on a
cluster; both count restarts against maxRestarts themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rl_core.plan.groups import BUILT_IN, CONTROL_GROUP, GroupKind

if TYPE_CHECKING:
    from rl_core.api.failure import FailurePolicySpec, FailureRule, StallSpec

Action = Literal["RestartPod", "RestartRole", "RestartJob", "FailJob", "Ignore"]
DISRUPTION = "DisruptionTarget"
"""Condition of a pod that the cluster ends: drain, preemption, taint."""
FATAL_CODES = {2: "InvalidConfiguration", 4: "DataError"}
"""Exit codes that mean an error in the job, which a restart cannot repair."""
FAILURES_BEFORE_BACKOFF, FAILURE_WINDOW = 5, 600.0
"""A pod that ended more often than this within this many seconds is replaced only after a pause."""
FIRST_BACKOFF, LONGEST_BACKOFF = 10.0, 300.0
"""Length of the first pause and of the longest one, seconds; each further end doubles the pause."""
REPEAT_SECONDS = 60.0
"""Least seconds between two actions on the same stall."""
MISMATCH_METRICS = ("mismatch/kl", "mismatch/max_ratio", "mismatch/mean_abs_diff", "mismatch/share_clipped")
"""Metrics of the newest step that the message about failurePolicy.mismatch names."""
SHORTAGE = "WaitingForPods"
"""Reason of a stall that triggers no action: a job that waits for pods has not failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodEnd:
    """How a pod ended."""

    role: str
    code: int | None
    """Exit code of the container that decides; None when no container reported one, as in a pod that was evicted or deleted."""
    init: bool = False
    """Whether an init container failed; its exit codes have no meaning here."""
    reasons: tuple[str, ...] = ()
    """Reasons of the container and of the pod: OOMKilled, Evicted, ..."""
    conditions: tuple[str, ...] = ()
    """Types of pod conditions that are true."""
    message: str = ""
    """Termination message."""
    deleted: bool = False
    """Whether the pod was deleted while it ran, by another client than the operator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ruling:
    """The action of a rule for one end of a pod."""

    action: Action
    counted: bool = True
    """Whether the end counts towards maxRestarts, or towards the back-off of the pod."""
    rule: int | None = None
    """Index in failurePolicy.rules; None for a default rule."""


def rule_on(end: PodEnd, rules: Iterable[FailureRule], groups: Mapping[str, GroupKind] = BUILT_IN) -> Ruling:
    """Return the action for `end`: that of the first matching rule of the user, else the default action for the pod's worker group."""
    in_gang = _is_gang(end.role, groups)
    for index, rule in enumerate(rules):
        if matches(rule, end):
            return Ruling(
                action=_for_gang(rule.action) if in_gang else rule.action, counted=rule.count_towards_limit, rule=index
            )
    if DISRUPTION in end.conditions or end.deleted:
        return Ruling(action="RestartJob" if in_gang else "RestartPod", counted=False)
    if end.code in FATAL_CODES and not end.init:
        return Ruling(action="FailJob")
    return Ruling(action="RestartJob" if in_gang else "RestartPod")


def matches(rule: FailureRule, end: PodEnd) -> bool:
    """Return whether all matchers that `rule` gives match `end`; a list matches when one of its entries does."""
    return (
        (not rule.roles or end.role in rule.roles)
        and (not rule.exit_codes or end.code in rule.exit_codes)
        and (not rule.pod_conditions or not set(rule.pod_conditions).isdisjoint(end.conditions))
        and (not rule.reasons or not set(rule.reasons).isdisjoint(end.reasons))
        and (rule.message_pattern is None or contains(end.message, rule.message_pattern))
    )


def contains(text: str, pattern: str) -> bool:
    """Return whether `text` contains `pattern`, in which `*` stands for any text; takes time linear in the length of the text."""
    start = 0
    for part in pattern.split("*"):
        position = text.find(part, start)
        if position < 0:
            return False
        start = position + len(part)
    return True


def _is_gang(role: str, groups: Mapping[str, GroupKind]) -> bool:
    return role in groups and not groups[role].elastic


def _for_gang(action: Action) -> Action:
    """Return the action for a pod of a gang. A gang always restarts as a whole, even if the rule names an action for one pod."""
    return action if action == "FailJob" else "RestartJob"


@dataclass(frozen=True, kw_only=True, slots=True)
class PodFailures:
    """Recent counted ends of one pod, or restarts of the gang: those that decide how long the next replacement waits."""

    uid: str = ""
    """Uid of the pod whose end was counted last, so that no end is counted twice."""
    times: tuple[float, ...] = field(default=())
    """Times of the ends, seconds, newest last."""
    backoff: float = 0.0
    """Seconds between the last of `times` and the replacement."""

    @property
    def retry_at(self) -> float:
        """Time from which the replacement may be created, in seconds on the clock of `times`; 0 means at once."""
        return self.times[-1] + self.backoff if self.times and self.backoff else 0.0


def add_failure(failures: PodFailures, now: float, *, uid: str = "") -> PodFailures:
    """Return `failures` with one more at time `now`.

    The first few failures cause no back-off. Further ones cause a back-off that doubles each time, until a pod runs for FAILURE_WINDOW seconds.
    """
    recent = tuple(time for time in failures.times if now - time <= FAILURE_WINDOW)
    times = (*recent, now)[-(FAILURES_BEFORE_BACKOFF + 1) :]
    relapsed = bool(failures.backoff and recent)
    if len(times) <= FAILURES_BEFORE_BACKOFF and not relapsed:
        return PodFailures(uid=uid, times=times)
    return PodFailures(uid=uid, times=times, backoff=min(max(FIRST_BACKOFF, 2 * failures.backoff), LONGEST_BACKOFF))


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Restarts that count against `failurePolicy.maxRestarts`, and the step at which the next one is forgiven."""

    restarts: int = 0
    """Counted restarts that are not forgiven yet."""
    stall_actions: int = 0
    """Counted actions on stalls that are not forgiven yet."""
    forgive_at: int | None = None
    """The step after which one restart and all stall actions are forgiven. None if nothing is counted, or forgiveAfterSteps is not set."""

    def consume(self, *, restarts: int = 0, stall_actions: int = 0, step: int, every: int | None) -> Budget:
        """Return the budget after counting restarts or stall actions at `step`; `every` is failurePolicy.forgiveAfterSteps.

        `forgive_at` never decreases while something is counted. Otherwise a run that fails at the same step again and again would be
        forgiven a restart each time, only for repeating the steps since its checkpoint.
        """
        forgive_at = None if every is None else max(step + every, self.forgive_at or 0)
        return Budget(
            restarts=self.restarts + restarts, stall_actions=self.stall_actions + stall_actions, forgive_at=forgive_at
        )

    def replenish(self, step: int, *, every: int | None) -> Budget:
        """Return the budget after `step` was finished, with restarts forgiven if that is due. `every` is failurePolicy.forgiveAfterSteps."""
        if every is None or self.forgive_at is None or step < self.forgive_at:
            return self
        num_forgiven = 1 + (step - self.forgive_at) // every
        restarts = max(self.restarts - num_forgiven, 0)
        return Budget(restarts=restarts, forgive_at=self.forgive_at + num_forgiven * every if restarts else None)


def stall_action_is_due(since: float, *, at: float, acted_at: float | None) -> bool:
    """Return whether to act on a stall that has lasted `since` seconds at time `at`; `acted_at` is the time of the last action, or None.

    A stall brings one action at once. It brings another one when it has lasted for as long again as it had before the first.
    """
    if acted_at is None or at - since > acted_at:
        return True
    elapsed = at - acted_at
    return elapsed >= max(since - elapsed, REPEAT_SECONDS)


def rule_on_stall(
    stall: StallSpec, reason: str, *, acts: int, groups: Mapping[str, GroupKind] = BUILT_IN
) -> tuple[str, str]:
    """Return (action, worker group) for a stall with this reason, after `acts` previous actions; `Ignore` for a shortage of pods."""
    if reason == SHORTAGE:
        return "Ignore", ""
    waited_for = {group.stall_reason: group.name for group in groups.values()}
    role = waited_for.get(reason, CONTROL_GROUP)
    if stall.action == "RestartRole" and (acts or _is_gang(role, groups)):
        return "RestartJob", CONTROL_GROUP
    return stall.action, role


@dataclass(frozen=True, kw_only=True, slots=True)
class FiredRule:
    """A rule of failurePolicy on metrics whose condition holds."""

    rule: str
    """nonFiniteLoss, rewardCollapse, klBlowUp or mismatch."""
    action: str
    """RestartFromCheckpoint, Pause or FailJob."""
    message: str
    steps: int
    """Number of newest, consecutive steps that violate the rule."""

    @property
    def reason(self) -> str:
        """Return the reason for the status condition."""
        return "PolicyMismatch" if self.rule == "mismatch" else self.rule[0].upper() + self.rule[1:]


def fired_rule(policy: FailurePolicySpec, streaks: Any, metrics: Any = None) -> FiredRule | None:
    """Return the rule on metrics whose condition holds; None if there is none.

    `streaks` has the number of consecutive violating steps by rule (`/status.streaks`), `metrics` the values of the newest step
    (`/status.metrics`) for the message.
    """
    if not isinstance(streaks, Mapping):
        return None
    table = {
        "nonFiniteLoss": (policy.non_finite_loss, "a loss that is not finite"),
        "rewardCollapse": (policy.reward_collapse, "a reward below failurePolicy.rewardCollapse.below"),
        "mismatch": (policy.mismatch, _mismatch(policy, metrics)),
        "klBlowUp": (policy.kl_blow_up, "approx_kl above failurePolicy.klBlowUp.above"),
    }
    for name, (rule, description) in table.items():
        count = streaks.get(name)
        if rule is not None and isinstance(count, int) and count >= rule.steps:
            message = f"{description} for {rule.steps} or more steps in a row"
            return FiredRule(rule=name, action=rule.action, message=message, steps=count)
    return None


def _mismatch(policy: FailurePolicySpec, metrics: Any) -> str:
    """Return the message for failurePolicy.mismatch, with the metrics of the newest step where there are any."""
    limit = policy.mismatch.kl if policy.mismatch is not None else 0.0
    values = metrics if isinstance(metrics, Mapping) else {}
    numbers = ", ".join(
        f"{name} {values[name]:.3g}" for name in MISMATCH_METRICS if isinstance(values.get(name), float)
    )
    return f"mismatch/kl above failurePolicy.mismatch.kl {limit:g}" + (f" (now {numbers})" if numbers else "")
