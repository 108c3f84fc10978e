"""Computes the plan for a job from the job, the observed objects and the time. Pure: it has no clock, no requests and no state."""

from rljob_operator.reconcile.reconciler import reconcile

__all__ = ["reconcile"]
