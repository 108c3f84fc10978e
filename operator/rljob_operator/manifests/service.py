"""The headless Service that gives each pod of a job a name."""

from __future__ import annotations

from typing import Any

from rl_core.api.job import RLJob
from rl_core.plan.launch import Ports
from rljob_operator import naming
from rljob_operator.manifests import meta
from rljob_operator.model import OperatorConfig


def build(job: RLJob, *, config: OperatorConfig) -> dict[str, Any]:
    """Return the Service. Names resolve before pods are ready: a pod becomes ready by reaching actor-0."""
    name, _, uid = meta.identity(job)
    ports = Ports()
    numbers = {"hub": ports.hub, "channel": ports.channel, "control": ports.control, "metrics": ports.health}
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": naming.job_labels(name, uid),
        "ports": [{"name": key, "port": port, "targetPort": port, "protocol": "TCP"} for key, port in numbers.items()],
    }
    return meta.support(
        job, "Service", naming.service(name), {"spec": spec}, api_version="v1", component="network", config=config
    )
