"""Where a role's pods may run: tolerations, affinity, spread. The fields are those of Kubernetes core/v1, bounded.

Left out: matchFields, which is nodeName by another name, and the namespaces of other pods.
"""

from typing import Annotated, Literal

from pydantic import Field

from rl_core.api.base import Spec
from rl_core.api.bounds import LabelMap, Name

LabelKey = Annotated[str, Field(min_length=1, max_length=317)]
LabelValues = Annotated[list[Annotated[str, Field(max_length=253)]], Field(max_length=32)]
Weight = Annotated[int, Field(ge=1, le=100)]


class Toleration(Spec):
    """A taint the pods tolerate."""

    key: Annotated[str, Field(max_length=317)] | None = None
    """Taint key; null = any, with operator Exists."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """How the value is compared."""
    value: Annotated[str, Field(max_length=253)] | None = None
    """Taint value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint effect; null = all."""
    toleration_seconds: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Seconds a NoExecute taint is tolerated; null = for ever."""


class LabelExpression(Spec):
    """One requirement on labels."""

    key: LabelKey
    """Label key."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How values are compared."""
    values: LabelValues = []
    """Values for In and NotIn."""


class LabelSelector(Spec):
    """Pods chosen by labels."""

    match_labels: LabelMap = {}
    """Labels that must be equal."""
    match_expressions: Annotated[list[LabelExpression], Field(max_length=16)] = []
    """Further requirements."""


class NodeExpression(Spec):
    """One requirement on a node's labels."""

    key: LabelKey
    """Label key."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """How values are compared."""
    values: LabelValues = []
    """Values for In, NotIn, Gt and Lt."""


class NodeTerm(Spec):
    """Requirements that must all hold."""

    match_expressions: Annotated[list[NodeExpression], Field(max_length=16)] = []
    """On labels."""


class NodeRequirement(Spec):
    """Terms of which at least one must hold."""

    node_selector_terms: Annotated[list[NodeTerm], Field(min_length=1, max_length=16)]
    """The terms."""


class NodePreference(Spec):
    """A preferred node term and its weight."""

    weight: Weight
    """1 to 100."""
    preference: NodeTerm
    """The preferred term."""


class NodeAffinity(Spec):
    """Rules about the nodes of the pods."""

    required_during_scheduling_ignored_during_execution: NodeRequirement | None = None
    """What must hold."""
    preferred_during_scheduling_ignored_during_execution: Annotated[list[NodePreference], Field(max_length=16)] = []
    """What should hold."""


class PodTerm(Spec):
    """Other pods, and the domain in which they are looked for."""

    label_selector: LabelSelector | None = None
    """Which pods of the job's namespace; null = none."""
    topology_key: LabelKey
    """Node label that makes the domain."""


class PodPreference(Spec):
    """A preferred pod term and its weight."""

    weight: Weight
    """1 to 100."""
    pod_affinity_term: PodTerm
    """The preferred term."""


class PodAffinity(Spec):
    """Near to, or far from, other pods."""

    required_during_scheduling_ignored_during_execution: Annotated[list[PodTerm], Field(max_length=16)] = []
    """What must hold."""
    preferred_during_scheduling_ignored_during_execution: Annotated[list[PodPreference], Field(max_length=16)] = []
    """What should hold."""


class Affinity(Spec):
    """Scheduling constraints."""

    node_affinity: NodeAffinity | None = None
    """Which nodes."""
    pod_affinity: PodAffinity | None = None
    """Near to which pods."""
    pod_anti_affinity: PodAffinity | None = None
    """Far from which pods."""


class TopologySpread(Spec):
    """How evenly pods are spread."""

    max_skew: Annotated[int, Field(ge=1, le=1024)]
    """Largest difference of pods between domains."""
    topology_key: LabelKey
    """Node label that makes the domain."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    """What a violation does."""
    label_selector: LabelSelector | None = None
    """Which pods are counted; null = the role's."""
    min_domains: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Fewest domains; null = 1."""
    node_affinity_policy: Literal["Honor", "Ignore"] | None = None
    """Whether node affinity limits the domains; null = Honor."""
    node_taints_policy: Literal["Honor", "Ignore"] | None = None
    """Whether taints limit the domains; null = Ignore."""
    match_label_keys: Annotated[list[Name], Field(max_length=8)] = []
    """Label keys whose values of the incoming pod are added to the selector."""
