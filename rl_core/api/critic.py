"""`spec.algorithm.critic`: settings of the value function."""

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field

from rl_core.api.backends import EMBODIED_PROGRAMS
from rl_core.api.base import Spec
from rl_core.api.cel import Cel, literal
from rl_core.api.groups import GroupSpec
from rl_core.api.identity import ROLES

ACTOR, *_ = ROLES
IS_EMBODIED = f"self.?program.orValue('') in {literal(list(EMBODIED_PROGRAMS))}"
"""CEL of whether the policy of a job acts in simulators."""
IS_CRITIC = (
    "has(g.lifecycle) && g.lifecycle == 'gang' && (!has(g.replicas) || g.replicas == 1)"
    " && (!has(g.processesPerPod) || g.processesPerPod == 1) && has(g.callers) && g.callers.exists(c, c == 'actor')"
)
"""CEL of whether the group `g` can hold the critic."""
CRITIC_IS_A_GANG_OF_ONE = Cel(
    holds=(
        "!self.?algorithm.?critic.?group.hasValue()"
        f" || (has(self.groups) && self.groups.exists(g, g.name == self.algorithm.critic.group && {IS_CRITIC}))"
    ),
    refusal="algorithm.critic.group must name a group of spec.groups, a gang of one process with actor in callers, got %s; declare it",
    values=("self.algorithm.critic.group",),
    field="algorithm.critic.group",
)
CRITIC_IS_OF_TEXT = Cel(
    holds=f"!self.?algorithm.?critic.?group.hasValue() || !({IS_EMBODIED})",
    refusal="algorithm.critic.group needs a program of text, got %s with a program of simulators; remove group",
    values=("self.algorithm.critic.group",),
    field="algorithm.critic.group",
)
CRITIC_HAS_NO_WARM_UP = Cel(
    holds="$actor.criticWarmupSteps == 0 || !self.?algorithm.?critic.?group.hasValue()",
    refusal="actor.criticWarmupSteps must be 0 with algorithm.critic.group, got %d; remove one of them",
    values=("$actor.criticWarmupSteps",),
    field="actor.criticWarmupSteps",
)


class CriticSpec(Spec):
    """The value function of gae. Its learning rate is actor.optimizer.valueLearningRate, its warm-up actor.criticWarmupSteps."""

    separate: bool = False
    """true: a second model, initialized from model.path; false: a value head on the policy."""
    group: Annotated[str | None, Field(max_length=15)] = None
    """Group of spec.groups that holds the critic, a second model, on devices of its own; null = the actor."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per trainable token."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda of GAE: the decay of later temporal differences."""
    value_clip: float | None = Field(None, gt=0)
    """Value clipping (PPO): largest change of a value in a step that reduces the loss; null = off."""
    coefficient: float = Field(1.0, gt=0)
    """Weight of the value loss."""


def wrong_critic(
    critic: CriticSpec | None, groups: Sequence[GroupSpec], *, embodied: bool, warmup_steps: int
) -> Iterator[str]:
    """Yield the problems of a job whose critic is in a group.

    `embodied`: the program is one of simulators. `warmup_steps` is `actor.criticWarmupSteps`.
    """
    if critic is None or critic.group is None:
        return
    candidates = [
        group.name
        for group in groups
        if group.lifecycle == "gang" and group.replicas == group.processes_per_pod == 1 and "actor" in group.callers
    ]
    if critic.group not in candidates:
        yield (
            "algorithm.critic.group must name a group of spec.groups, a gang of one process with actor in callers, "
            f"got {critic.group}; declare it"
        )
    if embodied:
        yield f"algorithm.critic.group needs a program of text, got {critic.group} with a program of simulators; remove group"
    if warmup_steps:
        yield f"actor.criticWarmupSteps must be 0 with algorithm.critic.group, got {warmup_steps}; remove one of them"
