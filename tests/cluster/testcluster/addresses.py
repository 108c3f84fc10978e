"""Names and addresses of cluster number N (0 to 99), so that several clusters can run side by side.

Bridge `tcN` on the host has 10.201.N.1; nodes have 10.201.N.11, .12, ...; pods of node I have 10.(128+N).I.0/24;
services have 10.202.N.0/24. Nothing is routed off the machine.
"""

from dataclasses import dataclass

MAX_INDEX = 99
REGISTRY = "registry.test"  # how pods name the cluster's own image registry


@dataclass(frozen=True)
class Addresses:
    """Every address of one cluster follows from its index."""

    index: int

    @property
    def bridge(self) -> str:
        """The host's network link; also the name of the cluster's control group."""
        return f"tc{self.index}"

    @property
    def host(self) -> str:
        """The host on the bridge: API server, DNS and registry listen there."""
        return f"10.201.{self.index}.1"

    @property
    def registry(self) -> str:
        """Where the host pushes images (no TLS); pods name them `registry.test/NAME`."""
        return f"{self.host}:5000"

    @property
    def pods(self) -> str:
        """The network of all pods."""
        return f"10.{128 + self.index}.0.0/16"

    @property
    def services(self) -> str:
        """The network of all cluster IPs."""
        return f"10.202.{self.index}.0/24"

    @property
    def api_service(self) -> str:
        """The cluster IP of `kubernetes.default`."""
        return f"10.202.{self.index}.1"

    @property
    def dns(self) -> str:
        """The cluster IP of the DNS."""
        return f"10.202.{self.index}.10"

    def node(self, name: str) -> str:
        """The address of node `node-I`."""
        return f"10.201.{self.index}.{10 + number(name)}"

    def node_pods(self, name: str) -> str:
        """The network of the pods on node `node-I`."""
        return f"10.{128 + self.index}.{number(name)}.0/24"

    def port(self, name: str) -> str:
        """The host's end of the cable to a node."""
        return f"{self.bridge}-{number(name)}"


def number(node: str) -> int:
    """1 for `node-1`."""
    return int(node.removeprefix("node-"))
