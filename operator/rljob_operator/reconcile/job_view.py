"""One job at one moment: what is wanted, what was remembered, what is there. All rules are written over this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl_core.api.defaults import Defaults
from rl_core.api.job import RLJob, RLJobSpec
from rl_core.api.roles import RoleSpec
from rl_core.plan.slots import colocated_rollouts, own_pods
from rljob_operator import naming
from rljob_operator.model import Object, Observed, OperatorConfig, PodView
from rljob_operator.reconcile import record as records
from rljob_operator.reconcile import report as reports
from rljob_operator.reconcile.record import Record
from rljob_operator.reconcile.report import Report, whole

ROLES = ("actor", "rollout", "env")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """The inputs of a decision."""

    raw: Object
    """The object as the API server has it."""
    job: RLJob
    defaults: Defaults
    """Those the job was accepted under, by which `job` is resolved."""
    record: Record
    """What the status remembers."""
    observed: Observed
    now: float
    config: OperatorConfig
    pods: Mapping[str, PodView]
    """Our pods, by name."""
    by_role: Mapping[str, tuple[PodView, ...]]
    """Our pods by role and index; of the actor those of this epoch only."""
    old_gang: tuple[PodView, ...]
    """Our actor pods of other epochs, by index."""
    names: Mapping[str, tuple[str, ...]]
    """Names of the pods that are wanted while the job runs, by role and index."""
    earlier: tuple[str, ...]
    """Names of pods of an earlier job of this name."""
    strangers: tuple[str, ...]
    """Names of pods with our labels that no RLJob owns."""
    epoch: int
    """Epoch of the gang that is, or is to be, there; 0 before the first."""
    report: Report | None
    """The runner's word of this epoch: its newest answer, or its last one when actor-0 has ended."""

    @property
    def spec(self) -> RLJobSpec:
        """What the user asks for."""
        return self.job.spec

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.job.metadata.name

    @property
    def generation(self) -> int:
        """metadata.generation, 0 when absent."""
        value = self.raw["metadata"].get("generation")
        return value if isinstance(value, int) else 0

    @property
    def step(self) -> int:
        """The last finished step of this epoch, as the runner or the status knows it."""
        told = (self.report.count("step") or 0) if self.report is not None and self.report.begun else 0
        known = whole(self.record.raw.get("step")) or 0
        return max(told, known if self.record.epoch == self.epoch else 0)

    @property
    def first_actor(self) -> PodView | None:
        """The pod of the runner, of this epoch."""
        pod = self.pods.get(naming.pod(self.name, "actor", 0))
        return pod if pod is not None and pod.epoch == self.epoch else None

    def role(self, role: str) -> RoleSpec:
        """Return the spec of a role."""
        return {"actor": self.spec.actor, "rollout": self.spec.rollout, "env": self.spec.env}[role]

    def hosts(self, role: str) -> tuple[PodView, ...]:
        """Return our pods that run processes of `role`, by index; of the actor those of this epoch only."""
        inside = colocated_rollouts(self.spec) if role == "rollout" else 0
        return (*self.by_role["actor"][:inside], *self.by_role[role])

    def indices(self, role: str) -> range:
        """Return the indices of the pods of a role that are wanted while the job runs."""
        return own_pods(self.spec, role)

    def desired(self, role: str) -> int:
        """Return how many pods of a role are wanted while the job runs."""
        return len(self.names[role])

    def wanted(self, role: str) -> tuple[str, ...]:
        """Return the names of the pods of a role that are wanted while the job runs, by index."""
        return self.names[role]

    def pods_of(self, role: str) -> tuple[PodView, ...]:
        """Return our pods of a role, by index; of the actor those of this epoch only."""
        return self.by_role[role]


def build(
    job: RLJob, raw: Object, observed: Observed, now: float, *, defaults: Defaults, config: OperatorConfig
) -> JobView:
    """Sort what is there."""
    uid = job.metadata.uid
    record = records.read(raw.get("status"))
    pods = {pod.name: pod for pod in observed.pods if pod.job_uid == uid}
    epoch = max([record.epoch, *(pod.epoch for pod in pods.values())])
    ordered = sorted(pods.values(), key=lambda pod: (pod.index, pod.name))
    first = pods.get(naming.pod(job.metadata.name, "actor", 0))
    first = first if first is not None and first.epoch == epoch else None
    report = (reports.from_end(first, epoch=epoch, at=now) if first is not None and has_ended(first) else None) or (
        reports.from_progress(observed.progress, first, epoch=epoch)
    )
    return JobView(
        raw=raw,
        job=job,
        defaults=defaults,
        record=record,
        observed=observed,
        now=now,
        config=config,
        pods=pods,
        by_role={r: tuple(p for p in ordered if p.role == r and (r != "actor" or p.epoch == epoch)) for r in ROLES},
        old_gang=tuple(p for p in ordered if p.role == "actor" and p.epoch != epoch),
        names={r: tuple(naming.pod(job.metadata.name, r, i) for i in own_pods(job.spec, r)) for r in ROLES},
        earlier=tuple(sorted(pod.name for pod in observed.pods if pod.job_uid and pod.job_uid != uid)),
        strangers=tuple(sorted(pod.name for pod in observed.pods if not pod.job_uid)),
        epoch=epoch,
        report=report,
    )


def has_ended(pod: PodView) -> bool:
    """Return whether a container of the pod ended, which ends the pod, or the kubelet ended it as a whole."""
    return bool(pod.ended) or pod.phase in ("Failed", "Succeeded")


def is_active(pod: PodView) -> bool:
    """Return whether the pod is there to stay: neither ended nor being deleted."""
    return not pod.deleting and not has_ended(pod)
