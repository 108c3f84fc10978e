"""The cluster's bridge on the host and the cables to its nodes. No packet can leave the machine."""

from collections.abc import Iterable

from tests.cluster.testcluster.addresses import MAX_INDEX, Addresses
from tests.cluster.testcluster.commands import run, succeeds
from tests.cluster.testcluster.errors import ClusterError


def claim(index: int | None) -> Addresses:
    """Make the bridge of a cluster; with None the first index whose bridge nobody has made yet.

    Raises ClusterError when the one asked for, or every one, is taken.
    """
    for candidate in range(MAX_INDEX + 1) if index is None else [index]:
        addresses = Addresses(candidate)
        # Adding a link fails when it exists, so two clusters never get one index.
        if succeeds("ip", "link", "add", addresses.bridge, "type", "bridge"):
            run("ip", "addr", "add", f"{addresses.host}/24", "dev", addresses.bridge)
            run("ip", "link", "set", addresses.bridge, "up")
            return addresses
    if index is None:
        raise ClusterError(f"no bridge could be made: all indices to {MAX_INDEX} are taken, or this is not root")
    raise ClusterError(f"index {index} is taken: link {Addresses(index).bridge} exists; take another index, or none")


def release(addresses: Addresses, nodes: Iterable[str]) -> None:
    """Remove the bridge, with its routes, and the cables: a dead node's goes by itself, but not at once."""
    for link in (*map(addresses.port, nodes), addresses.bridge):
        succeeds("ip", "link", "del", link)
        if succeeds("ip", "link", "show", link):
            raise ClusterError(f"network link {link} could not be removed; as root: ip link del {link}")


def connect(addresses: Addresses, node: str, *, init: int, services: bool) -> None:
    """Lay the cable to a node, whose namespaces process `init` holds, and the host's route to its pods.

    With `services` the host reaches cluster IPs through this node's kube-proxy, so that the API server can call a
    webhook and a test can open a Service.
    """
    port = addresses.port(node)
    run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", init)
    run("ip", "link", "set", port, "master", addresses.bridge, "up")
    run("ip", "route", "replace", addresses.node_pods(node), "via", addresses.node(node))
    if services:
        run("ip", "route", "replace", addresses.services, "via", addresses.node(node))
