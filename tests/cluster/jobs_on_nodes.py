"""Jobs on the test cluster's real nodes, as a person with kubectl sees them. Used by tests/cluster/nodes and benchmarks."""

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kubernetes
import urllib3
import yaml

from tests.cluster.testcluster.access import Access
from tests.cluster.testcluster.commands import run
from tests.e2e.harness import Output

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic" / "rljob.yaml"
API = {"group": "rljob.dev", "version": "v1alpha1", "plural": "rljobs"}
USER = 1000
"""User of the pods."""
FOREVER = 100_000
"""Steps of a job that goes on until its test ends it (`finish`), so that it waits for a test that is slow."""
ENDED = ("Succeeded", "Failed")
BUSY = frozenset({410, 429, 500, 503, 504})
"""Codes with which an API server ends a watch that is to begin again. 504: its cache is behind ("Too large resource version")."""
SPREAD = [
    {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "nodeTaintsPolicy": "Honor",
    }
]
"""One rollout on each of two nodes, all on one while the other is dead."""


def example() -> tuple[dict, dict]:
    """Return the claim and the job of the example."""
    claim, job = yaml.safe_load_all(EXAMPLE.read_text())
    return claim, job


SHARED = "shared"
"""Claim of a folder of this machine that pods of all nodes write to."""
REWARD = """
def letter_a(prompts, completions, **columns):
    return [text.count("a") / max(len(text), 1) for text in completions]
"""
UNHURRIED = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "unhurried"},
    "data": {
        "unhurried.py": """
import time


def reward(prompts, completions, **columns):
    time.sleep(0.5)
    return [float(len(text)) for text in completions]
"""
    },
}
"""Code of jobs that go on while pods start: their training leaves those pods the processors of the machine."""


def unhurried(name: str, **changes: Any) -> dict:
    """Return a job as `small` does that goes on, and whose reward takes its time."""
    env = {
        "type": "reward",
        "reward": "unhurried:reward",
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
    }
    return small(name, steps=FOREVER, code={"configMap": UNHURRIED["metadata"]["name"]}, env=env, **changes)


def small(name: str, *, steps: int, **changes: Any) -> dict:
    """Return a job with light steps on the example's model; `changes` are paths with `__` for the dot, e.g. `rollout__replicas=1`."""
    _, job = example()
    job = copy.deepcopy(job)
    job["metadata"]["name"] = name
    spec = job["spec"]
    spec["algorithm"] |= {"steps": steps, "promptsPerStep": 8, "groupSize": 4}
    spec["checkpoint"]["everySteps"] = 5
    spec["rollout"]["topologySpreadConstraints"] = SPREAD
    del spec["validation"], spec["data"]["validation"]
    for path, value in changes.items():
        *folders, last = path.split("__")
        place = spec
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return job


def host_claim(access: Access, namespace: str, name: str) -> Path:
    """Make a claim `name` that pods of both nodes write to; return its folder on this machine, which belongs to the pods' user."""
    folder = access.cluster.state.folder / name
    folder.mkdir()
    os.chown(folder, USER, USER)
    capacity = {"storage": "1Gi"}
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": name}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {**common, "capacity": capacity, "hostPath": {"path": str(folder), "type": "Directory"}},
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {**common, "resources": {"requests": capacity}},
    }
    access.apply(volume, claim, namespace=namespace)
    return folder


