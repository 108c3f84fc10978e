"""What the end of a pod, a stall and bad numbers lead to: the user's rules, then the default ones (protocol.md 4). Pure.

The operator and the local launcher both ask here, so that the same YAML is treated alike on a laptop and on a cluster. Counting
against maxRestarts is theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rl_core.api.failure import FailurePolicySpec, FailureRule, StallSpec

Action = Literal["RestartPod", "RestartRole", "RestartJob", "FailJob", "Ignore"]
DISRUPTION = "DisruptionTarget"
"""Condition of a pod that the cluster ends for reasons of its own: drain, preemption, taint."""
FATAL_CODES = {2: "InvalidConfiguration", 4: "DataError"}
"""Exit codes that a restart cannot heal."""
ENDS_BEFORE_BACKOFF, ENDS_WINDOW = 5, 600.0
"""A pod that ended more often than this inside this many seconds is replaced with a pause."""
FIRST_BACKOFF, LONGEST_BACKOFF = 10.0, 300.0
"""Seconds; each further end doubles the pause."""
REPEAT_SECONDS = 60.0
"""Least seconds after an act on a stall until the same silence is acted on again."""
ROLE_OF_STALL = {"WaitingForRollout": "rollout", "WaitingForEnv": "env"}
SHORTAGE = "WaitingForPods"
"""The stall that triggers nothing: shortage is not failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodEnd:
    """How a pod ended."""

    role: str
    code: int | None
    """Exit code of the container that decides; None when no container reported one (evicted, deleted)."""
    init: bool = False
    """Whether an init container failed; its codes are not ours."""
    reasons: tuple[str, ...] = ()
    """Of the container and the pod: OOMKilled, Evicted, ..."""
    conditions: tuple[str, ...] = ()
    """Types of pod conditions that are true."""
    message: str = ""
    """Termination message."""
    deleted: bool = False
    """Whether somebody else deleted the pod while it ran."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ruling:
    """What a rule says."""

    action: Action
    counted: bool = True
    """Whether it counts: towards maxRestarts, for a pod towards its back-off."""
    rule: int | None = None
    """Index in failurePolicy.rules; None = a default rule."""


def rule_on(end: PodEnd, rules: Iterable[FailureRule]) -> Ruling:
    """Return what to do about `end`: the first of the user's rules that matches, else the default."""
    for index, rule in enumerate(rules):
        if matches(rule, end):
            return Ruling(action=_for_role(rule.action, end.role), counted=rule.count_towards_limit, rule=index)
    whole = end.role == "actor"
    if DISRUPTION in end.conditions or end.deleted:
        return Ruling(action="RestartJob" if whole else "RestartPod", counted=False)
    if end.code in FATAL_CODES and not end.init:
        return Ruling(action="FailJob")
    return Ruling(action="RestartJob" if whole else "RestartPod")


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
    """Return whether `text` holds the parts of `pattern`, which `*` separates, one after another; linear in the text."""
    at = 0
    for part in pattern.split("*"):
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True


def _for_role(action: Action, role: str) -> Action:
    """The actor restarts as a gang, whatever is asked for one of its pods."""
    return "RestartJob" if role == "actor" and action != "FailJob" else action


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """Counted ends of one pod, or restarts of the gang, as far as they matter for the pause before the next."""

    uid: str = ""
    """The pod judged last: no end is counted twice."""
    times: tuple[float, ...] = field(default=())
    """Newest last, seconds."""
    backoff: float = 0.0
    """Seconds from the last of `times` to the replacement."""

    @property
    def retry_at(self) -> float:
        """Return when the replacement may be made; 0 = at once."""
        return self.times[-1] + self.backoff if self.times and self.backoff else 0.0


