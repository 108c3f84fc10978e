"""The status, reason and message of each condition, from the view and the decision.

Messages contain no durations, so that they do not change while the state stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rl_core.plan.failure_rules import SHORTAGE
from rl_core.plan.groups import ROLLOUT
from rljob_operator.reconcile import obstacles, pod_lists
from rljob_operator.reconcile.conditions import TYPES, Fact
from rljob_operator.reconcile.failures import Act, stall_description
from rljob_operator.reconcile.job_view import JobView, is_active
from rljob_operator.reconcile.lifecycle import Decision, Stage
from rljob_operator.reconcile.obstacles import Obstacle

UNREACHABLE_SECONDS, UNREACHABLE_POLLS = 15.0, 2
"""A runner is unreachable when polls have failed for this many seconds and at least this often. A single poll may fail on a busy machine."""
IMAGE_ERRORS = (
    "ErrImage",
    "ImagePull",
    "InvalidImageName",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
)
NOT_DURABLE = "checkpoints are not durable: checkpoint.path is not on a PersistentVolumeClaim, so a restart of the actor loses all progress"


def phase_of(view: JobView, decision: Decision) -> str:
    """Return the phase of the job."""
    phase_by_stage = {Stage.SUSPENDING: "Suspending", Stage.SUSPENDED: "Suspended", Stage.RESTART: "Restarting"}
    if decision.stage is Stage.END:
        return decision.outcome or "Failed"
    if decision.stage is Stage.ENDED:
        return decision.record.phase
    if decision.stage in phase_by_stage:
        return phase_by_stage[decision.stage]
    previous = view.record.phase if view.record.epoch == decision.record.epoch else ""
    if decision.record.begun:
        return "Running"
    num_scheduled = sum(1 for pod in view.pods_of(*view.gangs) if pod.scheduled and is_active(pod))
    if num_scheduled >= view.num_wanted(*view.gangs):
        return "Starting"
    return "Restarting" if previous == "Restarting" else "Pending"


def facts(view: JobView, decision: Decision, obstacle: Obstacle | None) -> dict[str, Fact]:
    """Return the new state of each condition."""
    common = {
        "Accepted": _accepted(view, obstacle),
        "Suspended": _suspended(view, decision),
        "Complete": _complete(decision),
        "Failed": _failed(view, decision),
    }
    if decision.stage in (Stage.SUSPENDING, Stage.SUSPENDED):
        return common | _all("Suspended", "NotRunning")
    if decision.stage is Stage.END:
        return common | _all("Finished", "NotRunning")
    if decision.stage is Stage.RESTART:
        ready = Fact(status="False", reason="Restarting", message=decision.message)
        return (
            common
            | _all("NotReady", "NotRunning")
            | {"Scheduled": Fact(status="False", reason="PodsPending"), "Ready": ready}
        )
    scheduled = _scheduled(view, decision, obstacle)
    ready = _ready(view, decision, obstacle, scheduled)
    return common | {
        "Scheduled": scheduled,
        "Ready": ready,
        "Progressing": _progressing(view, decision),
        "WeightsInSync": _in_sync(view, decision),
        "Degraded": _degraded(view, decision),
    }


def invalid_spec_facts(problem: str, known: Iterable[str]) -> dict[str, Fact]:
    """Return the conditions of a job with an invalid spec; those whose types are in `known` exist already and are left out."""
    defaults = _all("NotAccepted", "NotRunning") | {
        "Suspended": Fact(status="False", reason="NotSuspended"),
        "Complete": Fact(status="False", reason="NotFinished"),
        "Failed": Fact(status="False", reason="NotFailed"),
    }
    accepted = Fact(status="False", reason="InvalidSpec", message=problem)
    return {kind: defaults[kind] for kind in TYPES if kind in defaults and kind not in known} | {"Accepted": accepted}


def phase_reason(facts: Mapping[str, Fact]) -> str:
    """Return the reason of the condition that explains the phase, for the column REASON of `kubectl get`."""
    for kind, status in (
        ("Failed", "True"),
        ("Complete", "True"),
        ("Accepted", "False"),
        ("Suspended", "True"),
        ("Suspended", "Unknown"),
    ):
        if facts[kind].status == status:
            return facts[kind].reason
    scheduled, ready, degraded = facts["Scheduled"], facts["Ready"], facts["Degraded"]
    if ready.status != "True":
        return scheduled.reason if scheduled.status == "False" and ready.reason == "NotScheduled" else ready.reason
    return degraded.reason if degraded.status == "True" else facts["Progressing"].reason


def _all(reason: str, degraded: str) -> dict[str, Fact]:
    """Return the facts of a job without a running gang; `reason` is theirs, `degraded` the reason of Degraded."""
    not_ready = "NotReady" if reason == "NotAccepted" else reason
    return {
        "Scheduled": Fact(status="False", reason=reason),
        "Ready": Fact(status="False", reason=reason),
        "Progressing": Fact(status="False", reason=not_ready),
        "WeightsInSync": Fact(status="Unknown", reason=not_ready),
        "Degraded": Fact(status="False", reason=degraded),
    }


def _accepted(view: JobView, obstacle: Obstacle | None) -> Fact:
    if obstacle is not None:
        return Fact(status="False", reason=obstacle.reason, message=obstacle.message)
    return Fact(
        status="True", reason="SpecAccepted", message="" if obstacles.checkpoints_persist(view) else NOT_DURABLE
    )


def _suspended(view: JobView, decision: Decision) -> Fact:
    suspension, previous = decision.record.suspension, view.record.suspension
    if suspension is not None:
        reason = (
            ("Paused" if suspension.done else "Pausing")
            if suspension.rule
            else "Suspended"
            if suspension.done
            else "Suspending"
        )
        return Fact(status="True" if suspension.done else "Unknown", reason=reason, message=suspension.explanation)
    resumed = previous is not None or view.record.condition("Suspended")[1] == "Resumed"
    return Fact(status="False", reason="Resumed" if resumed else "NotSuspended")


def _complete(decision: Decision) -> Fact:
    if decision.stage is Stage.END and decision.outcome == "Succeeded":
        return Fact(status="True", reason=decision.reason, message=decision.message)
    return Fact(status="False", reason="NotFinished")


def _failed(view: JobView, decision: Decision) -> Fact:
    """Return the condition Failed. While it is False, its reason is that of the last restart."""
    if decision.stage is Stage.END and decision.outcome == "Failed":
        return Fact(status="True", reason=decision.reason, message=decision.message)
    if decision.stage is Stage.RESTART and decision.reason != "Resumed":
        return Fact(status="False", reason=decision.reason, message=decision.message)
    role = next((finding for finding in decision.findings if finding.act is Act.RESTART_ROLE), None)
    if role is not None and decision.stage is Stage.RUN:
        return Fact(
            status="False", reason=role.reason, message=f"all {role.role} pods are being replaced: {role.message}"
        )
    status, reason, message = view.record.condition("Failed")
    return (
        Fact(status="False", reason=reason, message=message)
        if status == "False" and reason
        else Fact(status="False", reason="NotFailed")
    )


def _scheduled(view: JobView, decision: Decision, obstacle: Obstacle | None) -> Fact:
    if view.previous_pods:
        text = f"pods of an earlier job named {view.name} still end: {pod_lists.listed(view.previous_pods)}"
        return Fact(status="False", reason="PreviousJobTerminating", message=text)
    missing = pod_lists.absent_pods(view)
    if obstacle is not None and missing:
        return Fact(status="False", reason="NotAccepted", message=obstacle.message)
    refusals = pod_lists.refusals(view, missing)
    if refusals:
        reason = "QuotaExceeded" if "exceeded quota" in refusals else "CreateRefused"
        return Fact(status="False", reason=reason, message=refusals)
    messages = pod_lists.grouped(
        (pod.unschedulable, pod.name) for pod in pod_lists.wanted_pods(view) if pod.unschedulable
    )
    if messages:
        return Fact(status="False", reason="Unschedulable", message=messages)
    delayed = pod_lists.backing_off(view, decision.record, missing)
    if delayed:
        return _backing_off("False", delayed)
    unbound = [pod.name for pod in pod_lists.wanted_pods(view) if not pod.scheduled]
    if missing or unbound:
        return Fact(
            status="False",
            reason="PodsPending",
            message=f"not bound to a node yet: {pod_lists.listed([*missing, *unbound])}",
        )
    return Fact(status="True", reason="PodsScheduled")


def _ready(view: JobView, decision: Decision, obstacle: Obstacle | None, scheduled: Fact) -> Fact:
    gang, report = [pod for pod in view.pods_of(*view.gangs) if is_active(pod)], view.report
    complete = len(gang) >= view.num_wanted(*view.gangs)
    # The loop begins when all ranks are present. If one is lost, the gang restarts.
    if complete and decision.record.begun:
        return Fact(status="True", reason="RanksReady")
    _, reason, message = view.record.condition("Ready")
    if obstacle is not None and not complete:
        return Fact(status="False", reason="NotAccepted", message=obstacle.message)
    stuck = pod_lists.grouped((pod.waiting, pod.name) for pod in pod_lists.wanted_pods(view) if pod.waiting)
    if stuck:
        image = any(pod.waiting.startswith(IMAGE_ERRORS) for pod in pod_lists.wanted_pods(view))
        if image and reason == "ImagePullError" and "ImagePullBackOff" in stuck:
            # The kubelet alternates between the error and its back-off, so the message of the error is kept.
            stuck = message
        return Fact(status="False", reason="ImagePullError" if image else "ContainersWaiting", message=stuck)
    if scheduled.reason not in ("PodsScheduled", "PodsPending"):
        return Fact(status="False", reason="NotScheduled", message=scheduled.message)
    if view.old_gang:
        text = message if reason == "Restarting" else ""
        return Fact(status="False", reason="Restarting", message=text)
    if not complete or not all(pod.scheduled for pod in gang):
        return Fact(status="False", reason="WaitingForPods")
    if preparing := pod_lists.grouped(
        (f"init container {pod.preparing} is running", pod.name) for pod in gang if pod.preparing
    ):
        return Fact(status="False", reason="Preparing", message=preparing)
    missing = pod_lists.listed(sorted(pod for _, pod in report.missing)) if report is not None else ""
    return Fact(
        status="False", reason="WaitingForRanks", message=f"the runner is waiting for {missing}" if missing else ""
    )


def _progressing(view: JobView, decision: Decision) -> Fact:
    progress, report = view.observed.progress, view.report
    if unreachable(view):
        status, reason, message = view.record.condition("Progressing")
        if reason != "RunnerUnreachable":  # The first message is kept, because that of later polls may differ.
            message = f"the runner is unreachable: {progress.error if progress is not None else ''}"
        return Fact(status="Unknown", reason="RunnerUnreachable", message=message)
    if report is None:
        status, reason, message = view.record.condition("Progressing")
        if decision.record.begun and reason:  # this operator has just started and has not polled the runner yet
            return Fact(status=status, reason=reason, message=message)
        return Fact(status="Unknown", reason="NotReady")
    if report.stall is not None and report.stall.get("reason") != SHORTAGE:
        return Fact(status="False", reason="Stalled", message=stall_description(report.stall))
    if report.begun and (report.count("step") or 0) > 0:
        return Fact(status="True", reason="StepFinished")
    return Fact(status="Unknown", reason="NoStepYet")


def unreachable(view: JobView) -> bool:
    """Return whether the polls of a running runner have failed for UNREACHABLE_SECONDS and at least UNREACHABLE_POLLS times."""
    progress, runner_pod = view.observed.progress, view.first_actor
    if (
        progress is None
        or runner_pod is None
        or not is_active(runner_pod)
        or progress.failing_since is None
        or progress.pod_uid != runner_pod.uid
    ):
        return False
    was_reachable = runner_pod.ready or view.record.begun
    long_enough = view.now - progress.failing_since >= UNREACHABLE_SECONDS
    return was_reachable and long_enough and progress.failures >= UNREACHABLE_POLLS


def _in_sync(view: JobView, decision: Decision) -> Fact:
    report = view.report
    if report is None or not report.begun:
        if unreachable(view):
            return Fact(status="Unknown", reason="RunnerUnreachable")
        progress = view.observed.progress
        if decision.record.begun and (progress is None or not progress.status):
            # This operator has not polled the runner yet.
            status, reason, message = view.record.condition("WeightsInSync")
            return Fact(status=status, reason=reason or "NotReady", message=message)
        return Fact(status="Unknown", reason="NotReady")
    diverged = report.raw.get("diverged")
    failure = report.mapping("failure")
    if (isinstance(diverged, list) and diverged) or failure.get("type") == "WeightsDiverged":
        text = (
            pod_lists.listed(sorted(map(str, diverged)))
            if isinstance(diverged, list)
            else str(failure.get("message") or "")
        )
        return Fact(status="False", reason="WeightsDiverged", message=text)
    role = rollout_role(view)
    if not role.get("ready"):
        return Fact(status="Unknown", reason="NoRollouts")
    lag, max_staleness = role.get("lag"), view.spec.algorithm.max_staleness
    if isinstance(lag, int) and lag > max_staleness + 1:  # The lag is larger by 1 while a new version is being pulled.
        return Fact(
            status="False",
            reason="RolloutsBehind",
            message=f"the weights of a rollout are more than algorithm.maxStaleness {max_staleness} versions old",
        )
    return Fact(status="True", reason="InSync")


def rollout_role(view: JobView) -> Mapping[str, object]:
    """Return the status of all rollouts as the runner reports it; empty when it reports none."""
    roles = view.report.raw.get("roles") if view.report is not None else None
    for role in roles if isinstance(roles, list) else []:
        if isinstance(role, Mapping) and role.get("name") == ROLLOUT:
            return role
    return {}


def _backing_off(status: str, pod_names: list[str]) -> Fact:
    message = f"replacements are delayed after repeated failures: {pod_lists.listed(pod_names)}"
    return Fact(status=status, reason="RestartBackOff", message=message)


def _refused_change(view: JobView) -> Fact | None:
    """Return the fact about the current spec if the runner rejected it; None if it was not rejected or is applied."""
    refused, report = view.observed.refused_change, view.report
    if refused is None or refused[0] != view.generation:
        return None
    if report is not None and (report.applied_generation or 0) >= view.generation:
        return None
    return Fact(status="True", reason="ChangeRefused", message=f"the runner rejected the changed spec: {refused[1]}")


def _degraded(view: JobView, decision: Decision) -> Fact:
    gang = set(view.wanted_pod_names(*view.gangs))
    absent = [name for name in pod_lists.absent_pods(view) if name not in gang]
    delayed = pod_lists.backing_off(view, decision.record, absent)
    if delayed:
        return _backing_off("True", delayed)
    if phase_of(view, decision) != "Running":
        return Fact(status="False", reason="NotRunning")
    counts = {group: (view.num_wanted(group), pod_lists.ready_pods(view, group)) for group in view.elastic}
    if all(ready >= desired for desired, ready in counts.values()):
        refused = _refused_change(view)
        return refused if refused is not None else Fact(status="False", reason="AllRolesReady")
    text = ", ".join(
        f"{ready} of {desired} {group} pods are ready" for group, (desired, ready) in counts.items() if ready < desired
    )
    for group, (desired, ready) in counts.items():
        minimum = view.groups[group].min_replicas
        if ready < min(minimum - view.wanted_indices(group).start, desired):
            return Fact(
                status="True",
                reason="BelowMinimum",
                message=f"{text}; the run waits until minReplicas {minimum} are ready",
            )
    messages = pod_lists.grouped((pod.waiting, pod.name) for pod in pod_lists.wanted_pods(view) if pod.waiting)
    failure_text = "; ".join(finding.message for finding in decision.findings if finding.act is Act.REPLACE_PODS)
    status, reason, message = view.record.condition("Degraded")
    if failure_text or (status == "True" and reason == "PodEnded"):
        return Fact(status="True", reason="PodEnded", message=failure_text or message)
    return Fact(status="True", reason="PodsMissing", message="; ".join(filter(None, (text, messages))))
