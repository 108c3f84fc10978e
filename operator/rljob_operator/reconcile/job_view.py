"""The view of a job: its spec, its recorded status and the observed objects. All decisions are functions of this view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl_core.api.defaults import Defaults
from rl_core.api.job import RLJob, RLJobSpec
from rl_core.plan.groups import CONTROL_GROUP, Group, groups_of
from rl_core.plan.slots import own_pods
from rljob_operator import naming
from rljob_operator.model import Object, Observed, OperatorConfig, PodView
from rljob_operator.reconcile import record as records
from rljob_operator.reconcile import report as reports
from rljob_operator.reconcile.record import Record
from rljob_operator.reconcile.report import Report, whole_number


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """Everything that a decision depends on: spec, recorded status, observed objects and time. The time is in seconds since 1970."""

    raw: Object
    """The RLJob object as read from the API server."""
    job: RLJob
    defaults: Defaults
    """The defaults that the job was accepted under, with which `job` was resolved."""
    record: Record
    """The counters and timestamps that are recorded in the status."""
    observed: Observed
    now: float
    config: OperatorConfig
    pods: Mapping[str, PodView]
    """The pods that the job owns, by name."""
    groups: Mapping[str, Group]
    """The groups of the job, by name."""
    by_group: Mapping[str, tuple[PodView, ...]]
    """Pods of the job by group and index; for a gang, only those of the current epoch."""
    old_gang: tuple[PodView, ...]
    """Pods of gangs of other epochs, by index."""
    names: Mapping[str, tuple[str, ...]]
    """Names of the desired pods of a running job, by group and index."""
    previous: tuple[PodView, ...]
    """Pods that are left over from an earlier job of this name, which was deleted; sorted by name."""
    unowned_pods: tuple[str, ...]
    """Names of pods that have the labels of the job but no RLJob as owner."""
    epoch: int
    """The current epoch of the gang; 0 before the first one."""
    report: Report | None
    """The newest status of the runner in this epoch, or its final status if actor-0 has ended."""

    @property
    def spec(self) -> RLJobSpec:
        """The spec of the job."""
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
        reported = (self.report.count("step") or 0) if self.report is not None and self.report.begun else 0
        recorded = whole_number(self.record.raw.get("step")) or 0
        return max(reported, recorded if self.record.epoch == self.epoch else 0)

    @property
    def first_actor(self) -> PodView | None:
        """The pod of the runner, if it is of the current epoch."""
        pod = self.pods.get(naming.runner_pod(self.name))
        return pod if pod is not None and pod.epoch == self.epoch else None

    @property
    def previous_pods(self) -> tuple[str, ...]:
        """Names of the pods of a deleted job of the same name."""
        return tuple(pod.name for pod in self.previous)

    @property
    def gangs(self) -> tuple[str, ...]:
        """Names of the worker groups whose members restart together."""
        return tuple(name for name, group in self.groups.items() if not group.elastic)

    @property
    def elastic(self) -> tuple[str, ...]:
        """Names of the worker groups whose members are replaced one by one."""
        return tuple(name for name, group in self.groups.items() if group.elastic)

    def is_gang(self, group: str) -> bool:
        """Return whether `group` is a gang of this job."""
        return group in self.groups and not self.groups[group].elastic

    def hosts(self, group: str) -> tuple[PodView, ...]:
        """Return the pods that run processes of a worker group, by index.

        For colocated rollouts these are first the actor's pods that contain some of them, then the group's own pods.
        """
        num_inside = self.wanted_indices(group).start
        return (*self.by_group[CONTROL_GROUP][:num_inside], *self.by_group[group])

    def wanted_indices(self, group: str) -> range:
        """Return the indices of the pods that a worker group should have while the job runs."""
        return own_pods(self.spec, group, self.groups)

    def num_wanted(self, *groups: str) -> int:
        """Return the number of pods that these worker groups should have while the job runs."""
        return sum(len(self.names[group]) for group in groups)

    def wanted_pod_names(self, *groups: str) -> tuple[str, ...]:
        """Return the names of the pods that these worker groups should have while the job runs, by group and index."""
        return tuple(name for group in groups for name in self.names[group])

    def pods_of(self, *groups: str) -> tuple[PodView, ...]:
        """Return the existing pods of these worker groups, by group and index; for a gang, only those of the current epoch."""
        return tuple(pod for group in groups for pod in self.by_group[group])


def build(
    job: RLJob,
    raw: Object,
    observed: Observed,
    now: float,
    *,
    defaults: Defaults,
    config: OperatorConfig,
    groups: Mapping[str, Group] | None = None,
) -> JobView:
    """Return the view of a job at time `now`, in seconds since 1970. `groups` None means the worker groups that the spec describes."""
    groups = groups_of(job.spec) if groups is None else groups
    uid = job.metadata.uid
    record = records.read(raw.get("status"))
    pods = {pod.name: pod for pod in observed.pods if pod.job_uid == uid}
    epoch = max([record.epoch, *(pod.epoch for pod in pods.values())])
    ordered = sorted(pods.values(), key=lambda pod: (pod.index, pod.name))
    runner = pods.get(naming.runner_pod(job.metadata.name))
    runner = runner if runner is not None and runner.epoch == epoch else None
    report = (reports.from_end(runner, epoch=epoch, at=now) if runner is not None and has_ended(runner) else None) or (
        reports.from_progress(observed.progress, runner, epoch=epoch)
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
        groups=groups,
        by_group={
            name: tuple(pod for pod in ordered if pod.role == name and (group.elastic or pod.epoch == epoch))
            for name, group in groups.items()
        },
        old_gang=tuple(
            pod for pod in ordered if pod.role in groups and not groups[pod.role].elastic and pod.epoch != epoch
        ),
        names={
            name: tuple(naming.pod(job.metadata.name, name, index) for index in own_pods(job.spec, name, groups))
            for name in groups
        },
        previous=tuple(
            sorted((pod for pod in observed.pods if pod.job_uid not in ("", uid)), key=lambda pod: pod.name)
        ),
        unowned_pods=tuple(sorted(pod.name for pod in observed.pods if not pod.job_uid)),
        epoch=epoch,
        report=report,
    )


def has_ended(pod: PodView) -> bool:
    """Return whether a container of the pod ended, which ends the pod, or the kubelet ended it as a whole."""
    return bool(pod.ended) or pod.phase in ("Failed", "Succeeded")


def is_active(pod: PodView) -> bool:
    """Return whether the pod has neither ended nor is being deleted."""
    return not pod.deleting and not has_ended(pod)
