"""The deadlines and the TTL of a job, and the times at which it must be reconciled because of them."""

from __future__ import annotations

from rljob_operator.reconcile.job_view import JobView
from rljob_operator.reconcile.record import Record


def runtime_seconds(record: Record, now: float) -> int:
    """Return the seconds that the job has run, without suspended time."""
    if record.start_time is None:
        return 0
    end = record.completion_time if record.completion_time is not None else now
    return max(int(end) - int(record.start_time) - record.suspended_seconds, 0)


def overdue(view: JobView) -> str:
    """Return a message about the deadline that has passed; empty when none has."""
    record, spec = view.record, view.spec
    if record.start_time is None:
        return ""
    runtime = runtime_seconds(record, view.now)
    if spec.active_deadline_seconds is not None and runtime >= spec.active_deadline_seconds:
        return f"the job ran for activeDeadlineSeconds {spec.active_deadline_seconds} without finishing"
    if spec.start_deadline_seconds is not None and not _has_begun(view) and runtime >= spec.start_deadline_seconds:
        return f"the first step was not finished within startDeadlineSeconds {spec.start_deadline_seconds}"
    return ""


def until_overdue(view: JobView) -> float | None:
    """Return the seconds until a deadline passes; None without one."""
    record, spec = view.record, view.spec
    runtime = runtime_seconds(record, view.now)
    limits = [spec.active_deadline_seconds, None if _has_begun(view) else spec.start_deadline_seconds]
    remaining = [max(limit - runtime, 0) for limit in limits if limit is not None]
    return float(min(remaining)) if remaining else None


def until_deleted(record: Record, ttl: int | None, now: float) -> float | None:
    """Return the seconds until an ended job is deleted; None without a TTL (`ttlSecondsAfterFinished`)."""
    if ttl is None or record.completion_time is None:
        return None
    return max(record.completion_time + ttl - now, 0.0)


def _has_begun(view: JobView) -> bool:
    """Return whether the job has ever finished a step."""
    if view.record.first_step_time is not None:
        return True
    report = view.report
    return report is not None and (report.count("step") or 0) > 0
