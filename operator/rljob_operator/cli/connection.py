"""The connection of the command line to the API server of the user's kubeconfig; refusals become errors that say what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from socket import socket
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urlencode

from rl_core.api.errors import ConfigError, InfrastructureError
from rljob_operator.errors import ApiError, Forbidden, error_of
from rljob_operator.kinds import RLJOB, Kind

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

CONNECT_SECONDS, READ_SECONDS = 5.0, 30.0
MANAGER = "rljob-cli"
"""Field manager of the objects that the commands write."""
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
Json = dict[str, Any]


class ClusterPlace(Protocol):
    """Namespace and context in which a job is searched; implemented by rl_core.cli.targets.Place."""

    @property
    def namespace(self) -> str | None:
        """None = the context's."""

    @property
    def context(self) -> str | None:
        """None = the current one."""


class Connection:
    """Calls to the API server of one kubeconfig context. Objects are plain dictionaries."""

    def __init__(self, api: ApiClient, *, namespace: str) -> None:
        self.namespace = namespace
        self._api = api

    @classmethod
    def open(cls, place: ClusterPlace) -> Connection:
        """Connect by KUBECONFIG or ~/.kube/config, in a pod by its service account. Raises ConfigError when there is neither."""
        from kubernetes import config
        from kubernetes.client import ApiClient, Configuration

        settings = Configuration()
        namespace = place.namespace
        try:
            file = os.environ.get("KUBECONFIG") or None
            config.load_kube_config(file, context=place.context, client_configuration=settings)
            contexts, active = config.list_kube_config_contexts(file)
            selected = next((context for context in contexts if context["name"] == place.context), active)
            namespace = namespace or selected["context"].get("namespace")
        except config.ConfigException as error:
            if place.context is not None or not _in_cluster(settings):
                raise ConfigError(
                    f"a kubeconfig must say which cluster to use, got: {error}; set KUBECONFIG, or --context to one it holds"
                ) from error
        settings.retries = 2
        return cls(ApiClient(settings), namespace=namespace or "default")

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content: str = "application/json",
    ) -> Json:
        """Send a call and return the decoded answer. Raises a subclass of ApiError for a refusal, InfrastructureError without an answer."""
        response = self._request(method, path, query=query, body=body, content=content, stream=False)
        result: Json = json.loads(response.data)
        return result

    def lines(self, path: str, *, query: Mapping[str, str]) -> Iterator[str]:
        """Yield the lines of a text answer as they arrive, without line ends."""
        response = self._request("GET", path, query=query, body=None, content="", stream=True)
        partial = b""
        try:
            for part in response.stream(4096, decode_content=True):
                *complete, partial = (partial + part).split(b"\n")
                for line in complete:
                    yield line.decode(errors="replace")
        finally:
            response.release_conn()
        if partial:
            yield partial.decode(errors="replace")

    def read(self, kind: Kind, name: str) -> Json:
        """Return one object."""
        return self.call("GET", kind.path(self.namespace, name))

    def list(self, kind: Kind, *, selector: str = "") -> list[Json]:
        """Return the objects of a kind in the namespace."""
        query = {"labelSelector": selector} if selector else {}
        return list(self.call("GET", kind.path(self.namespace), query=query)["items"])

    def create(self, kind: Kind, body: Json, *, dry_run: bool = False) -> Json:
        """Create an object; with `dry_run` it is only validated."""
        query = {"fieldManager": MANAGER, "fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return self.call("POST", kind.path(self.namespace), query=query, body=body)

    def apply(self, kind: Kind, body: Json, *, dry_run: bool = False) -> Json:
        """Apply an object server-side."""
        query = {"fieldManager": MANAGER, "force": "true"} | ({"dryRun": "All"} if dry_run else {})
        path = kind.path(self.namespace, body["metadata"]["name"])
        return self.call("PATCH", path, query=query, body=body, content=APPLY)

    def patch(self, kind: Kind, name: str, body: Json, *, subresource: str | None = None) -> Json:
        """Merge-patch an object or its subresource."""
        path = kind.path(self.namespace, name, subresource)
        return self.call("PATCH", path, query={"fieldManager": MANAGER}, body=body, content=MERGE)

    def delete(self, kind: Kind, name: str) -> None:
        """Delete an object."""
        self.call("DELETE", kind.path(self.namespace, name))

    @contextmanager
    def forwarded(self, pod: str, port: int) -> Iterator[socket]:
        """Connect to a port of a pod through the API server. Raises Forbidden, or InfrastructureError when there is no connection."""
        from kubernetes.client import ApiException, CoreV1Api
        from kubernetes.stream import portforward

        method = CoreV1Api(self._api).connect_get_namespaced_pod_portforward
        try:
            forward = portforward(method, pod, self.namespace, ports=str(port))
        except ApiException as error:
            message = str(error.reason)
            if "status 403" in message:
                raise Forbidden(f"pods/portforward of {pod}: {message}") from error
            raise InfrastructureError(
                f"pod {pod} must be reached through the API server, got: {message}; try again, or look at rljob status"
            ) from error
        try:
            opened = forward.socket(port)
            opened.settimeout(READ_SECONDS)
            yield opened
        finally:
            forward.close()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _request(
        self, method: str, path: str, *, query: Mapping[str, str] | None, body: Any, content: str, stream: bool
    ) -> Any:
        import urllib3

        host = self._api.configuration.host
        url = host + quote(path) + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": "application/json" if content else "*/*", "Content-Type": content or "application/json"}
        self._api.update_params_for_auth(headers, [], ["BearerToken"], url, method, body)
        try:
            response = self._api.rest_client.pool_manager.request(
                method,
                url,
                body=None if body is None else json.dumps(body),
                headers=headers,
                preload_content=not stream,
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=None if stream else READ_SECONDS),
            )
        except urllib3.exceptions.HTTPError as error:
            raise InfrastructureError(
                f"the API server {host} must answer, got: {_cause(error)}; check the context and the network"
            ) from error
        if response.status >= 400:
            raise error_of(response.status, response.data, retry_after=response.headers.get("Retry-After"))
        return response


def explain(error: ApiError, *, namespace: str, doing: str) -> ConfigError:
    """Return a refusal of the API server as an error for the user."""
    message = error.message.strip()
    if isinstance(error, Forbidden):
        return ConfigError(
            f"{doing} must be allowed in namespace {namespace}, got: {message}; ask the administrator, or use -n"
        )
    if "could not find the requested resource" in message or message == "404 page not found":
        return ConfigError(
            f"{doing} needs the resource {RLJOB.plural}.{RLJOB.group}, which this cluster does not serve; install the chart helm/rljob"
        )
    return ConfigError(f"{doing} was refused in namespace {namespace}: {message}")


def _in_cluster(settings: Any) -> bool:
    from kubernetes import config

    try:
        config.load_incluster_config(client_configuration=settings)
    except config.ConfigException:
        return False
    return True


def _cause(error: Exception) -> str:
    """Return the innermost reason of a urllib3 error, without the objects' addresses it names."""
    reason = getattr(error, "reason", None) or error
    return str(reason).rpartition(": ")[2] or type(error).__name__