def after_end(ends: Ends, now: float, *, uid: str = "") -> Ends:
    """Return `ends` with one more at `now`: no pause for the first few, then one that doubles until a pod lives for the window."""
    recent = tuple(at for at in ends.times if now - at <= ENDS_WINDOW)
    times = (*recent, now)[-(ENDS_BEFORE_BACKOFF + 1) :]
    relapsed = bool(ends.backoff and recent)
    if len(times) <= ENDS_BEFORE_BACKOFF and not relapsed:
        return Ends(uid=uid, times=times)
    return Ends(uid=uid, times=times, backoff=min(max(FIRST_BACKOFF, 2 * ends.backoff), LONGEST_BACKOFF))


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What was charged to `failurePolicy.maxRestarts`, and which step gives some of it back."""

    restarts: int = 0
    """Counted restarts that no finished steps have made up for."""
    stall_acts: int = 0
    """Acts on stalls, likewise."""
    forgive_at: int | None = None
    """The step that gives one restart and all acts on stalls back when it is finished; None = nothing is charged, or nothing is given back."""

    def charged(self, *, restarts: int = 0, stall_acts: int = 0, step: int, every: int | None) -> Budget:
        """Return the budget after a charge at `step`.

        The step that forgives never falls while something is charged: a run that falls back to its checkpoint and fails at the same
        step again makes no progress, however often it repeats the steps before.
        """
        at = None if every is None else max(step + every, self.forgive_at or 0)
        return Budget(restarts=self.restarts + restarts, stall_acts=self.stall_acts + stall_acts, forgive_at=at)

    def after(self, step: int, *, every: int | None) -> Budget:
        """Return the budget once `step` is finished; `every`: failurePolicy.forgiveAfterSteps."""
        if every is None or self.forgive_at is None or step < self.forgive_at:
            return self
        given = 1 + (step - self.forgive_at) // every
        restarts = max(self.restarts - given, 0)
        return Budget(restarts=restarts, forgive_at=self.forgive_at + given * every if restarts else None)


def stall_is_due(since: float, *, at: float, acted_at: float | None) -> bool:
    """Return whether a stall that at time `at` has lasted `since` seconds is to be acted on.

    Each silence is acted on once, and again when it has lasted as long once more since.
    """
    if acted_at is None or at - since > acted_at:
        return True
    elapsed = at - acted_at
    return elapsed >= max(since - elapsed, REPEAT_SECONDS)


def rule_on_stall(stall: StallSpec, reason: str, *, acts: int) -> tuple[str, str]:
    """Return (action, role) for a stall with sink `reason` after `acts` acts; `Ignore` for a shortage of pods."""
    if reason == SHORTAGE:
        return "Ignore", ""
    role = ROLE_OF_STALL.get(reason, "actor")
    if stall.action == "RestartRole" and (acts or role == "actor"):
        return "RestartJob", "actor"
    return stall.action, role


@dataclass(frozen=True, kw_only=True, slots=True)
class Trip:
    """A semantic rule that fired."""

    rule: str
    """nonFiniteLoss, rewardCollapse, klBlowUp or mismatch."""
    action: str
    """RestartFromCheckpoint, Pause or FailJob."""
    message: str
    steps: int
    """Newest steps that went wrong."""

    @property
    def reason(self) -> str:
        """Return the reason that a condition gives."""
        return "PolicyMismatch" if self.rule == "mismatch" else self.rule[0].upper() + self.rule[1:]


def tripped(policy: FailurePolicySpec, streaks: Any, metrics: Any = None) -> Trip | None:
    """Return the semantic rule that fires, given how many steps in a row counted for each (`/status.streaks`); None when none does.

    `metrics` of the newest step (`/status.metrics`) put the numbers into the message, where they are known.
    """
    if not isinstance(streaks, Mapping):
        return None
    table = {
        "nonFiniteLoss": (policy.non_finite_loss, "a loss that is not finite"),
        "rewardCollapse": (policy.reward_collapse, "a reward below failurePolicy.rewardCollapse.below"),
        "mismatch": (policy.mismatch, _mismatch(policy, metrics)),
        "klBlowUp": (policy.kl_blow_up, "approx_kl above failurePolicy.klBlowUp.above"),
    }
    for name, (rule, what) in table.items():
        count = streaks.get(name)
        if rule is not None and isinstance(count, int) and count >= rule.steps:
            message = f"{what} for {rule.steps} or more steps in a row"
            return Trip(rule=name, action=rule.action, message=message, steps=count)
    return None


def _mismatch(policy: FailurePolicySpec, metrics: Any) -> str:
    """Return what is wrong by failurePolicy.mismatch, with the numbers of the newest step that has them."""
    bound = policy.mismatch.kl if policy.mismatch is not None else 0.0
    told = metrics if isinstance(metrics, Mapping) else {}
    names = ("mismatch/kl", "mismatch/max_ratio", "mismatch/mean_abs_diff", "mismatch/share_clipped")
    numbers = ", ".join(f"{name} {told[name]:.3g}" for name in names if isinstance(told.get(name), float))
    return f"mismatch/kl above failurePolicy.mismatch.kl {bound:g}" + (f" (now {numbers})" if numbers else "")
