"""`spec.failurePolicy`: what happens when a container ends, the job makes no progress, or metrics go wrong.

The first rule that matches applies; the rules of the user come before the default ones, which are:

- A disruption restarts without being counted. A pod that somebody else deleted is a disruption too.
- Exit code 2 or 4 of any pod fails the job.
- Any other end of an actor pod restarts the job, which counts. That of a rollout or env pod restarts the pod, counted per pod.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rl_core.api.base import Spec, rule
from rl_core.api.bounds import listed
from rl_core.api.cel import Cel
from rl_core.api.identity import RoleName

RuleAction = Literal["RestartPod", "RestartRole", "RestartJob", "FailJob", "Ignore"]
SemanticAction = Literal["RestartFromCheckpoint", "Pause", "FailJob"]
Word = Annotated[str, Field(min_length=1, max_length=128)]


class FailureRule(Spec):
    """One rule. It matches when all given matchers match; a list matches when one of its entries does."""

    roles: Annotated[list[RoleName], Field(max_length=3)] = []
    """Roles that the rule applies to; empty = all."""
    exit_codes: Annotated[list[Annotated[int, Field(ge=0, le=255)]], Field(max_length=64)] = []
    """Exit codes of the ended container; empty = any."""
    pod_conditions: Annotated[list[Word], Field(max_length=16)] = []
    """Types of pod conditions with status True, e.g. DisruptionTarget; empty = any."""
    reasons: Annotated[list[Word], Field(max_length=16)] = []
    """Reasons of the container or the pod, e.g. OOMKilled, Evicted; empty = any."""
    message_pattern: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Text that the termination message contains; `*` stands for any text; null = any. It is not a regular expression, as those can take
    very long to match."""
    action: RuleAction
    """RestartPod, Ignore: replace the pod; rollouts and envs only. RestartRole: replace all pods of the role. RestartJob: start the actors again
    as a new attempt. FailJob: end the job."""
    count_towards_limit: bool = True
    """Count the restart towards maxRestarts; for rollout and env pods, towards their back-off."""

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
    """What happens when the job makes no progress."""

    seconds: float | None = Field(None, gt=0)
    """Seconds without progress that are a stall; null = max(300, 5 x median step)."""
    action: Literal["RestartRole", "RestartJob", "Pause", "FailJob"] = "RestartRole"
    """First action on a stall; after RestartRole, further stalls restart the job. Pause: suspend the job."""


class NonFiniteLossSpec(Spec):
    """The loss is NaN or infinite."""

    steps: int = Field(1, ge=1, le=1000)
    """Consecutive steps that trigger the rule."""
    action: SemanticAction
    """What happens. The state is not saved, and checkpoints written since the first of these steps are set aside. Pause: the job stays suspended
    until somebody suspends and resumes it."""


class RewardCollapseSpec(Spec):
    """The mean reward of steps stays low."""

    below: float
    """A step counts when its mean reward is below this."""
    steps: int = Field(10, ge=1, le=1000)
    """Consecutive steps that trigger the rule."""
    action: SemanticAction
    """What happens. The state is not saved, and checkpoints written since the first of these steps are set aside. Pause: the job stays suspended
    until somebody suspends and resumes it."""


class KlBlowUpSpec(Spec):
    """The policy moves far from the one that sampled."""

    above: float = Field(gt=0)
    """A step counts when its approx_kl exceeds this."""
    steps: int = Field(1, ge=1, le=1000)
    """Consecutive steps that trigger the rule."""
    action: SemanticAction
    """What happens. The state is not saved, and checkpoints written since the first of these steps are set aside. Pause: the job stays suspended
    until somebody suspends and resumes it."""


class MismatchSpec(Spec):
    """The log-probabilities of the generation engine and of the trainer differ."""

    kl: float = Field(gt=0)
    """A step counts when its mismatch/kl exceeds this; a step without tokens of the trained version is left out."""
    steps: int = Field(3, ge=1, le=1000)
    """Consecutive steps that trigger the rule."""
    action: SemanticAction
    """What happens. The state is not saved, and checkpoints written since the first of these steps are set aside. Pause: the job stays suspended
    until somebody suspends and resumes it."""


class FailurePolicySpec(Spec):
    """Which failures restart the job, and which end it."""

    max_restarts: int = Field(3, ge=0, le=1_000_000)
    """Counted restarts of the actors before the run fails."""
    forgive_after_steps: Annotated[int, Field(ge=1, lt=2**31)] | None = 50
    """Steps that the run must finish after its last counted restart or stall before one restart no longer counts and a stall is treated as
    the first one again; null = restarts always count."""
    stall: StallSpec = StallSpec()
    """Rule for stalls."""
    rules: Annotated[list[FailureRule], Field(max_length=32)] = []
    """Rules for ended containers, tried in order before the default ones."""
    non_finite_loss: NonFiniteLossSpec | None = None
    """Rule for a loss that is not finite; null = the trainer skips such steps (actor.maxConsecutiveSkips)."""
    reward_collapse: RewardCollapseSpec | None = None
    """Rule for a mean reward that stays low; null = none."""
    kl_blow_up: KlBlowUpSpec | None = None
    """Rule for a policy that moves far from the sampling policy; null = none."""
    mismatch: MismatchSpec | None = None
    """Rule for log-probabilities of engine and trainer that differ at the same version; null = none."""