class Job:
    """One RLJob; all waits are on watches, so that no state between two looks is missed."""

    def __init__(self, access: Access, namespace: str, name: str) -> None:
        self.access, self.namespace, self.name = access, namespace, name
        self.seen: list[dict] = []
        """Every status that a wait saw."""
        self.pods_then: dict[str, dict] = {}
        """Its pods at a moment that a test chose."""

    def apply(self, manifest: Mapping[str, Any]) -> None:
        """As `kubectl apply -f` does."""
        text = yaml.safe_dump(dict(manifest))
        self.access.kubectl("apply", "-n", self.namespace, "-f", "-", stdin=text)

    def start(self, manifest: Mapping[str, Any]) -> None:
        """Apply the manifest. A job of its name that has ended, as of an earlier try of a test, is deleted first."""
        words = (
            "get",
            "rljob",
            self.name,
            "-n",
            self.namespace,
            "--ignore-not-found",
            "-o",
            "jsonpath={.status.phase}",
        )
        if self.access.kubectl(*words).stdout in ENDED:
            self.delete()
        self.apply(manifest)

    def patch(self, **spec: Any) -> None:
        """As `kubectl patch --type=merge` does."""
        body = {"spec": spec}
        self.access.custom.patch_namespaced_custom_object(**API, namespace=self.namespace, name=self.name, body=body)

    def read(self) -> dict:
        """Return the object."""
        return self.access.custom.get_namespaced_custom_object(**API, namespace=self.namespace, name=self.name)

    def status(self) -> dict:
        """Return its status, empty before the first."""
        return self.read().get("status", {})

    @property
    def folder(self) -> str:
        """Name of its output folder."""
        return f"{self.name}-{self.read()['metadata']['uid'][:8]}"

    def condition(self, kind: str) -> dict:
        """Return one condition as it is now."""
        return condition(self.status(), kind)

    def row(self, *options: str) -> dict[str, str]:
        """Return what `kubectl get rljob NAME` prints, by column."""
        text = self.access.kubectl("get", "rljob", self.name, "-n", self.namespace, *options).stdout
        header, line = text.splitlines()
        starts = [header.index(word) for word in header.split()]
        ends = [*starts[1:], None]
        return {header[a:b].strip(): line[a:b].strip() for a, b in zip(starts, ends, strict=True)}

    def wait(self, what: str, holds: Callable[[dict], bool], *, seconds: float) -> dict:
        """Return the first status from now on of which `holds` is true; an AssertionError tells the last one seen."""
        api = self.access.custom
        found = self._watch(
            api.list_namespaced_custom_object, API, lambda job: holds(job.get("status", {})), seconds, self.seen
        )
        assert found is not None, f"{what}: not within {seconds} s, last: {self._told()}"
        return found["status"]

    def wait_phase(self, phase: str, *, seconds: float) -> dict:
        """Return the first status in `phase`; fails at once if the job ends in another one."""
        status = self.wait(f"phase {phase}", lambda status: status.get("phase") in (phase, *ENDED), seconds=seconds)
        assert status["phase"] == phase, self._told()
        return status

    def wait_steps(self, more: int, *, seconds: float) -> dict:
        """Return the status once `more` steps were made from now on, in whatever epoch."""
        first = self.status()
        start = (first.get("epoch", 0), first.get("step", 0))

        def made(status: dict) -> bool:
            epoch, step = status.get("epoch", 0), status.get("step", 0)
            return step >= start[1] + more if epoch == start[0] else step > 0 and status["phase"] == "Running"

        return self.wait(f"{more} more steps than {start}", made, seconds=seconds)

    def pods(self, role: str = "") -> dict[str, dict]:
        """Return its pods by name."""
        selector = f"rljob.dev/job={self.name}" + (f",rljob.dev/role={role}" if role else "")
        items = self.access.get("pods", namespace=self.namespace, selector=selector)["items"]
        return {pod["metadata"]["name"]: pod for pod in items}

    def wait_pod(self, name: str, what: str, holds: Callable[[dict], bool], *, seconds: float) -> dict:
        """Return the first state from now on of a pod of which `holds` is true."""
        found = self._watch(self.access.core.list_namespaced_pod, {}, holds, seconds, [], name=name)
        assert found is not None, f"pod {name}: {what}: not within {seconds} s, job: {self._told()}"
        return found

    def ready_pods(self, *names: str, seconds: float) -> dict[str, dict]:
        """Return the pods of these names once each is ready."""
        return {name: self.wait_pod(name, "ready", is_ready, seconds=seconds) for name in names}

    def wait_replaced(self, name: str, uid: str, *, seconds: float) -> dict:
        """Return the ready pod that has taken the place of the one with `uid`."""
        return self.wait_pod(
            name, "replaced", lambda pod: pod["metadata"]["uid"] != uid and is_ready(pod), seconds=seconds
        )

    def kill(self, pod: str) -> str:
        """Kill every process of a pod at once, once it runs, as the kernel or a bug would; return the pod's uid."""
        found = self.wait_pod(pod, "running", runs, seconds=540.0)
        node = self.access.cluster.node(found["spec"]["nodeName"])
        container = found["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        ctr = f"{self.access.cluster.state.settings.programs}/ctr"
        run(*node.command(ctr, "-n", "k8s.io", "task", "kill", "--all", "--signal", "SIGKILL", container))
        return found["metadata"]["uid"]

    def delete(self) -> None:
        """Delete it, and its pods without their grace; return when the pods are gone."""
        self.access.kubectl("delete", "rljob", self.name, "-n", self.namespace, "--ignore-not-found", "--wait=false")
        words = ("pods", "-n", self.namespace, "-l", f"rljob.dev/job={self.name}")
        self.access.kubectl("delete", *words, "--grace-period=1", "--timeout=180s")

    def _told(self) -> dict:
        status = self.status()
        conditions = [f"{c['type']}={c['status']} {c['reason']} {c['message']}" for c in status.get("conditions", [])]
        pods = {name: pod["status"].get("phase") for name, pod in self.pods().items()}
        kept = ("phase", "step", "epoch", "restarts", "reward", "roles")
        return {key: status.get(key) for key in kept} | {"conditions": conditions, "pods": pods}

    def _watch(
        self,
        listing: Callable,
        words: dict,
        holds: Callable[[dict], bool],
        seconds: float,
        seen: list,
        *,
        name: str = "",
    ) -> dict | None:
        selector = f"metadata.name={name or self.name}"
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            watch = kubernetes.watch.Watch()
            arguments = {**words, "namespace": self.namespace, "field_selector": selector}
            try:
                for event in watch.stream(listing, **arguments, timeout_seconds=max(1, round(left))):
                    found = event["raw_object"]
                    seen.append(found.get("status", {}))
                    if event["type"] != "DELETED" and holds(found):
                        watch.stop()
                        return found
            except (kubernetes.client.ApiException, urllib3.exceptions.HTTPError) as error:
                if getattr(error, "status", None) not in (None, *BUSY):
                    raise
                time.sleep(1.0)  # asked again at once, a busy server would only get busier
        return None


@contextmanager
def started(access: Access, namespace: str, manifest: Mapping[str, Any]) -> Iterator[Job]:
    """Apply a job for a `with` block. It is deleted at the end and after an error, so that a fixture can be set up again."""
    job = Job(access, namespace, manifest["metadata"]["name"])
    try:
        job.apply(manifest)
        yield job
    finally:
        job.delete()


def condition(status: Mapping[str, Any], kind: str) -> dict:
    """Return one condition of a status; empty before the first."""
    return next((each for each in status.get("conditions", []) if each["type"] == kind), {})


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether the kubelet says the pod is ready."""
    conditions = pod.get("status", {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def runs(pod: Mapping[str, Any]) -> bool:
    """Whether the first container of the pod runs."""
    containers = pod.get("status", {}).get("containerStatuses") or [{}]
    return "running" in containers[0].get("state", {})


def readable_by_pods(folder: Path) -> None:
    """Give a folder of this machine and what is in it to the user that pods run as."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER, USER)


def finish(job: Job, shared: Path, *, steps: int, restarts: int) -> Output:
    """Set the number of steps of a job, wait at most 20 minutes for its end, and return its output folder.

    Asserts that it has succeeded after exactly `restarts` restarts and at least `steps` steps. A job that has made more steps already ends
    after its current one.
    """
    job.patch(algorithm={"steps": steps})
    status = job.wait("the end", lambda status: status.get("phase") in ENDED, seconds=20 * 60.0)
    assert (status["phase"], status["totalRestarts"]) == ("Succeeded", restarts), job.condition("Failed")
    assert status["step"] >= steps
    return Output(shared / "checkpoints" / job.folder)
