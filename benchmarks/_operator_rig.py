"""A real control plane with fake nodes, fake runners and the operator as a process of its own; what operator_*.py measure.

Nodes and their pods are kwok's: a pod runs as soon as it is scheduled. All pod addresses lead to `_fake_runner.py`,
which answers the operator's polls as a healthy run does. The operator has the rights of the chart's role.
Needs root for the network of the fake pods.
"""

import asyncio
import base64
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import yaml
from _fake_pods import PODS, fake_pods

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rljob_operator.runtime import master_key  # noqa: E402
from tests.cluster.testcluster.access import Access  # noqa: E402
from tests.cluster.testcluster.cluster import Cluster  # noqa: E402
from tests.cluster.testcluster.control_plane import free_port  # noqa: E402

PATIENT = ("--node-monitor-period=5s", "--node-monitor-grace-period=50s")
"""Kubernetes' own times until a node counts as dead, not those of the test cluster: a busy machine is none."""
NAMESPACE = "bench"
OPERATOR_NAMESPACE = "rljob-system"
JOBS = f"/apis/rljob.dev/v1alpha1/namespaces/{NAMESPACE}/rljobs"
POD_PATH = f"/api/v1/namespaces/{NAMESPACE}/pods"
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
METADATA_LIST = METADATA_ONLY.replace("PartialObjectMetadata", "PartialObjectMetadataList")
WRITES = ("create", "update", "patch", "apply", "delete", "post", "put")
KUBERAY_PODS_PER_SECOND = 26
"""What KubeRay publishes for creating RayClusters at scale, as issue and specs quote it."""


def job(name: str, *, rollouts: int, envs: int) -> dict:
    """A job of one actor pod and these; nothing of it ever runs."""
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "model": {"path": "/model"},
            "data": {"train": "/data/train.jsonl"},
            "algorithm": {"name": "grpo", "promptsPerStep": 8, "groupSize": 4, "steps": 1000},
            "actor": {"image": "none"},
            "rollout": {"image": "none", "replicas": rollouts, "maxReplicas": 64},
            "env": {"image": "none", "type": "math", "replicas": envs},
        },
    }


class Api:
    """The API server over one HTTP session, as administrator."""

    def __init__(self, access: Access) -> None:
        config = json.loads(access.kubeconfig.read_text())
        self._server = config["clusters"][0]["cluster"]["server"]
        self._headers = {"Authorization": f"Bearer {config['users'][0]['user']['token']}"}
        self._tls = ssl.create_default_context(cafile=access.cluster.state.pki / "ca.crt")

    async def __aenter__(self) -> "Api":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._tls, limit=0), headers=self._headers
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def request(self, method: str, path: str, body: object = None, **headers: str) -> dict:
        headers = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        data = None if body is None else json.dumps(body)
        async with self._session.request(method, self._server + path, data=data, headers=headers) as response:
            text = await response.text()
            if response.status >= 400:
                raise RuntimeError(f"{method} {path}: HTTP {response.status}: {text[:2000]}")
            return json.loads(text)

    async def follow(self, path: str) -> AsyncIterator[tuple[str, dict]]:
        """Events of a kind, metadata only: what is there, then what changes. The API server drops watchers that fall behind; then anew."""
        known: set[str] = set()
        while True:
            found = await self.request("GET", path, Accept=METADATA_LIST)
            present = {item["metadata"]["uid"]: item["metadata"] for item in found["items"] or []}
            for uid in known - present.keys():
                yield "DELETED", {"uid": uid}
            for metadata in present.values():
                yield "MODIFIED", metadata
            known = set(present)
            async for kind, metadata in self._watch(path, found["metadata"]["resourceVersion"]):
                (known.discard if kind == "DELETED" else known.add)(metadata["uid"])
                yield kind, metadata

    async def _watch(self, path: str, version: str) -> AsyncIterator[tuple[str, dict]]:
        timeout = aiohttp.ClientTimeout(total=None)
        url = f"{self._server}{path}?watch=1&resourceVersion={version}"
        async with self._session.get(url, headers={"Accept": METADATA_ONLY}, timeout=timeout) as response:
            buffer = b""
            async for chunk in response.content.iter_any():
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":  # the version is too old: list again
                        return
                    yield event["type"], event["object"]["metadata"]


