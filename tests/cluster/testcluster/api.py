"""As much of a Kubernetes client as starting a cluster needs; tests use the real client libraries."""

import json
import ssl
import urllib.error
import urllib.request
from functools import cached_property

from tests.cluster.testcluster.errors import ClusterError
from tests.cluster.testcluster.identities import ADMIN, Identities
from tests.cluster.testcluster.state import State

CONFLICT = 409


class Api:
    """The API server, asked as the administrator."""

    def __init__(self, state: State) -> None:
        self._state = state

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self._state.pki / "ca.crt")

    @cached_property
    def _token(self) -> str:
        return Identities(self._state).token(ADMIN)

    def request(self, method: str, path: str, body: object = None, *, timeout_s: float = 60) -> str:
        """Send one request and return the answer's text. Raises OSError, HTTPError included."""
        request = urllib.request.Request(
            self._state.settings.server + path,
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, context=self._context, timeout=timeout_s) as response:
            return response.read().decode()

    def get(self, path: str) -> dict:
        """Read an object or a list."""
        return json.loads(self.request("GET", path))

    def create(self, path: str, body: dict) -> None:
        """Create an object; one that is there already is left as it is."""
        try:
            self.request("POST", path, body)
        except urllib.error.HTTPError as error:
            # A Service that is there is first refused for its address (422).
            if error.code != CONFLICT and not self.exists(f"{path}/{body['metadata']['name']}"):
                raise ClusterError(f"{path}: {error.read().decode()}") from error

    def exists(self, path: str) -> bool:
        """Whether an object is there."""
        try:
            self.request("GET", path)
        except urllib.error.HTTPError:
            return False
        return True

    def ready(self) -> bool:
        """Whether the API server says that it is ready."""
        return self.request("GET", "/readyz", timeout_s=2) == "ok"

    def grant(self, user: str, *rules: tuple[str, str, str]) -> None:
        """Let a user do what the rules say: (API group, resources, verbs), the latter two separated by spaces."""
        group = "rbac.authorization.k8s.io"
        folder = f"/apis/{group}/v1"
        metadata = {"name": f"testcluster:{user}"}
        allowed = [
            {"apiGroups": [api], "resources": resources.split(), "verbs": verbs.split()}
            for api, resources, verbs in rules
        ]
        self.create(f"{folder}/clusterroles", {"metadata": metadata, "rules": allowed})
        binding = {
            "metadata": metadata,
            "subjects": [{"kind": "User", "name": user, "apiGroup": group}],
            "roleRef": {"kind": "ClusterRole", "name": metadata["name"], "apiGroup": group},
        }
        self.create(f"{folder}/clusterrolebindings", binding)
