"""Who may do what: certificates, static tokens, and kubeconfigs that carry them."""

import base64
import csv
import json
import secrets
from pathlib import Path

from tests.cluster.testcluster.certificates import Authority
from tests.cluster.testcluster.state import State

ADMIN = "admin"
CONTROLLER_MANAGER = "system:kube-controller-manager"
SCHEDULER = "system:kube-scheduler"
PROXY = "system:kube-proxy"
DNS = "coredns"
DRA_DRIVER = "fake-dra-driver"
VOLUME_KEEPER = "volume-keeper"
POLICY_AGENT = "policy-agent"
KWOK = "kwok"
_GROUPS = {
    ADMIN: "system:masters",
    CONTROLLER_MANAGER: "",
    SCHEDULER: "",
    PROXY: "",
    DNS: "",
    DRA_DRIVER: "",
    VOLUME_KEEPER: "system:masters",
    POLICY_AGENT: "",
    KWOK: "system:masters",
}


def node_user(node: str) -> str:
    """The user a node's kubelet is."""
    return f"system:node:{node}"


class Identities:
    """The keys of one cluster, all made when it is made: the API server reads its token file once."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._tokens = state.pki / "tokens.csv"

    def create(self) -> None:
        """Make the authorities, the control plane's certificates and everyone's token."""
        pki, addresses = self._state.pki, self._state.addresses
        authority, front = Authority.create(pki, "ca"), Authority.create(pki, "front-ca")
        service = ["kubernetes", "default", "svc", "cluster", "local"]
        authority.issue(
            "apiserver",
            common_name="kube-apiserver",
            dns=["localhost", *(".".join(service[:length]) for length in (1, 2, 3, 5))],
            ips=["127.0.0.1", addresses.host, addresses.api_service],
        )
        authority.issue("kubelet-client", common_name="kube-apiserver-kubelet-client", organization="system:masters")
        front.issue("front-client", common_name="front-proxy")
        for node in self._state.settings.nodes:
            authority.issue(
                node,
                common_name=node_user(node),
                organization="system:nodes",
                dns=[node],
                ips=[addresses.node(node)],
            )
        authority.issue_key_pair("service-accounts")
        self._write_tokens({**_GROUPS, **{node_user(node): "system:nodes" for node in self._state.settings.nodes}})

    def token(self, user: str) -> str:
        """The static token of a user."""
        with self._tokens.open(newline="") as file:
            return next(token for token, name, *_ in csv.reader(file) if name == user)

    def kubeconfig(self, user: str, path: Path | None = None, *, token: str | None = None) -> Path:
        """Write a kubeconfig for a user (JSON, which is YAML), with another token if one is given."""
        path = path or self._state.folder / "kubeconfigs" / f"{user.replace(':', '_')}.conf"
        path.parent.mkdir(exist_ok=True)
        authority = base64.b64encode((self._state.pki / "ca.crt").read_bytes()).decode()
        cluster = {"server": self._state.settings.server, "certificate-authority-data": authority}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": token or self.token(user)}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user, "namespace": "default"}}],
        }
        path.write_text(json.dumps(config, indent=1))
        path.chmod(0o600)
        return path

    def _write_tokens(self, groups: dict[str, str]) -> None:
        with self._tokens.open("w", newline="") as file:
            csv.writer(file).writerows([secrets.token_hex(16), user, user, group] for user, group in groups.items())
