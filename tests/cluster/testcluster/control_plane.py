"""etcd, API server, controller manager and scheduler: a cluster without nodes, which needs no root."""

import json
import random
import signal
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import Event, Thread

from tests.cluster.testcluster.api import Api
from tests.cluster.testcluster.errors import ClusterError
from tests.cluster.testcluster.identities import ADMIN, CONTROLLER_MANAGER, SCHEDULER, Identities
from tests.cluster.testcluster.processes import Program
from tests.cluster.testcluster.state import State

SERVER_PORTS = (10_000, 32_000)
KEEP_S = 0.5
# A dead node is noticed after 20 s instead of 50 s; its kubelet renews its lease every 2 s, on a busy machine up to 10 s late. Nodes that
# are pretended have the 50 s.
NODE_DEATH = ("--node-monitor-period=1s", "--node-monitor-grace-period=20s", "--node-eviction-rate=10")


class ControlPlane:
    """The four programs; each can be stopped, paused and started again on its own."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.api = Api(state)
        self.identities = Identities(state)
        self.etcd = Program(state, "etcd")
        self.api_server = ApiServer(state, self.api)
        self.controller_manager = Program(state, "kube-controller-manager")
        self.scheduler = Program(state, "kube-scheduler")

    def start(
        self,
        *,
        api_server_args: tuple[str, ...] = (),
        controller_manager_args: tuple[str, ...] = (),
        scheduler_args: tuple[str, ...] = (),
    ) -> None:
        """Start all four; return when pods can be made."""
        self.identities.create()
        self.identities.kubeconfig(ADMIN, self._state.kubeconfig)
        settings = self._state.settings
        program = f"{settings.programs}/testcluster"
        self.etcd.launch([program, "etcd", *self._etcd_flags()])
        self.api_server.launch([program, "kube-apiserver", *self._api_server_flags(), *api_server_args])
        self.api_server.wait_ready()
        self.controller_manager.launch(
            [program, "kube-controller-manager", *self._controller_manager_flags(), *controller_manager_args]
        )
        self.scheduler.launch(
            [program, "kube-scheduler", *self._client_flags(SCHEDULER, self.scheduler.name), *scheduler_args]
        )
        # A namespace takes pods once it has its service account.
        self.controller_manager.wait(
            "default service account", lambda: self.api.exists("/api/v1/namespaces/default/serviceaccounts/default")
        )

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Have the controllers started again whenever they end, as a kubelet does with static pods, until the block ends.

        The scheduler ends itself when its cache and the API server disagree, which a crash of the API server may lead to, and
        that may be found out a minute later. What the block's thread started ends with it where the cluster has an owner.
        """
        done = Event()

        def keep() -> None:
            while not done.wait(KEEP_S):
                for program in (self.controller_manager, self.scheduler):
                    if not program.running:
                        with suppress(ClusterError):  # it ended at once; its log says why
                            program.start()

        keeper = Thread(target=keep, name="controllers", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            done.set()
            keeper.join()

    def compact(self) -> int:
        """Make etcd forget all but the newest revision; return that revision.

        The API server still serves older watches from its own memory: restart it as well, and a watch that begins at an
        earlier resourceVersion is answered 410 Gone.
        """
        revision = int(self._etcd("kv/range", {"key": "AA=="})["header"]["revision"])
        self._etcd("kv/compaction", {"revision": str(revision), "physical": True})
        return revision

    def _etcd(self, call: str, body: dict) -> dict:
        url = f"{self._state.settings.etcd}/v3/{call}"
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=60) as response:
            return json.loads(response.read())

    def _etcd_flags(self) -> list[str]:
        client = self._state.settings.etcd
        peer = f"http://127.0.0.1:{free_port()}"
        return [
            "--name=test",
            f"--data-dir={self._state.folder}/etcd",
            "--unsafe-no-fsync",  # a test's data need not outlive the machine
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=test={peer}",
            "--log-level=warn",
        ]

    def _api_server_flags(self) -> list[str]:
        pki, settings = self._state.pki, self._state.settings
        address, port = settings.server.removeprefix("https://").split(":")
        return [
            f"--etcd-servers={settings.etcd}",
            f"--bind-address={address}",
            f"--advertise-address={address}",
            f"--secure-port={port}",
            # A loopback address cannot be an endpoint of the "kubernetes" service.
            f"--endpoint-reconciler-type={'none' if address.startswith('127.') else 'lease'}",
            f"--service-cluster-ip-range={self._state.addresses.services}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            "--profiling=false",
            f"--token-auth-file={pki}/tokens.csv",
            f"--client-ca-file={pki}/ca.crt",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={pki}/service-accounts.pub",  # it takes no private key of this form
            f"--service-account-signing-key-file={pki}/service-accounts.key",
            f"--kubelet-certificate-authority={pki}/ca.crt",
            f"--kubelet-client-certificate={pki}/kubelet-client.crt",
            f"--kubelet-client-key={pki}/kubelet-client.key",
            "--kubelet-preferred-address-types=InternalIP",
            f"--requestheader-client-ca-file={pki}/front-ca.crt",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={pki}/front-client.crt",
            f"--proxy-client-key-file={pki}/front-client.key",
        ]

    def _controller_manager_flags(self) -> list[str]:
        pki = self._state.pki
        return [
            *self._client_flags(CONTROLLER_MANAGER, self.controller_manager.name),
            "--use-service-account-credentials",
            "--controllers=*,bootstrapsigner,tokencleaner",
            f"--service-account-private-key-file={pki}/service-accounts.key",
            f"--root-ca-file={pki}/ca.crt",
            f"--cluster-signing-cert-file={pki}/ca.crt",
            f"--cluster-signing-key-file={pki}/ca.key",
            f"--service-cluster-ip-range={self._state.addresses.services}",
            *(NODE_DEATH if self._state.settings.nodes else ()),
        ]

    def _client_flags(self, user: str, name: str) -> list[str]:
        config = self.identities.kubeconfig(user)
        return [
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}",
            f"--cert-dir={self._state.folder}/certificates-{name}",
            "--leader-elect=false",
            # The default of 20 requests per second makes the controller manager's start take 5 s longer.
            "--kube-api-qps=1000",
            "--kube-api-burst=2000",
        ]


class ApiServer(Program):
    """The API server; chaos tests stop, pause and restart it alone."""

    def __init__(self, state: State, api: Api) -> None:
        super().__init__(state, "kube-apiserver")
        self._api = api

    def stop(self, *, sig: int = signal.SIGKILL, wait_s: float = 10) -> None:
        """End it, by default as a crash does: with SIGTERM it lets every watch go on for up to `wait_s`."""
        super().stop(sig=sig, wait_s=wait_s)

    def start(self) -> None:
        """Start it again on the same address, and wait until it is ready."""
        super().start()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until it serves. Raises ClusterError after minutes."""
        self.wait("readiness", self._api.ready)


def free_port() -> int:
    """A port of 127.0.0.1 nobody listens on."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 nobody listens on, all different, below those the kernel gives to outgoing connections.

    A server that is stopped and started again could else find its port taken: by a client of its own, which while it was away
    was given that very port as its source and so connected to itself.
    """
    with ExitStack() as stack:
        return [stack.enter_context(_listen()).getsockname()[1] for _ in range(count)]


def _listen() -> socket.socket:
    while True:
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", random.randrange(*SERVER_PORTS)))
