"""What runs on the host for the nodes: DNS and the image registry. No image is needed for them."""

from tests.cluster.testcluster.control_plane import ControlPlane
from tests.cluster.testcluster.identities import DNS, DRA_DRIVER, POLICY_AGENT
from tests.cluster.testcluster.processes import Program
from tests.cluster.testcluster.state import State

_COREFILE = """\
.:53 {{
    bind {host}
    errors
    cache 5 {{
        disable denial
    }}
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig}
        pods verified
        ttl 5
    }}
}}
"""


def start_dns(state: State, control_plane: ControlPlane) -> None:
    """Start CoreDNS on the bridge; the Service kube-system/kube-dns leads to it by an EndpointSlice of our own."""
    api, addresses = control_plane.api, state.addresses
    api.grant(
        DNS,
        ("", "services pods namespaces endpoints", "list watch"),
        ("discovery.k8s.io", "endpointslices", "list watch"),
    )
    ports = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]
    service = {"metadata": {"name": "kube-dns"}, "spec": {"clusterIP": addresses.dns, "ports": ports}}
    api.create("/api/v1/namespaces/kube-system/services", service)
    endpoints = {
        "metadata": {"name": "kube-dns", "labels": {"kubernetes.io/service-name": "kube-dns"}},
        "addressType": "IPv4",
        "ports": ports,
        "endpoints": [{"addresses": [addresses.host]}],
    }
    api.create("/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices", endpoints)
    corefile = state.folder / "Corefile"
    corefile.write_text(_COREFILE.format(host=addresses.host, kubeconfig=control_plane.identities.kubeconfig(DNS)))
    Program(state, "coredns").launch([f"{state.settings.programs}/testcluster", "coredns", "-conf", corefile])


def start_registry(state: State) -> None:
    """Start the image registry; its layers are below the state."""
    program, folder = f"{state.settings.programs}/testcluster", state.folder / "registry"
    address = state.addresses.registry
    Program(state, "registry").launch([program, "registry", f"--address={address}", f"--folder={folder}"])


def offer_volumes(control_plane: ControlPlane) -> None:
    """Make `local` the default StorageClass; each node's volume-keeper makes the volumes."""
    storage_class = {
        "metadata": {"name": "local", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
        "reclaimPolicy": "Retain",
    }
    control_plane.api.create("/apis/storage.k8s.io/v1/storageclasses", storage_class)


def allow_policy_agents(control_plane: ControlPlane) -> None:
    """Let the nodes' policy agents read what policies speak of."""
    control_plane.api.grant(
        POLICY_AGENT,
        ("", "pods namespaces", "list watch"),
        ("networking.k8s.io", "networkpolicies", "list watch"),
    )


def allow_dra_driver(control_plane: ControlPlane) -> None:
    """Let the fake DRA driver publish its devices and read claims."""
    group = "resource.k8s.io"
    control_plane.api.grant(
        DRA_DRIVER,
        ("", "nodes", "get"),
        (group, "resourceclaims", "get"),
        (group, "resourceslices", "get list watch create update patch delete"),
    )
