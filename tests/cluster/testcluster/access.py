"""What a test holds of a cluster: client libraries, kubectl and helm as the administrator, and other users' rights."""

import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path

import kubernetes
import kubernetes.aio
import yaml

from tests.cluster.testcluster.cluster import Cluster

TIMEOUT_S = 900
"""Longer than any --timeout given to kubectl or helm."""


class Access:
    """A running cluster, as the fixtures `control_plane` and `nodes` hand it out."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.kubeconfig = cluster.state.kubeconfig

    @cached_property
    def client(self) -> kubernetes.client.ApiClient:
        """The synchronous client, as administrator."""
        return kubernetes.config.new_client_from_config(str(self.kubeconfig))

    @cached_property
    def core(self) -> kubernetes.client.CoreV1Api:
        """Pods, Services, Secrets ... by the synchronous client."""
        return kubernetes.client.CoreV1Api(self.client)

    @cached_property
    def custom(self) -> kubernetes.client.CustomObjectsApi:
        """Custom resources by the synchronous client."""
        return kubernetes.client.CustomObjectsApi(self.client)

    @asynccontextmanager
    async def aio_client(self, kubeconfig: Path | None = None) -> AsyncIterator[kubernetes.aio.client.ApiClient]:
        """The asynchronous client, as administrator or as another user, closed at the end."""
        client = await kubernetes.aio.config.new_client_from_config(str(kubeconfig or self.kubeconfig))
        async with client:
            yield client

    def kubectl(self, *arguments: object, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess:
        """Run kubectl. With `check` an AssertionError carries what it said when it fails."""
        return self._tool("kubectl", *arguments, stdin=stdin, check=check)

    def helm(self, *arguments: object, check: bool = True) -> subprocess.CompletedProcess:
        """Run helm, as `kubectl`."""
        return self._tool("helm", *arguments, stdin=None, check=check)

    def get(self, kind: str, name: str = "", *, namespace: str = "default", selector: str = "") -> dict:
        """Read an object, or a list without a name, as kubectl prints it."""
        words = ["get", kind, *([name] if name else []), "-n", namespace, "-o", "json"]
        return json.loads(self.kubectl(*words, *(["-l", selector] if selector else [])).stdout)

    def apply(self, *manifests: dict, namespace: str = "default") -> None:
        """Apply objects, server-side."""
        text = yaml.safe_dump_all(manifests)
        self.kubectl("apply", "--server-side", "--force-conflicts", "-n", namespace, "-f", "-", stdin=text)

    def define(self, file: Path) -> None:
        """Apply a CustomResourceDefinition and wait until its resource is served."""
        spec = yaml.safe_load(file.read_text())["spec"]
        self.kubectl("apply", "--server-side", "-f", file)
        self.wait_served(spec["group"], spec["versions"][0]["name"], spec["names"]["plural"])

    def wait_served(self, group: str, version: str, plural: str) -> None:
        """Wait until a custom resource is served, and listed where clients look for what there is."""
        api, path = self.cluster.control_plane.api, f"/apis/{group}/{version}"

        def served() -> bool:
            if group not in {each["name"] for each in api.get("/apis")["groups"]}:
                return False
            return plural in {each["name"] for each in api.get(path)["resources"]} and api.exists(f"{path}/{plural}")

        self.cluster.control_plane.api_server.wait(f"resource {path}/{plural}", served)

    def kubeconfig_of(self, service_account: str, *, namespace: str) -> Path:
        """Write a kubeconfig with the rights of a service account (its token is good for an hour)."""
        token = self.kubectl("create", "token", service_account, "-n", namespace, "--duration=1h").stdout.strip()
        path = self.cluster.state.folder / "kubeconfigs" / f"{namespace}.{service_account}.conf"
        return self.cluster.control_plane.identities.kubeconfig(service_account, path, token=token)

    def delete_namespace(self, name: str, *, pods_first: bool) -> None:
        """Delete a namespace and do not wait. With `pods_first` its pods end now, whatever grace they were given."""
        if pods_first:
            self.kubectl("delete", "pods", "--all", "-n", name, "--grace-period=1", "--wait=false")
        self.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")

    def _tool(self, name: str, *arguments: object, stdin: str | None, check: bool) -> subprocess.CompletedProcess:
        words = [f"{self.cluster.state.settings.programs}/{name}", *(str(argument) for argument in arguments)]
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "HELM_CACHE_HOME": str(self._helm / "cache"),
                       "HELM_CONFIG_HOME": str(self._helm / "config"), "HELM_DATA_HOME": str(self._helm / "data")}  # fmt: skip
        done = subprocess.run(
            words, input=stdin or "", env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0 or not check, f"{' '.join(words)}: {done.stderr or done.stdout}"
        return done

    @property
    def _helm(self) -> Path:
        return self.cluster.state.folder / "helm"
