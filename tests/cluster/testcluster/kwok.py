"""Nodes that only exist in the API, by kwok: pods on them are said to run at once. For tests of scale."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests.cluster.testcluster.control_plane import ControlPlane, free_port
from tests.cluster.testcluster.identities import KWOK
from tests.cluster.testcluster.processes import Program
from tests.cluster.testcluster.state import State

ANNOTATION = "kwok.x-k8s.io/node"  # kwok looks after nodes that have it with the value "fake"
TAINT = {"key": ANNOTATION, "value": "fake", "effect": "NoSchedule"}
TOLERATION = {"key": ANNOTATION, "operator": "Exists"}
CAPACITY = {"cpu": "64", "memory": "512Gi", "pods": "250", "nvidia.com/gpu": "8", "ephemeral-storage": "1Ti"}


class Kwok:
    """The kwok program of a cluster, and the nodes it pretends to be."""

    def __init__(self, state: State, control_plane: ControlPlane) -> None:
        self._state = state
        self._control_plane = control_plane
        self.program = Program(state, "kwok")

    def start(self, *, pods: str = "10.0.0.0/24") -> None:
        """Start kwok, which takes its pods' addresses from the network `pods`; does nothing when it runs."""
        if self.program.running:
            return
        self.program.launch(
            [
                f"{self._state.settings.programs}/testcluster",
                "kwok",
                f"--kubeconfig={self._control_plane.identities.kubeconfig(KWOK)}",
                f"--config={self._stages()}",
                f"--cidr={pods}",
                "--manage-all-nodes=false",
                f"--manage-nodes-with-annotation-selector={ANNOTATION}=fake",
                # Renewed every fourth of it; the controllers give a node up after 10 s.
                "--node-lease-duration-seconds=16",
                f"--server-address=127.0.0.1:{free_port()}",
            ]
        )

    def add_nodes(
        self, count: int, *, tainted: bool = False, capacity: Mapping[str, str] = MappingProxyType({})
    ) -> list[str]:
        """Add nodes `fake-0`, `fake-1` ... and wait until they are ready; return their names.

        With `tainted` only pods that tolerate it (TOLERATION) go there, so that real nodes can stand beside them. `capacity`
        goes over CAPACITY.
        """
        self.start()
        names = [f"fake-{index}" for index in range(count)]
        for index, name in enumerate(names):
            self._control_plane.api.create(
                "/api/v1/nodes",
                _node(name, zone=f"zone-{index % 4}", tainted=tainted, capacity={**CAPACITY, **capacity}),
            )
        self.program.wait(f"{count} ready nodes", lambda: self._num_ready() >= count)
        return names

    def _num_ready(self) -> int:
        nodes = self._control_plane.api.get("/api/v1/nodes?labelSelector=type%3Dkwok")["items"]
        return sum(
            any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", []))
            for node in nodes
        )

    def _stages(self) -> Path:
        """kwok has no rules of its own; those of its module make nodes and pods ready at once."""
        command = [f"{self._state.settings.programs}/testcluster", "kwok-stages"]
        path = self._state.folder / "kwok-stages.yaml"
        path.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
        return path


def _node(name: str, *, zone: str, tainted: bool, capacity: Mapping[str, str]) -> dict:
    labels = {"type": "kwok", "kubernetes.io/hostname": name, "topology.kubernetes.io/zone": zone}
    return {
        "metadata": {"name": name, "labels": labels, "annotations": {ANNOTATION: "fake"}},
        "spec": {"taints": [TAINT] if tainted else []},
        "status": {"capacity": capacity, "allocatable": capacity},
    }
