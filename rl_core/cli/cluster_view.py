"""`rljob status|top|logs|scale` of a job on a cluster, shown as the local commands show a run."""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from rl_core.api.validation_metric import ValidationMetric, stored_validation_metric
from rl_core.cli.targets import ClusterSide, Place, counts_text
from rl_core.plan.groups import ROLLOUT

REFRESH_S = 2.0
FINAL = frozenset({"Succeeded", "Failed", "Suspended"})
GOOD_WHEN_FALSE = frozenset({"Degraded", "Suspended", "Failed"})
"""Conditions that are shown when they are true; the others are shown when they are false."""


def show_status(side: ClusterSide, name: str, place: Place) -> int:
    """Print the job's status as JSON; return 0."""
    job = side.job(name, place)
    document = {
        "name": name,
        "namespace": job["metadata"].get("namespace"),
        **(job.get("status") or {"phase": "Pending"}),
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
    return 0


def show_top(side: ClusterSide, name: str, place: Place, *, once: bool) -> int:
    """Print the tables, live until the job ends; return 0."""
    console = Console()
    read_job = side.watch(name, place)
    job = read_job()
    if once or not console.is_terminal:
        console.print(render(job))
        return 0
    with Live(render(job), console=console, refresh_per_second=4) as live:
        try:
            while (job.get("status") or {}).get("phase") not in FINAL:
                time.sleep(REFRESH_S)
                job = read_job()
                live.update(render(job))
        except KeyboardInterrupt:
            return 0
    return 0


def show_logs(
    side: ClusterSide,
    name: str,
    place: Place,
    *,
    role: str | None,
    index: int | None,
    attempt: int | None,
    follow: bool,
) -> int:
    """Print the logs of the job's pods, each line with its role and index; return 0."""

    def write(line: str) -> None:
        sys.stdout.write(line)
        sys.stdout.flush()

    try:
        side.logs(name, place, role=role, index=index, attempt=attempt, follow=follow, write=write)
    except KeyboardInterrupt:
        return 0
    return 0


def scale(side: ClusterSide, name: str, place: Place, counts: Mapping[str, int]) -> int:
    """Set the number of pods of elastic groups, by name; return 0."""
    namespace = side.scale(name, place, counts)
    counts_line = counts_text(counts)
    sys.stdout.write(f"{name} (namespace {namespace}): {counts_line} from the next step on\n")
    return 0


def render(job: dict[str, Any]) -> Group:
    """Return the tables of a job: the row of `kubectl get rljobs`, its roles, and conditions that need attention."""
    status = job.get("status") or {}
    tables = [job_table(status, stored_validation_metric(job)), role_table(status), condition_table(status)]
    return Group(*(table for table in tables if table is not None))


def job_table(status: dict[str, Any], measured: ValidationMetric) -> Table:
    """Return the columns of `kubectl get rljobs -o wide` for this job; VAL is the newest validation reward, accuracy or return."""
    metrics = {entry["name"]: entry["value"] for entry in status.get("metrics", [])}
    columns = status.get("columns") or {}
    table = Table(
        "PHASE",
        "STEP",
        "REWARD",
        "VAL",
        "VERSION",
        "LAG",
        "ROLLOUTS",
        "ATTEMPT",
        "RESTARTS",
        "TOK/S",
        "S/STEP",
        box=SIMPLE,
    )
    table.add_row(
        status.get("phase") or "Pending",
        columns.get("step") or "-",
        _number(status.get("reward")),
        _number(metrics.get(measured.key)),
        str(status.get("policyVersion", "-")),
        str(status.get("lag", "-")),
        columns.get("rollouts") or "-",
        str(status.get("epoch", "-")),
        str(status.get("restarts", "-")),
        _number(metrics.get("perf/tokens_per_second"), 0),
        _number(metrics.get("time/step"), 2),
    )
    return table


def role_table(status: dict[str, Any]) -> Table | None:
    """Return a row per role, None before the operator has written a status; BUSY is the range over the rollouts."""
    if not status.get("roles"):
        return None
    table = Table("ROLE", "READY", "ACTIVE", "VERSIONS", "BUSY", "RESTARTS", "FAILED", box=SIMPLE)
    busy = sorted(float(entry["value"]) for entry in status.get("busy", []))
    shares = "..".join(dict.fromkeys(f"{share:.0%}" for share in (busy[0], busy[-1]))) if busy else "-"
    for role in status["roles"]:
        versions = {str(role[field]) for field in ("minVersion", "maxVersion") if role.get(field) is not None}
        table.add_row(
            role["name"],
            f"{role.get('ready', 0)}/{role.get('desired', 0)}",
            str(role.get("active", 0)),
            "..".join(sorted(versions, key=int)) or "-",
            shares if role["name"] == ROLLOUT else "-",
            str(role.get("restarts", 0)),
            str(role.get("failed", 0)),
        )
    return table


def condition_table(status: dict[str, Any]) -> Table | None:
    """Return the conditions that are not as a healthy job's, None when there are none."""
    notable = [
        entry
        for entry in status.get("conditions", [])
        if entry["status"] == "Unknown" or (entry["status"] == "True") == (entry["type"] in GOOD_WHEN_FALSE)
        if entry["type"] != "Complete"
    ]
    if not notable:
        return None
    table = Table("CONDITION", "STATUS", "REASON", "MESSAGE", box=SIMPLE)
    for entry in notable:
        table.add_row(entry["type"], entry["status"], entry["reason"], entry.get("message", ""))
    return table


def _number(value: Any, digits: int = 3) -> str:
    try:
        return f"{float(value):.{digits}f}"
    except (TypeError, ValueError):
        return "-"
