"""(job, what is there, time) -> what to do. Pure: no clock, no request, no state of its own. Starts in `decision`."""

from rljob_operator.reconcile.reconciler import reconcile

__all__ = ["reconcile"]
