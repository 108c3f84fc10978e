"""Another number of rollouts or envs for a local run: told to the runner, and kept for a restart of the actors.

`rljob scale` asks for it, and the launcher itself for `rollout.autoscale`.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec
from rl_core.launch.scaling import rollouts_wanted
from rl_core.plan import autoscale
from rl_core.runner.history import write_json

logger = logging.getLogger(__name__)


class Control(Protocol):
    """Takes a changed spec; implemented by `control.ControlClient`."""

    def change(self, generation: int, spec: Mapping[str, Any]) -> bool:
        """Send a changed spec; False when nobody heard it. Raises ConfigError with the runner's words when it is refused."""
        ...


def set_replicas(control: Control, config: Path, counts: Mapping[str, int], *, applied: int) -> bool:
    """Set the replicas of roles by name; False when the runner does not hear. Raises ConfigError with its words when it refuses.

    `config` is the resolved job of the run, `applied` the generation that its runner follows.
    """
    job = json.loads(config.read_text())
    for role, count in counts.items():
        job["spec"][role]["replicas"] = count
    if not control.change(applied + 1, job["spec"]):
        return False
    write_json(config, job)
    return True


def follow_workload(control: Control, config: Path, status: Mapping[str, Any]) -> str:
    """Set the number of rollouts that `rollout.autoscale` asks for; return why, empty when it stays as it is.

    The number that a person set last is where the rule goes on from; while that is on its way to the runner nothing is decided.
    """
    shares = autoscale.read(status.get("workload"))
    if shares is None:
        return ""
    spec = json.loads(config.read_text())["spec"]
    if spec["rollout"].get("autoscale") is None:  # most runs: spare them the validation each second
        return ""
    rollout = RLJobSpec.model_validate(spec).rollout
    verdict = autoscale.decide(rollout, shares)
    if verdict is None or rollouts_wanted(status) != rollout.replicas:
        return ""
    try:
        applied = int(status.get("appliedGeneration", 0))
        taken = set_replicas(control, config, {"rollout": verdict.replicas}, applied=applied)
    except ConfigError as error:
        logger.warning("rollout.autoscale: %s; the runner refused: %s", verdict.reason, error)
        return ""
    return verdict.reason if taken else ""
