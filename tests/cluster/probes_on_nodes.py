"""Pods as the operator makes them, with a probe in place of each worker: for tests of what a pod is given and held to."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_core.api.job import RLJob
from rl_core.plan.launch import ContainerPlan, LaunchPlan
from rljob_operator.model import OperatorConfig
from tests.cluster.testcluster.access import Access
from tests.unit.operator.manifest_samples import make_job

ROOT = Path(__file__).parents[2]
ROLES = ("actor", "rollout", "env")


def one_image(nodes: Access, **settings: Any) -> OperatorConfig:
    """Return the settings of an operator whose roles all run the env image, the smallest with the supervisor in it."""
    command = [sys.executable, "-m", "worker_images.build", "--push", nodes.cluster.state.addresses.registry, "env"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return OperatorConfig(images=dict.fromkeys(ROLES, json.loads(done.stdout)["env"]), **settings)


def create_job(nodes: Access, namespace: str, spec: dict[str, Any]) -> RLJob:
    """Create the RLJob that owns everything; another controller's, so that an operator in this cluster leaves it alone."""
    spec = {**spec, "managedBy": "example.com/probes"}
    written = make_job(namespace=namespace, **spec).model_dump(mode="json", by_alias=True, exclude_unset=True)
    made = nodes.custom.create_namespaced_custom_object("rljob.dev", "v1alpha1", namespace, "rljobs", written)
    return make_job(namespace=namespace, uid=made["metadata"]["uid"], **spec)


def probing(plan: LaunchPlan, code: str) -> LaunchPlan:
    """Return `plan` with the Python program `code` as each worker, and without runner and channel server."""

    def probe(container: ContainerPlan) -> ContainerPlan:
        workers = (process for process in container.processes if process.group not in ("runner", "channel"))
        return replace(container, processes=tuple(replace(p, command=("python", "-c", code)) for p in workers))

    return replace(plan, pods=tuple(replace(pod, containers=tuple(map(probe, pod.containers))) for pod in plan.pods))
