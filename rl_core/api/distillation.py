"""`spec.algorithm.distillation`: the teachers of on-policy distillation."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field

from rl_core.api.base import Spec, rule
from rl_core.api.cel import Cel
from rl_core.api.groups import GroupSpec

NAMED = (
    "(has(self.algorithm.distillation.teacher) ? [self.algorithm.distillation.teacher]"
    " : self.algorithm.distillation.teachers.map(k, self.algorithm.distillation.teachers[k]))"
)
"""CEL list of the groups that a job names as teachers."""
TEACHES = (
    "has(self.groups) && self.groups.exists(g, g.name == t && has(g.callers) && g.callers.exists(c, c == 'actor'))"
)
"""CEL of whether the group `t` answers the actor."""
TEACHERS_ARE_GROUPS = Cel(
    holds=f"!self.?algorithm.?distillation.hasValue() || {NAMED}.all(t, {TEACHES})",
    refusal="algorithm.distillation must name groups of spec.groups with actor in callers, got %s; declare them",
    values=(f"{NAMED}.filter(t, !({TEACHES}))",),
    field="algorithm.distillation",
)


class DistillationSpec(Spec):
    """The teachers, and how much the rewards count beside them."""

    teacher: str | None = Field(None, max_length=15)
    """Group of spec.groups that is the teacher of all prompts."""
    teachers: Annotated[dict[str, Annotated[str, Field(max_length=15)]], Field(max_length=16)] = {}
    """Several teachers: value of the prompt's `column` -> group of spec.groups."""
    column: str | None = Field(None, min_length=1, max_length=253)
    """Column of the prompts that chooses the teacher; needs teachers."""
    reward_weight: float = Field(0.0, ge=0)
    """Weight of the GRPO advantage of the rewards, which is added to that of the teacher; 0 = the teacher alone."""

    top_k: int | None = Field(None, ge=1, le=1024)
    """Number of tokens that the teacher finds likeliest in the place of each token, over which the reverse KL is the loss, with a bin for all
    others; null = the advantage of the sampled token alone."""

    @property
    def groups(self) -> list[str]:
        """Return the names of the teachers' groups."""
        return [self.teacher] if self.teacher is not None else sorted(set(self.teachers.values()))

    def group_of(self, value: object) -> str | None:
        """Return the group that teaches prompts with `value` in the column; None where there is none."""
        return self.teacher if self.teacher is not None else self.teachers.get(str(value))

    @rule(
        Cel(
            holds="has(self.teacher) != (has(self.teachers) && self.teachers.size() > 0)",
            refusal="teacher or teachers must be given, not both; set one of them",
            field="teacher",
        ),
        Cel(
            holds="has(self.column) == (has(self.teachers) && self.teachers.size() > 0)",
            refusal="column must be given exactly with teachers, whose keys are its values; set both or neither",
            field="column",
        ),
    )
    def _one_or_several(self) -> Iterator[str]:
        if (self.teacher is not None) == bool(self.teachers):
            yield "teacher or teachers must be given, not both; set one of them"
        if (self.column is not None) != bool(self.teachers):
            yield "column must be given exactly with teachers, whose keys are its values; set both or neither"


def unknown_teachers(distillation: DistillationSpec | None, groups: Sequence[GroupSpec]) -> Iterator[str]:
    """Yield the problem of a job whose teachers are no groups that the actor may call."""
    teaching = [group.name for group in groups if "actor" in group.callers]
    if distillation is not None and (unknown := [name for name in distillation.groups if name not in teaching]):
        yield f"algorithm.distillation must name groups of spec.groups with actor in callers, got {json.dumps(unknown)}; declare them"
