"""`rljob status|top|logs` of a local run, read from its output folder."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from rl_core.api.errors import ConfigError
from rl_core.api.validation_metric import ACCURACY, ValidationMetric, stored_validation_metric
from rl_core.launch.workspace import is_abandoned, stored_job
from rl_core.plan.groups import ROLLOUT

REFRESH_S = 1.0
NARROW: dict[str, Any] = {"box": SIMPLE, "padding": 0, "show_edge": False}
"""Layout with which the widest table fits 80 columns."""
FINAL = frozenset({"Finished", "Failed", "Suspended"})
KILLED = "the launcher of the run was killed, and its processes with it; continue with rljob run --resume auto"


def read_status(folder: Path) -> dict[str, Any]:
    """Return the last status of the run in `folder`, as Failed where its launcher was killed. Raises ConfigError when there is none."""
    path = folder / "status.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder} must be the output folder of a run, got one without status.json; pass the folder printed by rljob run"
        )
    abandoned = is_abandoned(folder)  # before the status is read: a launcher writes the final status, then unlocks
    status: dict[str, Any] = json.loads(path.read_text())
    if abandoned and status.get("phase") not in FINAL:
        status |= {"phase": "Failed", "failure": {"type": "", "message": KILLED, "exitCode": 3}}
    return status


def show_status(folder: Path) -> int:
    """Print the status as JSON; return 0."""
    sys.stdout.write(json.dumps(read_status(folder), indent=2) + "\n")
    return 0


def show_top(folder: Path, *, once: bool) -> int:
    """Print the tables, live until the run ends; return 0."""
    console = Console()
    measured = stored_validation_metric(stored_job(folder))
    status = read_status(folder)
    if once or not console.is_terminal:
        console.print(render(status, measured))
        return 0
    with Live(render(status, measured), console=console, refresh_per_second=4) as live:
        try:
            while status.get("phase") not in FINAL:
                time.sleep(REFRESH_S)
                status = read_status(folder)
                live.update(render(status, measured))
        except KeyboardInterrupt:
            return 0
    return 0


def render(status: dict[str, Any], measured: ValidationMetric = ACCURACY) -> Group:
    """Return the tables of a run: state, members, holders of shared devices, holders of prompt groups, waits.

    `measured` is what validation measures.
    """
    return Group(
        *(
            table
            for table in (
                run_table(status, measured),
                member_table(status),
                device_table(status),
                group_table(status),
                wait_table(status),
            )
            if table is not None
        )
    )


def _number(value: Any, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"


def run_table(status: dict[str, Any], measured: ValidationMetric) -> Table:
    """Return the columns of `kubectl get rljobs` for this job; VAL is the newest validation reward, accuracy or return.

    TRY is the attempt of the run, ATTEMPT in wider tables.
    """
    metrics = status.get("metrics", {})
    rollout: dict[str, Any] = next((role for role in status.get("roles", []) if role["name"] == ROLLOUT), {})
    table = Table(
        "PHASE", "STEP", "REWARD", "VAL", "VER", "LAG", "ROLLOUTS", "SAVED", "TRY", "TOK/S", "S/STEP", **NARROW
    )
    table.add_row(
        status.get("phase", "-"),
        f"{status.get('step', 0)}/{status.get('totalSteps', '?')}",
        _number(status.get("reward")),
        _number(metrics.get(measured.key)),
        str(status.get("policyVersion", "-")),
        str(rollout.get("lag", "-")),
        f"{rollout.get('ready', '-')}/{rollout.get('desired', '-')}",
        str((status.get("checkpoint") or {}).get("lastStep", "-")),
        str(status.get("epoch", 0)),
        _number(metrics.get("perf/tokens_per_second"), 0),
        _number(metrics.get("time/step"), 2),
    )
    return table


def member_table(status: dict[str, Any]) -> Table | None:
    """Return a row per member, None before any joined."""
    if not status.get("members"):
        return None
    busy = {rollout["name"]: f"{rollout['busy']:.0%}" for rollout in (status.get("workload") or {}).get("rollouts", [])}
    table = Table("MEMBER", "POD", "STATE", "VERSION", "BUSY", **NARROW)
    for member in status["members"]:
        version = "-" if member["policyVersion"] is None else str(member["policyVersion"])
        state = member.get("detail", member["state"])
        table.add_row(member["name"], member["pod"], state, version, busy.get(member["name"], "-"))
    return table


def device_table(status: dict[str, Any]) -> Table | None:
    """Return which processes hold the devices that actors and rollouts share; None where none are shared or the run has ended."""
    devices = status.get("devices")
    if not devices or status.get("phase") in FINAL:
        return None
    table = Table("DEVICES FOR", "HELD BY", "SINCE", "EXPIRES IN", "TOKEN", **NARROW)
    holders = devices["holders"]
    expiry = min((float(holder["expiresIn"]) for holder in holders), default=None)
    table.add_row(
        devices["use"] or "a hand-over",
        ", ".join(holder["name"] for holder in holders) or "nobody",
        f"{_number(devices['seconds'], 1)} s",
        f"{_number(expiry, 1)} s",
        str(devices["token"]),
    )
    return table


def group_table(status: dict[str, Any]) -> Table | None:
    """Return a table of the prompt groups that each member holds, with the age of the oldest; None if no group is held."""
    groups_by_holder: dict[str, list[dict[str, Any]]] = {}
    for group in status.get("ledger", {}).get("groups", []):
        groups_by_holder.setdefault(group["owner"] or group["state"], []).append(group)
    if not groups_by_holder or status.get("phase") in FINAL:
        return None
    table = Table("HOLDER", "GROUPS", "OLDEST", "FOR", "ATTEMPT", **NARROW)
    for holder, groups in groups_by_holder.items():
        oldest = max(groups, key=lambda group: float(group["seconds"]))
        seconds = f"{_number(oldest['seconds'], 1)} s"
        table.add_row(holder, str(len(groups)), oldest["id"], seconds, str(oldest["attempt"]))
    return table


def wait_table(status: dict[str, Any]) -> Table | None:
    """Return a table of the waits between processes, with the stall if there is one; None without waits and after the end of the run."""
    if status.get("phase") in FINAL or not (status.get("waits") or status.get("stall")):
        return None
    stall = status.get("stall")
    table = Table(
        "WHO", "WAITS FOR", "WHAT", "SECONDS", title=f"stall: {stall['message']}" if stall else None, **NARROW
    )
    for wait in status.get("waits", []):
        table.add_row(wait["who"], wait["on"], wait["what"], _number(wait["seconds"], 1))
    return table


def show_logs(folder: Path, *, role: str | None, index: int | None, follow: bool) -> int:
    """Print matching log files, each line with its file's name; return 0. Raises ConfigError when none match."""
    pattern = f"{role or '*'}-{'*' if index is None else index}.log"
    files = sorted((folder / "logs").glob(pattern))
    if not files:
        raise ConfigError(
            f"no log matches {folder}/logs/{pattern}; known: {', '.join(p.name for p in sorted((folder / 'logs').glob('*')))}"
        )
    try:
        for line in _lines(files, follow=follow):
            sys.stdout.write(line)
    except KeyboardInterrupt:
        return 0
    return 0


def _lines(files: list[Path], *, follow: bool) -> Iterator[str]:
    opened = [(path.stem, path.open(encoding="utf-8", errors="replace")) for path in files]
    while True:
        quiet = True
        for name, file in opened:
            for line in file:
                quiet = False
                yield f"{name}: {line if line.endswith(chr(10)) else line + chr(10)}"
        if not follow:
            return
        if quiet:
            sys.stdout.flush()
            time.sleep(0.3)
