"""Decides whether `rollout.autoscale` changes the number of rollouts, by rl_core/plan/autoscale.py and the newest status of the runner.

The number stays while the runner has not applied the user's newest edit, while pods drain, and while the runner does not answer. The
new number is written with the generation that it was decided on (apply.py), so that an edit made in between takes precedence.
"""

from __future__ import annotations

from rl_core.plan import autoscale
from rljob_operator.model import JobEvent, Scale
from rljob_operator.reconcile.job_view import JobView
from rljob_operator.reconcile.lifecycle import Decision, Stage
from rljob_operator.reconcile.scaling import PodMoves, fresh_report

EVENT = "Autoscaled"


def wanted(view: JobView, decision: Decision, moves: PodMoves) -> Scale | None:
    """Return the number of rollouts to write into the spec; None means that it stays as it is."""
    report = fresh_report(view)
    if decision.stage is not Stage.RUN or report is None or not report.begun or moves.draining:
        return None
    if report.applied_generation is None or report.applied_generation < view.generation:
        return None
    shares = autoscale.read(report.raw.get("workload"))
    verdict = autoscale.decide(view.spec.rollout, shares, on_policy=not view.spec.algorithm.max_staleness)
    if verdict is None:
        return None
    return Scale(
        replicas=verdict.replicas,
        generation=view.generation,
        event=JobEvent(type="Normal", reason=EVENT, message=verdict.reason),
    )
