"""`rljob scale` of a local run: changes the running job over the runner's control port, as the operator does on a cluster."""

import sys
from collections.abc import Mapping
from pathlib import Path

from rl_core.api.errors import ConfigError
from rl_core.cli.local_view import FINAL, read_status
from rl_core.cli.targets import counts_text
from rl_core.launch.control import ControlClient
from rl_core.launch.local_plan import control_port
from rl_core.launch.replicas import set_replicas
from rl_core.launch.workspace import PRIVATE
from rl_core.plan.groups import CONTROL_GROUP
from rl_core.plan.keys import TOKEN_FILE
from rl_core.plan.launch import LaunchPlan, PodPlan


def scale(folder: Path, counts: Mapping[str, int]) -> int:
    """Set the pods of elastic groups of the run in `folder`, by name; return 0. Raises ConfigError when it has ended or refuses."""
    status = read_status(folder)
    if status.get("phase") in FINAL:
        raise ConfigError(f"{folder} must hold a run that has not ended, got one that has ({status['phase']})")
    applied = int(status.get("appliedGeneration", 0))
    if not set_replicas(connect(folder), folder / PRIVATE / "job.json", counts, applied=applied):
        raise ConfigError(f"the run in {folder} must answer at its control port, got nothing; is it running?")
    sys.stdout.write(f"{folder}: {counts_text(counts)} from the next step on\n")
    return 0


def connect(folder: Path) -> ControlClient:
    """Return the client of the run's control port. Raises ConfigError for a folder without a run."""
    try:
        pod = PodPlan.from_json(_runner_plan(folder).read_text())
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder} must be the output folder of a run, got: {error}") from error
    port = control_port(LaunchPlan(job="", namespace="", uid="", epoch=0, pods=(pod,)))
    if port is None:
        raise ConfigError(f"{folder} must hold the plan of a runner, got none in {_runner_plan(folder)}")
    env = pod.containers[0].processes[0].env
    epoch = int(env["RLJOB_EPOCH"])
    return ControlClient(port, folder / PRIVATE / "keys" / TOKEN_FILE, uid=env["RLJOB_UID"], epoch=lambda: epoch)


def _runner_plan(folder: Path) -> Path:
    """Return the file with the plan of the runner's pod."""
    return folder / PRIVATE / f"{CONTROL_GROUP}-0.json"
