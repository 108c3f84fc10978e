"""Process 1 of a node: mounts what must not be the host's, starts the node's programs, reaps orphans.

Every program uses its default paths, as the kubelet's folder of device plug-ins is a constant in its code; so each node
has private folders bound over them. `python -m tests.cluster.testcluster.node_init STATE NODE`, in new namespaces.
"""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.cluster.testcluster.commands import run, succeeds
from tests.cluster.testcluster.state import State

# True: in memory, so that the node forgets it when its power is cut.
FOLDERS = {
    "/var/lib/kubelet": False,
    "/var/lib/containerd": False,
    "/var/lib/cni": False,
    "/etc/cni": False,
    "/etc/cdi": False,
    "/var/log/pods": False,
    "/var/log/containers": False,
    "/run/containerd": True,
    "/run/netns": True,
    "/run/cdi": True,
}
# What the kubelet would set for the whole machine; it finds files with these values in the settings' place.
SYSCTLS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}
POLL_S = 0.02


class Init:
    """The start of one node."""

    def __init__(self, state: State, node: str) -> None:
        self._state = state
        self._node = node
        self._folder = state.node(node)
        self._settings = state.settings

    def run(self) -> None:
        """Start the node; never returns."""
        self._mount()
        self._join_network()
        os.environ["PATH"] = f"{self._settings.programs}:{os.environ['PATH']}:/usr/sbin:/sbin"  # containerd's shim
        self._start_containerd()
        self._start("kubelet", "--config", self._folder / "kubelet.json", "--kubeconfig", self._folder / "kubelet.conf",
                    "--hostname-override", self._node, "--node-ip", self._state.addresses.node(self._node))  # fmt: skip
        self._start("kube-proxy", "--config", self._folder / "kube-proxy.json")
        self._start("policy-agent", "--kubeconfig", self._folder / "policy-agent.conf", "--node-name", self._node,
                    "--dns-address", self._state.addresses.host)  # fmt: skip
        self._start_volumes()
        _wait_for("/var/lib/kubelet/plugins_registry")
        self._start_fake_gpus()
        while True:
            with suppress(ChildProcessError):
                os.wait()

    def _mount(self) -> None:
        for path, in_memory in FOLDERS.items():
            if in_memory:
                run("mount", "-t", "tmpfs", "tmpfs", path)
            else:
                source = self._folder / path.strip("/").replace("/", "_")
                source.mkdir(parents=True, exist_ok=True)
                run("mount", "--bind", source, path)
        for key, value in SYSCTLS.items():
            source = self._folder / key.replace("/", "_")
            source.write_text(f"{value}\n")
            if Path("/proc/sys", key).exists():
                run("mount", "--bind", source, f"/proc/sys/{key}")

    def _join_network(self) -> None:
        socket.sethostname(self._node)
        while not succeeds("ip", "link", "show", "eth0"):  # the host lays the cable
            time.sleep(POLL_S)
        addresses = self._state.addresses
        run("ip", "link", "set", "lo", "up")
        run("ip", "addr", "add", f"{addresses.node(self._node)}/24", "dev", "eth0")
        run("ip", "link", "set", "eth0", "up")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        for other in self._settings.nodes:
            if other != self._node:
                run("ip", "route", "add", addresses.node_pods(other), "via", addresses.node(other))

    def _start_containerd(self) -> None:
        containerd = self._start("containerd", "--config", self._folder / "containerd.toml")
        program = f"{self._settings.programs}/testcluster"
        archive = self._state.folder / "pause.tar"
        while not succeeds(program, "ctr", "-n", "k8s.io", "images", "import", "--local", archive):
            if containerd.poll() is not None:
                sys.exit(f"containerd ended; its last words:\n{_last_words(self._log('containerd'))}")
            time.sleep(POLL_S)  # it does not serve yet

    def _start_volumes(self) -> None:
        self._start("volume-keeper", "--kubeconfig", self._folder / "volume-keeper.conf", "--node-name", self._node,
                    "--folder", self._folder / "volumes", "--count", self._settings.volumes)  # fmt: skip

    def _start_fake_gpus(self) -> None:
        if self._settings.fake_gpus:
            self._start("fake-gpu-plugin", "--node-name", self._node, "--count", self._settings.fake_gpus,
                        "--unhealthy-file", self._folder / "unhealthy-gpus")  # fmt: skip
        if self._settings.fake_dra_gpus:
            self._start("fake-dra-driver", "--node-name", self._node, "--count", self._settings.fake_dra_gpus,
                        "--kubeconfig", self._folder / "fake-dra-driver.conf")  # fmt: skip

    def _start(self, program: str, *arguments: object) -> subprocess.Popen:
        with self._log(program).open("ab") as log:
            command = [f"{self._settings.programs}/testcluster", program, *map(str, arguments)]
            return subprocess.Popen(command, stdout=log, stderr=log)

    def _log(self, program: str) -> Path:
        return self._state.logs / f"{self._node}-{program}.log"


def _last_words(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-3:])


def _wait_for(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(POLL_S)


if __name__ == "__main__":
    Init(State(sys.argv[1]), sys.argv[2]).run()