class Pods:
    """When each pod was first seen, by a watch; times are those of time.perf_counter."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, tuple[str, float]]] = {}
        """job -> pod -> (uid, time) of the newest of that name."""
        self.owners: dict[str, str] = {}
        """uid of every pod ever seen -> uid of its owner."""
        self.alive: set[str] = set()
        self._changed = asyncio.Event()

    async def follow(self, api: Api) -> None:
        async for kind, metadata in api.follow(POD_PATH):
            now, uid = time.perf_counter(), metadata["uid"]
            if kind == "DELETED":
                self.alive.discard(uid)
            elif uid not in self.owners:
                owner = metadata.get("ownerReferences", [{}])[0].get("uid", "")
                self.owners[uid] = owner
                self.alive.add(uid)
                of_job = self.seen.setdefault(metadata["labels"].get("rljob.dev/job", ""), {})
                of_job[metadata["name"]] = (uid, now)
            self._changed.set()

    async def wait(self, test: Callable[[], bool], *, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while not test():
                self._changed.clear()
                await self._changed.wait()


class OperatorProcess:
    """`python -m rljob_operator` with its metrics."""

    def __init__(self, kubeconfig: Path, log: Path) -> None:
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "operator"),
            "KUBECONFIG": str(kubeconfig),
            "RLJOB_OPERATOR_METRICS_HOST": "127.0.0.1",
            "RLJOB_OPERATOR_LOG_LEVEL": "WARNING",
        }
        self._log = log

    def start(self) -> None:
        self._port = free_port()
        self._environment["RLJOB_OPERATOR_METRICS_PORT"] = str(self._port)
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "rljob_operator"]
            self._process = psutil.Popen(
                command, env=self._environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def stop(self) -> None:
        if self._process.is_running():
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except psutil.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def log_tail(self) -> str:
        return self._log.read_text()[-3000:]

    def cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    def memory_mib(self) -> float:
        return self._process.memory_info().rss / 2**20

    async def metrics(self) -> dict[str, float]:
        """Every sample by its name with labels; empty while it does not serve."""
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{self._port}/metrics") as answer,
            ):
                text = await answer.text()
        except aiohttp.ClientError:
            if not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE:
                raise RuntimeError(f"the operator ended:\n{self.log_tail()}") from None
            return {}
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[:1] != "#"
        }

    async def writes(self) -> dict[str, float]:
        """Requests that change something, by verb and resource."""
        found: dict[str, float] = {}
        for name, value in (await self.metrics()).items():
            if name.startswith("rljob_operator_api_requests_total{"):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', name))
                if labels["verb"].lower() in WRITES:
                    key = f"{labels['verb']} {labels['resource']}"
                    found[key] = found.get(key, 0.0) + value
        return found

    async def wait(self, test: Callable[[dict[str, float]], bool], *, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while not test(await self.metrics()):
                await asyncio.sleep(0.2)


class Rig:
    """All of it, running."""

    def __init__(self, access: Access, api: Api, operator: OperatorProcess, pods: Pods) -> None:
        self.access, self.api, self.operator, self.pods = access, api, operator, pods

    async def phases(self) -> dict[str, int]:
        """How many jobs are in each phase."""
        counts: dict[str, int] = {}
        for item in (await self.api.request("GET", JOBS))["items"]:
            phase = item.get("status", {}).get("phase", "none")
            counts[phase] = counts.get(phase, 0) + 1
        return counts


@asynccontextmanager
async def rig(*, fake_nodes: int) -> AsyncIterator[Rig]:
    """Start everything; take it down at the end."""
    if os.geteuid() != 0:
        sys.exit("this benchmark needs root: it makes a network for the fake pods")
    if task := asyncio.current_task():  # a benchmark that is stopped takes everything down too
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rljob-bench-")))
        cluster = Cluster.create(folder / "cluster", owner=os.getpid(), controller_manager_args=PATIENT)
        stack.callback(cluster.down)
        access = Access(cluster)
        stack.enter_context(fake_pods(folder / "master"))
        cluster.kwok.start(pods=PODS)
        cluster.kwok.add_nodes(fake_nodes)
        operator = OperatorProcess(_prepare(access), folder / "operator.log")
        operator.start()
        stack.callback(operator.stop)
        api = await stack.enter_async_context(Api(access))
        pods = Pods()
        following = asyncio.create_task(pods.follow(api))
        stack.callback(following.cancel)
        await operator.wait(lambda values: values.get("rljob_operator_leader") == 1, timeout_s=60)
        secret = await api.request("GET", f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/secrets/{master_key.NAME}")
        (folder / "master").write_bytes(base64.b64decode(secret["data"][master_key.FIELD]))
        try:
            yield Rig(access, api, operator, pods)
        except TimeoutError:
            for words in (["get", "nodes"], ["get", "rljobs", "-A", "-o", "wide"]):
                sys.stderr.write(access.kubectl(*words).stdout[-1500:])
            sys.stderr.write(operator.log_tail())
            raise


def _prepare(access: Access) -> Path:
    """Define the resource, make the operator's account with the chart's role, and return its kubeconfig."""
    access.define(ROOT / "crds" / "rljob.yaml")
    for name in (NAMESPACE, OPERATOR_NAMESPACE):
        access.kubectl("create", "namespace", name)
    chart = access.helm("template", "rljob", ROOT / "helm" / "rljob", "-n", OPERATOR_NAMESPACE).stdout
    kinds = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "FlowSchema")
    rights = [
        each for each in yaml.safe_load_all(chart) if each and each["kind"] in kinds and "helm.sh/hook" not in str(each)
    ]
    access.apply(*rights, namespace=OPERATOR_NAMESPACE)
    account = next(each["metadata"]["name"] for each in rights if each["kind"] == "ServiceAccount")
    return access.kubeconfig_of(account, namespace=OPERATOR_NAMESPACE)


def percentile(values: list[float], part: float) -> float:
    """The nearest-rank percentile, in milliseconds for values in seconds."""
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, round(part * (len(ordered) - 1)))])


def machine() -> dict:
    """What the figures depend on."""
    return {"cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1), "host": socket.gethostname()}
