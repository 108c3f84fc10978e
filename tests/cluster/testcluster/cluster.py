"""One cluster from its start to its end: what the command line and the test fixtures use."""

import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.cluster.testcluster import build, cgroups, host_services, images, network, packages, procfs
from tests.cluster.testcluster.addresses import Addresses
from tests.cluster.testcluster.control_plane import ControlPlane, free_ports
from tests.cluster.testcluster.errors import ClusterError
from tests.cluster.testcluster.kwok import Kwok
from tests.cluster.testcluster.node import Node
from tests.cluster.testcluster.processes import programs
from tests.cluster.testcluster.state import Settings, State, remove_rests

API_PORT = 6443


class Cluster:
    """A cluster in a state folder. Make one with `create`, or open the folder of one that runs."""

    def __init__(self, state: Path | str) -> None:
        self.state = State(state)
        self.control_plane = ControlPlane(self.state)
        self.kwok = Kwok(self.state, self.control_plane)

    @classmethod
    def create(
        cls,
        state: Path | str,
        *,
        nodes: int = 0,
        index: int | None = None,
        fake_gpus: int = 0,
        fake_dra_gpus: int = 0,
        owner: int | None = None,
        api_server_args: Sequence[str] = (),
        controller_manager_args: Sequence[str] = (),
        scheduler_args: Sequence[str] = (),
    ) -> "Cluster":
        """Start a control plane that can have this many nodes (`start_nodes` starts them; that needs root).

        `index` is chosen when None. `owner` is a process the cluster must not outlive. The `*_args` go behind the flags a
        program gets anyway, as in `--feature-gates=GenericWorkload=true`. What was started is taken down again when it does
        not come up. Raises ClusterError, also when the folder holds a cluster.
        """
        cluster = cls(state)
        if cluster.state.exists:
            raise ClusterError(f"a cluster is here already; take it down first\n{cluster.status()}")
        packages.require({**packages.CONTROL_PLANE, **(packages.NODES if nodes else {})})
        folder = build.programs()
        addresses = network.claim(index) if nodes else Addresses(index or 0)
        etcd, api = free_ports(2)
        settings = Settings(
            programs=str(folder),
            index=addresses.index,
            nodes=tuple(f"node-{number + 1}" for number in range(nodes)),
            server=f"https://{addresses.host}:{API_PORT}" if nodes else f"https://127.0.0.1:{api}",
            etcd=f"http://127.0.0.1:{etcd}",
            fake_gpus=fake_gpus,
            fake_dra_gpus=fake_dra_gpus,
            owner=procfs.identify(owner) if owner else None,
        )
        cluster.state.create(settings)
        try:
            cluster.control_plane.start(
                api_server_args=tuple(api_server_args),
                controller_manager_args=tuple(controller_manager_args),
                scheduler_args=tuple(scheduler_args),
            )
        except BaseException:
            cluster.down()
            raise
        return cluster

    def node(self, name: str) -> Node:
        """A node by name. Raises ClusterError when the cluster has none of that name."""
        known = self.state.settings.nodes
        if name not in known:
            raise ClusterError(f"no node {name!r}; the nodes are: {', '.join(known) or 'none'}")
        return Node(self.state, self.control_plane, name)

    @property
    def nodes(self) -> list[Node]:
        """All nodes the cluster can have, running or not."""
        return [self.node(name) for name in self.state.settings.nodes]

    def start_nodes(self) -> None:
        """Start DNS, registry and all nodes; return when the nodes take pods.

        Raises ClusterError when one does not come up; all are stopped again then, and may be started again.
        """
        before = {program.name for program in programs(self.state) if program.running}
        try:
            self._start_nodes()
        except BaseException:
            for program in reversed(programs(self.state)):
                if program.name not in before:
                    program.stop(sig=signal.SIGKILL)
            raise

    def _start_nodes(self) -> None:
        host_services.start_dns(self.state, self.control_plane)
        host_services.start_registry(self.state)
        host_services.offer_volumes(self.control_plane)
        host_services.allow_policy_agents(self.control_plane)
        if self.state.settings.fake_dra_gpus:
            host_services.allow_dra_driver(self.control_plane)
        images.write_pause(self.state.folder / "pause.tar", programs=self.state.settings.programs)
        for node in self.nodes:
            node.start()
        for node in self.nodes:
            node.wait_ready()

    def load(self, archives: Sequence[Path], *, nodes: Sequence[str] = ()) -> None:
        """Import image archives into these nodes, by default all that run."""
        chosen = [self.node(name) for name in nodes] or [node for node in self.nodes if node.program.running]
        images.load(archives, chosen, programs=self.state.settings.programs)

    def down(self, *, wait: bool = True) -> None:
        """Stop everything and remove every trace; does nothing when no cluster is here.

        By force: the state goes with the programs, and nothing of them is elsewhere. Without `wait` files are removed in the background.
        """
        if not self.state.exists:
            return
        addresses = self.state.addresses
        for node in self.nodes:
            node.kill()
        for program in reversed(programs(self.state)):
            program.stop(sig=signal.SIGKILL)
        if self.state.settings.nodes:
            network.release(addresses, self.state.settings.nodes)
            cgroups.remove(addresses.bridge)
        self.state.remove(wait=wait)

    def status(self) -> str:
        """What runs, with the memory it takes, as lines for a person."""
        lines, total = [], 0
        for program in programs(self.state):
            alive = program.running
            total += (size := procfs.memory_kib(program.process.pid) if alive else 0)
            lines.append(f"{program.name:26}{'running' if alive else 'stopped':8}{size // 1024:6} MiB")
            with suppress(OSError):
                for pid, name in procfs.in_namespace_of(program.init.pid) if alive and program.init else ():
                    total += (size := procfs.memory_kib(pid))
                    lines.append(f"    {name[:22]:24}{pid:>6}{size // 1024:6} MiB")
        return "\n".join([*lines, f"total memory {total // 1024} MiB", f"export KUBECONFIG={self.state.kubeconfig}"])


def sweep(folder: Path) -> None:
    """Take down the clusters below a folder whose owner died before it could do so itself."""
    remove_rests(folder)
    for state in folder.glob("*/cluster.json"):
        cluster = Cluster(state.parent)
        with suppress(ClusterError, FileNotFoundError):  # its owner, or another session, has just taken it down
            owner = cluster.state.settings.owner
            if owner and not owner.alive:
                cluster.down(wait=False)
