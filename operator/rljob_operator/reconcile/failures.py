"""Detection of failures of pods, of stalls and of metrics out of bounds, and the action that the failure rules select.

`judge` runs once per reconcile. If there are several findings, the most severe one decides. The end of a pod is judged once: the
record keeps the uid of the pod until the pod is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from rl_core.plan import failure_rules as rules
from rl_core.plan.failure_rules import Budget, PodEnd, PodFailures, Ruling
from rljob_operator.model import ContainerEnd, PodView
from rljob_operator.reconcile.job_view import JobView, has_ended, is_active
from rljob_operator.reconcile.record import STALL, Record
from rljob_operator.reconcile.report import termination_message

TAIL = 600
"""Characters of a log tail in a message."""
MOST_ACTS = 8
"""Most times of stall actions that the record keeps."""
DONE_PAUSE = 15.0
"""Seconds until a rollout or env pod that exited with code 0 is replaced. Usually the run is about to finish."""


class Act(IntEnum):
    """The action for a finding, in increasing order of severity.

    NOTHING, REPLACE_PODS, RESTART_ROLE, RESTART_JOB (a new epoch), ROLL_BACK, PAUSE, FAIL (the job).
    """

    NOTHING = 0
    REPLACE_PODS = 1
    RESTART_ROLE = 2
    RESTART_JOB = 3
    ROLL_BACK = 4
    """Like RESTART_JOB, but without saving a checkpoint first."""
    PAUSE = 5
    FAIL = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A detected failure and the action for it."""

    act: Act
    reason: str
    """Reason of the condition that reports it."""
    message: str
    counted: bool = True
    """Whether it counts against failurePolicy.maxRestarts."""
    role: str = ""
    """The role to restart, for RESTART_ROLE."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureFindings:
    """All failures since the previous reconcile, and the record in which each ended pod is counted."""

    record: Record
    findings: tuple[Finding, ...] = ()

    @property
    def gravest(self) -> Finding | None:
        """Return the most severe finding, None when there is none."""
        return max(self.findings, key=lambda finding: finding.act, default=None)


def judge(view: JobView) -> FailureFindings:
    """Return the failures of pods, stalls and metrics since the previous reconcile, with their actions."""
    record, findings = replenish(view, view.record), []
    for pod in _newly_ended(view):
        finding, record = _judge_pod(view, pod, record)
        findings.append(finding)
    findings += _vanished_gangs(view)
    record = _count_vanished(view, record)
    record, stalled = _judge_stall(view, record)
    findings += stalled + _judge_numbers(view)
    return FailureFindings(record=record, findings=tuple(f for f in findings if f.act is not Act.NOTHING))


def completed(view: JobView) -> bool:
    """Return whether actor-0 of this epoch exited with code 0, which means that the job has succeeded."""
    pod = view.first_actor
    if pod is None or any(end.init for end in pod.ended):
        return False
    return all(end.exit_code == 0 for end in pod.ended) if pod.ended else pod.phase == "Succeeded"


def describe(pod: PodView) -> str:
    """Return a message about the end of a pod: exit code, reason, the reason from the supervisor, and the last log lines."""
    end = decisive(pod)
    if pod.deleting and not has_ended(pod):
        return f"pod {pod.name} is being deleted" + (f" ({pod.disrupted})" if pod.disrupted else " by another client")
    if end is None:
        cause_text = ": ".join(part for part in (pod.disrupted or pod.reason, pod.message) if part)
        return f"pod {pod.name} ended" + (f" ({cause_text})" if cause_text else "")
    kind = "init container" if end.init else "container"
    code = f"{end.exit_code} ({end.reason})" if end.reason not in ("", "Error", "Completed") else str(end.exit_code)
    report = termination_message(end)
    text = ": ".join(part for part in (report.reason, report.tail[-TAIL:].strip()) if part)
    cause = pod.disrupted or ("deleted by another client" if pod.deleted_alive else pod.reason)
    cause_text = f" ({cause})" if cause else ""
    return f"{kind} {end.name} of pod {pod.name} ended with code {code}{cause_text}" + (f": {text}" if text else "")


def decisive(pod: PodView) -> ContainerEnd | None:
    """Return the container end that decides: the first with an error, else the first; None when no container has ended."""
    return next((end for end in pod.ended if end.exit_code != 0), pod.ended[0] if pod.ended else None)


def _newly_ended(view: JobView) -> list[PodView]:
    """Return the desired pods that ended or that another client deletes, without those that were judged before."""
    record, ended_pods = view.record, []
    for group in view.groups:
        restart_time = record.role(group).restart_time
        for pod in view.pods_of(group):
            is_judged = (failures := record.pod_failures.get(pod.name)) is not None and failures.uid == pod.uid
            is_expected = not view.is_gang(group) and (
                pod.index not in view.wanted_indices(group)
                or pod.name in record.draining
                or (restart_time is not None and pod.created <= restart_time)
            )
            if not is_active(pod) and not is_judged and not is_expected:
                ended_pods.append(pod)
    return ended_pods


def _judge_pod(view: JobView, pod: PodView, record: Record) -> tuple[Finding, Record]:
    end = decisive(pod)
    code = end.exit_code if end is not None else None
    if view.is_gang(pod.role) and code == 0 and not pod.deleting:
        # A rank has finished; the runner decides what that means.
        return Finding(act=Act.NOTHING, reason="", message=""), record
    ruling = rules.rule_on(_pod_end(pod, end), view.spec.failure_policy.rules, view.groups)
    text = describe(pod) + (f"; failurePolicy.rules[{ruling.rule}] applies" if ruling.rule is not None else "")
    if ruling.action == "FailJob":
        reason = rules.FATAL_CODES.get(code or 0, "PodFailed") if ruling.rule is None else "FailurePolicyRule"
        return Finding(act=Act.FAIL, reason=reason, message=text), _noted(view, pod, record, ruling)
    reason = _reason(pod, end)
    if view.is_gang(pod.role):
        return Finding(act=Act.RESTART_JOB, reason=reason, message=text, counted=ruling.counted), record
    act = {"RestartRole": Act.RESTART_ROLE, "RestartJob": Act.RESTART_JOB}.get(ruling.action, Act.REPLACE_PODS)
    updated = _noted(view, pod, record, ruling)
    return Finding(act=act, reason=reason, message=text, counted=ruling.counted, role=pod.role), updated


def _pod_end(pod: PodView, end: ContainerEnd | None) -> PodEnd:
    reasons = (*(e.reason for e in pod.ended), pod.reason, pod.disrupted)
    return PodEnd(
        role=pod.role,
        code=end.exit_code if end is not None else None,
        init=end is not None and end.init,
        reasons=tuple(reason for reason in reasons if reason),
        conditions=pod.conditions or ((rules.DISRUPTION,) if pod.disrupted else ()),
        message=end.message if end is not None else pod.message,
        deleted=pod.deleted_alive,
    )


def _reason(pod: PodView, end: ContainerEnd | None) -> str:
    if pod.disrupted:
        return "PodDisrupted"
    if pod.deleted_alive:
        return "PodDeleted"
    if end is None:
        return "PodFailed"
    return "InitContainerFailed" if end.init else "OutOfMemory" if end.reason == "OOMKilled" else "PodFailed"


def _noted(view: JobView, pod: PodView, record: Record, ruling: Ruling) -> Record:
    """Return the record with one more end of a pod: its attempt, its failures, and the back-off of its replacement."""
    pod_failures = record.pod_failures.get(pod.name) or PodFailures()
    container_end, deleted = decisive(pod), pod.deleted_alive or bool(pod.disrupted)
    if container_end is not None and container_end.exit_code == 0 and not deleted:
        pod_failures = PodFailures(uid=pod.uid, times=(view.now,), backoff=DONE_PAUSE)
    elif ruling.counted and ruling.action != "Ignore" and not deleted:
        pod_failures = rules.add_failure(pod_failures, view.now, uid=pod.uid)
    else:
        pod_failures = replace(pod_failures, uid=pod.uid)
    role = record.role(pod.role)
    failed = not deleted and (container_end is None or container_end.exit_code != 0)
    role = replace(role, restarts=role.restarts + 1, failed=role.failed + failed)
    failures = {name: old for name, old in record.pod_failures.items() if not _forgotten(view, name, old)}
    return replace(record, roles={**record.roles, pod.role: role}, pod_failures={**failures, pod.name: pod_failures})


def _forgotten(view: JobView, name: str, failures: PodFailures) -> bool:
    """Return whether the failures of a pod are outdated: the pod is deleted, and its failures are older than the back-off window."""
    if name not in view.pods and "-" not in name:
        return False
    no_pod = all(pod.uid != failures.uid for pod in view.pods.values())
    last_failure = failures.times[-1] if failures.times else 0.0
    return no_pod and view.now - last_failure > rules.FAILURE_WINDOW + failures.backoff


def _vanished_gangs(view: JobView) -> Iterator[Finding]:
    """Yield a finding for each gang with pods that were deleted before the operator observed their end."""
    for group in view.gangs if view.epoch == view.record.epoch else ():
        pods, num_before = view.pods_of(group), view.record.role(group).active
        if len(pods) >= min(num_before, view.num_wanted(group)):
            continue
        present = {pod.name for pod in pods}
        missing = ", ".join(name for name in view.wanted_pod_names(group) if name not in present)
        text = f"{group} pods do not exist any more: {missing}"
        yield Finding(act=Act.RESTART_JOB, reason="PodDeleted", message=text, counted=False)


def _count_vanished(view: JobView, record: Record) -> Record:
    """Increment the attempt of a role whose pods were deleted unobserved, so that replacements have a higher incarnation."""
    for group in view.elastic:
        role = record.role(group)
        already_counted = role.restarts - view.record.role(group).restarts
        num_inside = len(view.hosts(group)) - len(view.pods_of(group))
        num_lost = min(role.active - num_inside, view.num_wanted(group)) - len(view.pods_of(group))
        if num_lost > 0 and not already_counted:
            record = replace(record, roles={**record.roles, group: replace(role, restarts=role.restarts + 1)})
    return record


def _judge_stall(view: JobView, record: Record) -> tuple[Record, list[Finding]]:
    report, progress = view.report, view.observed.progress
    if report is None or report.stall is None or progress is None or progress.error:
        return record, []
    reported_seconds = report.stall.get("since")
    silent = float(reported_seconds) if isinstance(reported_seconds, int | float) else 0.0
    acts = record.pod_failures.get(STALL) or PodFailures()
    acted_at = acts.times[-1] if acts.times else None
    reason = str(report.stall.get("reason") or "")
    action, role = rules.rule_on_stall(view.spec.failure_policy.stall, reason, acts=len(acts.times), groups=view.groups)
    if action == "Ignore" or not rules.stall_action_is_due(silent, at=report.at, acted_at=acted_at):
        return record, []
    act = {"RestartRole": Act.RESTART_ROLE, "Pause": Act.PAUSE, "FailJob": Act.FAIL}.get(action, Act.RESTART_JOB)
    if act is Act.RESTART_ROLE and not view.wanted_pod_names(role):
        act = Act.RESTART_JOB  # The processes of the role run in the pods of the actor.
    message = f"no progress within the timeout of failurePolicy.stall: {stall_description(report.stall)}"
    finding = Finding(act=act, reason="Stalled", message=message, role=role)
    return count_restarts(view, record, stall_actions=1), [finding]


def count_restarts(view: JobView, record: Record, *, restarts: int = 0, stall_actions: int = 0) -> Record:
    """Return the record with restarts or stall actions counted against failurePolicy.maxRestarts at the current step."""
    interval, acts = view.spec.failure_policy.forgive_after_steps, record.pod_failures.get(STALL) or PodFailures()
    budget = _budget(record).consume(restarts=restarts, stall_actions=stall_actions, step=view.step, every=interval)
    if stall_actions:
        acts = replace(acts, times=(*acts.times, view.now)[-MOST_ACTS:])
        record = replace(record, pod_failures={**record.pod_failures, STALL: acts})
    return replace(record, restarts=budget.restarts, forgive_at=budget.forgive_at)


def replenish(view: JobView, record: Record) -> Record:
    """Return the record with the restarts that the finished steps restore (failurePolicy.forgiveAfterSteps)."""
    budget = _budget(record).replenish(view.step, every=view.spec.failure_policy.forgive_after_steps)
    remaining = {
        name: failures for name, failures in record.pod_failures.items() if budget.stall_actions or name != STALL
    }
    return replace(record, restarts=budget.restarts, forgive_at=budget.forgive_at, pod_failures=remaining)


def _budget(record: Record) -> Budget:
    acts = record.pod_failures.get(STALL) or PodFailures()
    return Budget(restarts=record.restarts, stall_actions=len(acts.times), forgive_at=record.forgive_at)


def stall_description(stall: object) -> str:
    """Return the reason of a stall and the waits of its members, without durations, so that the text does not change during the stall."""
    if not hasattr(stall, "get"):
        return "unknown"
    waits = stall.get("waits")
    edges = [edge for edge in waits if hasattr(edge, "get")] if isinstance(waits, list) else []
    text = "; ".join(f"{edge.get('who')} waits for {edge.get('on')} ({edge.get('what')})" for edge in edges[:8])
    return str(stall.get("reason") or "unknown") + (f": {text}" if text else "")


def _judge_numbers(view: JobView) -> list[Finding]:
    report = view.report
    if report is None:
        return []
    violation = rules.fired_rule(view.spec.failure_policy, report.raw.get("streaks"), report.raw.get("metrics"))
    if violation is None:
        return []
    act = {"RestartFromCheckpoint": Act.ROLL_BACK, "Pause": Act.PAUSE}.get(violation.action, Act.FAIL)
    return [Finding(act=act, reason=violation.reason, message=violation.message)]
