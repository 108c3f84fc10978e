"""`spec.failurePolicy`: what happens when a container ends, nothing moves or the numbers go wrong.

Rules are tried in order, the first that matches acts; after the user's rules come the default ones: a disruption, which a pod deleted
by somebody else is too, restarts without being counted; exit code 2 or 4 of any role fails the job; any other end of an actor pod restarts the job, counted; that of a rollout
or env pod restarts the pod, counted per pod.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rl_core.api.base import Spec, rule
from rl_core.api.bounds import listed
from rl_core.api.cel import Cel
from rl_core.api.roles import RoleName

RuleAction = Literal["RestartPod", "RestartRole", "RestartJob", "FailJob", "Ignore"]
SemanticAction = Literal["RestartFromCheckpoint", "Pause", "FailJob"]
Word = Annotated[str, Field(min_length=1, max_length=128)]


class FailureRule(Spec):
    """One rule; all matchers that are given must match, a list matches when one of its entries does."""

    roles: Annotated[list[RoleName], Field(max_length=3)] = []
    """Roles it is for; empty = all."""
    exit_codes: Annotated[list[Annotated[int, Field(ge=0, le=255)]], Field(max_length=64)] = []
    """Exit codes of the ended container; empty = any."""
    pod_conditions: Annotated[list[Word], Field(max_length=16)] = []
    """Types of pod conditions that are true, e.g. DisruptionTarget; empty = any."""
    reasons: Annotated[list[Word], Field(max_length=16)] = []
    """Reasons of the container or the pod, e.g. OOMKilled, Evicted; empty = any."""
    message_pattern: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Text that the termination message contains; `*` stands for any text in between; null = any. No regular expression: those of users
    could hold up the operator for all."""
    action: RuleAction
    """RestartPod, Ignore: rollout and env pods only. RestartRole: all pods of the role. RestartJob: a new actor gang under a new epoch."""
    count_towards_limit: bool = True
    """Whether a restart counts towards maxRestarts (rollout and env pods: towards their back-off)."""

    @rule(
        Cel(
            holds="$exitCodes.size() + $podConditions.size() + $reasons.size() > 0 || has(self.messagePattern)",
            refusal=(
                "a rule must have one of exitCodes, podConditions, reasons, messagePattern, got 0"
                "; give one, or remove the rule"
            ),
        )
    )
    def _matches_something(self) -> Iterator[str]:
        if not (self.exit_codes or self.pod_conditions or self.reasons or self.message_pattern):
            yield "a rule must have one of exitCodes, podConditions, reasons, messagePattern, got 0; give one, or remove the rule"

    @rule(
        Cel(
            holds="!(self.action in ['RestartPod', 'Ignore']) || ($roles.size() > 0 && !('actor' in $roles))",
            refusal=(
                "action %s is for roles rollout and env only, as the actor restarts as a gang, got roles %s"
                "; name roles: [rollout, env] or use RestartJob"
            ),
            values=("self.action", "$roles"),
            field="action",
        )
    )
    def _gang_restarts_whole(self) -> Iterator[str]:
        if self.action in ("RestartPod", "Ignore") and (not self.roles or "actor" in self.roles):
            yield f"action {self.action} is for roles rollout and env only, as the actor restarts as a gang, got roles {listed(self.roles)}; name roles: [rollout, env] or use RestartJob"


class StallSpec(Spec):
    """What happens when nothing makes progress."""

    seconds: float | None = Field(None, gt=0)
    """Silence that counts as a stall; null = max(300, 5 x median step)."""
    action: Literal["RestartRole", "RestartJob", "Pause", "FailJob"] = "RestartRole"
    """RestartRole once, then RestartJob; or at once as written. Pause: suspend the job."""


class NonFiniteLossSpec(Spec):
    """The loss is NaN or infinite."""

    steps: int = Field(1, ge=1, le=1000)
    """Steps in a row that count."""
    action: SemanticAction
    """What is done; the wrong state is not saved, and checkpoints from since it went wrong are set aside. Pause: until somebody suspends and
    resumes the job."""


class RewardCollapseSpec(Spec):
    """The mean reward stays low."""

    below: float
    """Rewards below this count."""
    steps: int = Field(10, ge=1, le=1000)
    """Steps in a row that count."""
    action: SemanticAction
    """What is done; the wrong state is not saved, and checkpoints from since it went wrong are set aside. Pause: until somebody suspends and
    resumes the job."""


class KlBlowUpSpec(Spec):
    """The policy runs away from the one that sampled."""

    above: float = Field(gt=0)
    """approx_kl above this counts."""
    steps: int = Field(1, ge=1, le=1000)
    """Steps in a row that count."""
    action: SemanticAction
    """What is done; the wrong state is not saved, and checkpoints from since it went wrong are set aside. Pause: until somebody suspends and
    resumes the job."""


class MismatchSpec(Spec):
    """Engine and trainer disagree about what was sampled."""

    kl: float = Field(gt=0)
    """mismatch/kl above this counts; a step without tokens of the trained version is passed over."""
    steps: int = Field(3, ge=1, le=1000)
    """Steps in a row that count."""
    action: SemanticAction
    """What is done; the wrong state is not saved, and checkpoints from since it went wrong are set aside. Pause: until somebody suspends and
    resumes the job."""


class FailurePolicySpec(Spec):
    """Restarts."""

    max_restarts: int = Field(3, ge=0, le=1_000_000)
    """Counted restarts of the actor gang before the run fails."""
    forgive_after_steps: Annotated[int, Field(ge=1, lt=2**31)] | None = 50
    """Steps that the run must finish, beyond the step of its last counted restart or act on a stall, to get one restart back and to have
    stalls treated like a first one again; null = nothing is forgiven."""
    stall: StallSpec = StallSpec()
    """Rule for stalls."""
    rules: Annotated[list[FailureRule], Field(max_length=32)] = []
    """Rules for ended containers, tried in order before the default ones."""
    non_finite_loss: NonFiniteLossSpec | None = None
    """Rule for a loss that is not finite; null = the trainer skips such steps (actor.maxConsecutiveSkips)."""
    reward_collapse: RewardCollapseSpec | None = None
    """Rule for rewards that stay low; null = none."""
    kl_blow_up: KlBlowUpSpec | None = None
    """Rule for a policy that runs away; null = none."""
    mismatch: MismatchSpec | None = None
    """Rule for log-probabilities of engine and trainer that differ at the same version; null = none."""
