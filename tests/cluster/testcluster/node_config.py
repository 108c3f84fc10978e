"""The files that a node's programs read: containerd, CNI, kubelet, kube-proxy."""

import json
from pathlib import Path

from tests.cluster.testcluster.addresses import REGISTRY
from tests.cluster.testcluster.identities import DRA_DRIVER, POLICY_AGENT, PROXY, VOLUME_KEEPER, Identities, node_user
from tests.cluster.testcluster.state import State

PAUSE_IMAGE = "localhost/pause:1"

_CONTAINERD = """\
version = 3
[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'
  # A pulled layer is kept unpacked only: a node holds an image of gigabytes once, not twice.
  discard_unpacked_layers = true
  [plugins.'io.containerd.cri.v1.images'.registry]
    config_path = '{folder}/registries'
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = '{pause}'
[plugins.'io.containerd.cri.v1.runtime']
  # Without CAP_SYS_RESOURCE nobody may lower an OOM score.
  restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ['/usr/lib/cni', '/opt/cni/bin']
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = 'io.containerd.runc.v2'
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
    SystemdCgroup = false
[plugins.'io.containerd.nri.v1.nri']
  # Its socket is the host's: of two nodes that start in one moment, one containerd would end.
  disable = true
"""


def write(state: State, identities: Identities, node: str) -> None:
    """Write all files of a node below its folder."""
    folder = state.node(node)
    cni = folder / "etc_cni" / "net.d"  # node_init mounts it at /etc/cni
    registry = folder / "registries" / REGISTRY
    for each in (cni, registry):
        each.mkdir(parents=True, exist_ok=True)
    identities.kubeconfig(node_user(node), folder / "kubelet.conf")
    identities.kubeconfig(PROXY, folder / "kube-proxy.conf")
    identities.kubeconfig(DRA_DRIVER, folder / "fake-dra-driver.conf")
    identities.kubeconfig(POLICY_AGENT, folder / "policy-agent.conf")
    identities.kubeconfig(VOLUME_KEEPER, folder / "volume-keeper.conf")
    (folder / "resolv.conf").write_text("")
    (folder / "containerd.toml").write_text(_CONTAINERD.format(folder=folder, pause=PAUSE_IMAGE))
    (registry / "hosts.toml").write_text(f"[host.'http://{state.addresses.registry}']\n")
    _write(cni / "10-test.conflist", _network(state, node))
    _write(folder / "kubelet.json", _kubelet(state, node))
    _write(folder / "kube-proxy.json", _proxy(state, node))


def _write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1))


def _network(state: State, node: str) -> dict:
    # A cable per pod and no bridge: all traffic is forwarded by the node, where policies are enforced.
    cables = {
        "type": "ptp",
        "ipMasq": False,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": state.addresses.node_pods(node)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": "/run/containerd/ipam",  # forgotten when the power is cut
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "test", "plugins": [cables, ports]}


def _kubelet(state: State, node: str) -> dict:
    addresses = state.addresses
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": addresses.node(node),
        "healthzPort": 0,
        "failCgroupV1": False,
        "failSwapOn": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{addresses.bridge}/{node}",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "tlsCertFile": f"{state.pki}/{node}.crt",
        "tlsPrivateKeyFile": f"{state.pki}/{node}.key",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{state.pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "clusterDNS": [addresses.dns],
        "clusterDomain": "cluster.local",
        "resolvConf": f"{state.node(node)}/resolv.conf",
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "maxPods": 200,
        "serializeImagePulls": False,
        # The control plane gives a node up 20 s after its last sign of life.
        "nodeStatusUpdateFrequency": "5s",
        "nodeLeaseDurationSeconds": 8,
        "syncFrequency": "10s",
        "crashLoopBackOff": {"maxContainerRestartPeriod": "10s"},
        "featureGates": {"KubeletCrashLoopBackOffMax": True},
    }


def _proxy(state: State, node: str) -> dict:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": f"{state.node(node)}/kube-proxy.conf"},
        "clusterCIDR": state.addresses.pods,
        "hostnameOverride": node,
        "bindAddress": state.addresses.node(node),
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "conntrack": {"maxPerCore": 0, "min": 0},  # nf_conntrack_max cannot be set in a network namespace
    }
