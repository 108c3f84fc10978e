"""A node: namespaces of its own (network, mounts, processes, host name) with containerd, kubelet and kube-proxy.

Killing its process 1 kills all its processes at once, as a power cut does. Its disk, images included, is kept in the
state, so that it comes back with them.
"""

import os
import signal
import sys
from pathlib import Path

from tests import ROOT
from tests.cluster.testcluster import cgroups, network, node_config, node_init, procfs
from tests.cluster.testcluster.control_plane import ControlPlane
from tests.cluster.testcluster.errors import ClusterError
from tests.cluster.testcluster.processes import Program
from tests.cluster.testcluster.state import State

READY_TIMEOUT_S = 300


class Node:
    """One node of the cluster, by name."""

    def __init__(self, state: State, control_plane: ControlPlane, name: str) -> None:
        self.name = name
        self.program = Program(state, name)
        self._state = state
        self._control_plane = control_plane

    @property
    def address(self) -> str:
        """Its address on the bridge."""
        return self._state.addresses.node(self.name)

    def start(self) -> None:
        """Switch the node on; `wait_ready` waits until it takes pods."""
        addresses = self._state.addresses
        node_config.write(self._state, self._control_plane.identities, self.name)
        for path in node_init.FOLDERS:
            Path(path).mkdir(parents=True, exist_ok=True)  # what the node's own are mounted over
        # A machine has no control groups of earlier pods when it starts; the kubelet would stumble over them.
        cgroups.remove(f"{addresses.bridge}/{self.name}")
        cgroups.create(f"{addresses.bridge}/{self.name}")
        self.program.launch(
            [
                *("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"),
                *("--propagation=private", sys.executable, "-m", node_init.__name__, self._state.folder, self.name),
            ],
            env={"PYTHONPATH": str(ROOT)},
        )
        init = self._wait_init()
        network.connect(addresses, self.name, init=init.pid, services=self.name == self._state.settings.nodes[0])

    def wait_ready(self) -> None:
        """Wait until the API server has the node as Ready. Raises ClusterError after minutes."""
        self.program.wait("Ready condition", self.is_ready, timeout_s=READY_TIMEOUT_S)

    def is_ready(self) -> bool:
        """Whether the API server has the node as Ready; True for a while after a power cut."""
        conditions = self._control_plane.api.get(f"/api/v1/nodes/{self.name}")["status"].get("conditions", [])
        return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

    def kill(self) -> None:
        """Cut the node's power."""
        self.program.stop(sig=signal.SIGKILL)

    def command(self, *words: object) -> list[str]:
        """The command that runs `words` inside the node."""
        init = self.program.init
        if init is None or not init.alive:
            raise ClusterError(f"{self.name} does not run")
        return ["nsenter", "-t", str(init.pid), "-n", "-m", "-u", "-p", *(str(word) for word in words)]

    def exec(self, *words: object) -> None:
        """Become a command inside the node."""
        command = self.command(*words)
        os.execvp(command[0], command)

    def _wait_init(self) -> procfs.Identity:
        """Wait for the node's process 1; unshare forks when it has made the namespaces."""
        parent = self.program.process.pid
        self.program.wait("namespaces", lambda: procfs.child_of(parent) is not None)
        init = procfs.child_of(parent)
        if init is None:
            raise ClusterError(f"{self.name} ended as soon as it was started; see {self.program.log}")
        self.program.init = init
        return init
