"""Changes the number of pods of an elastic group in a local run: sends it to the runner and stores it for restarts of the actors.

`rljob scale` calls it, and the launcher does for `rollout.autoscale`.
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
from rl_core.plan.groups import ROLLOUT, elastic_block
from rl_core.runner.history import write_json

logger = logging.getLogger(__name__)


class Control(Protocol):
    """Sends a changed spec to the runner; implemented by `control.ControlClient`."""

    def change(self, generation: int, spec: Mapping[str, Any]) -> bool:
        """Send a changed spec; return False when the runner does not answer. Raises ConfigError with its message when it refuses."""
        ...


def set_replicas(control: Control, config: Path, counts: Mapping[str, int], *, applied: int) -> bool:
    """Set the replicas of groups by name; return False when the runner does not answer.

    Raises ConfigError when it refuses, and for a group that the job does not have or that is not elastic.

    `config` is the file with the resolved job of the run, `applied` the generation of the spec that its runner uses.
    """
    job = json.loads(config.read_text())
    for group, count in counts.items():
        elastic_block(job["spec"], group)["replicas"] = count
    if not control.change(applied + 1, job["spec"]):
        return False
    write_json(config, job)
    return True


def follow_workload(control: Control, config: Path, status: Mapping[str, Any]) -> str:
    """Set the number of rollouts that `rollout.autoscale` asks for; return the reason, empty when the number stays.

    The rule starts from the number that was set last, by whomever. Nothing is decided until the runner has applied that number.
    """
    shares = autoscale.read(status.get("workload"))
    if shares is None:
        return ""
    spec = json.loads(config.read_text())["spec"]
    if spec[ROLLOUT].get("autoscale") is None:  # the usual case; validating the spec each second costs time
        return ""
    job = RLJobSpec.model_validate(spec)
    rollout = job.rollout
    verdict = autoscale.decide(rollout, shares, on_policy=not job.algorithm.max_staleness)
    if verdict is None or rollouts_wanted(status) != rollout.replicas * rollout.engines:
        return ""
    try:
        applied = int(status.get("appliedGeneration", 0))
        accepted = set_replicas(control, config, {ROLLOUT: verdict.replicas}, applied=applied)
    except ConfigError as error:
        logger.warning("rollout.autoscale: %s; the runner refused: %s", verdict.reason, error)
        return ""
    return verdict.reason if accepted else ""
