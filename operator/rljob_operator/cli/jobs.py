"""Reads and changes one job on the cluster."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rl_core.api.errors import ConfigError
from rl_core.plan.groups import BUILT_IN, ROLLOUT, elastic_block
from rljob_operator.cli.connection import Connection, Json, explain
from rljob_operator.errors import ApiError, NotFound
from rljob_operator.kinds import RLJOB

FINAL_PHASES = frozenset({"Succeeded", "Failed"})
SUGGESTIONS = 3
UNPAUSE_SECONDS = 60.0
"""Seconds that the operator may take to replace the pause of a job by the suspension of its user."""
UNPAUSE_LOOK = 0.5


@contextmanager
def explained(connection: Connection, doing: str, name: str = "") -> Iterator[None]:
    """Turn refusals of the API server inside the block into ConfigErrors. If the job `name` is not found, the error lists similar names."""
    try:
        yield
    except NotFound as error:
        if name and f'"{name}" not found' in error.message:
            raise ConfigError(_no_such_job(connection, name)) from error
        raise explain(error, namespace=connection.namespace, doing=doing) from error
    except ApiError as error:
        raise explain(error, namespace=connection.namespace, doing=doing) from error


def read(connection: Connection, name: str) -> Json:
    """Return the job. Raises ConfigError if it does not exist."""
    with explained(connection, f"reading job {name}", name):
        return connection.read(RLJOB, name)


def change(connection: Connection, name: str, spec: Json, *, doing: str) -> Json:
    """Merge-patch the job's spec and return the job."""
    with explained(connection, doing, name):
        return connection.patch(RLJOB, name, {"spec": spec})


def scale(connection: Connection, name: str, counts: Mapping[str, int]) -> None:
    """Set the number of rollouts by the scale subresource, as an autoscaler does, and that of other elastic groups in the spec.

    Raises ConfigError for a group that the job does not have or that is not elastic.
    """
    with explained(connection, f"scaling job {name}", name):
        for group, count in counts.items():
            if group == ROLLOUT:
                connection.patch(RLJOB, name, {"spec": {"replicas": count}}, subresource="scale")
            elif group in BUILT_IN and BUILT_IN[group].elastic:
                connection.patch(RLJOB, name, {"spec": {group: {"replicas": count}}})
            else:
                job = connection.read(RLJOB, name)
                elastic_block(job["spec"], group)["replicas"] = count
                # The patch replaces the whole list, so it must fail when somebody else has changed the job meanwhile.
                precondition = {"resourceVersion": job["metadata"]["resourceVersion"]}
                connection.patch(RLJOB, name, {"metadata": precondition, "spec": {"groups": job["spec"]["groups"]}})


def condition(job: Json, kind: str) -> dict[str, Any]:
    """Return a condition of the job; empty if the job does not have it yet."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return next((entry for entry in conditions if entry["type"] == kind), {})


def phase(job: Json) -> str:
    """Return the phase of the job; Pending before the first reconcile."""
    return str((job.get("status") or {}).get("phase") or "Pending")


def paused(job: Json) -> bool:
    """Return whether a rule of failurePolicy has paused the job."""
    suspension = (job.get("status") or {}).get("halt") or {}
    return bool(suspension.get("by") == "rule")


def await_unpaused(connection: Connection, name: str) -> None:
    """Wait until the operator has replaced the pause by the user's suspension. Raises ConfigError after UNPAUSE_SECONDS."""
    deadline = time.monotonic() + UNPAUSE_SECONDS
    while paused(read(connection, name)):
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"the operator must take the suspension of job {name} within {UNPAUSE_SECONDS:.0f} s, got no sign of it; look at the "
                f"operator's pods, then run rljob resume {name} again"
            )
        time.sleep(UNPAUSE_LOOK)


def _no_such_job(connection: Connection, name: str) -> str:
    try:
        names = sorted(job["metadata"]["name"] for job in connection.list(RLJOB))
    except ApiError:
        names = []
    matches = difflib.get_close_matches(name, names, n=SUGGESTIONS, cutoff=0.5) or names[:SUGGESTIONS]
    suggestion = f"; did you mean {', '.join(matches)}?" if matches else "; there is none in it, use -n for another"
    return f"job {name} must exist in namespace {connection.namespace}, got none of that name{suggestion}"
