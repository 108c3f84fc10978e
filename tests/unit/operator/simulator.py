"""A small pure cluster: an API server that keeps objects, kubelets that run pods, a runner that trains; and it applies Plans.

Stands in for apply, API server, scheduler, kubelet and runner together, so that reconcile can be run to its fixed points by the
thousand. Every effect of a plan counts as one, and an application can be cut off after any of them, as by a killed operator.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rljob_operator.model import Observed, OperatorConfig, Plan, Progress
from rljob_operator.reconcile import pod_views, reconcile
from rljob_operator.reconcile.parsing import ParsedJob
from rljob_operator.times import to_seconds, to_text

CONFIG = OperatorConfig(images={"actor": "a:1", "rollout": "r:1", "env": "e:1"})
START = 1_750_000_000.0
GRACE = 30


def make_job(uid: str = "0f9d2c1e-0000", **spec: Any) -> dict[str, Any]:
    """Return an RLJob as the API server has it, with `spec` over a minimal one."""
    base: dict[str, Any] = {
        "model": {"path": "/m"},
        "data": {"train": "/d.jsonl"},
        "rollout": {"replicas": 2, "minReplicas": 1},
    }
    meta = {"name": "x", "namespace": "team", "uid": uid, "generation": 1}
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": meta, "spec": {**base, **spec}}


@dataclass
class World:
    """One job and the cluster around it."""

    job: dict[str, Any]
    now: float = START
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    deleted_job: bool = False
    steps: int = 0
    """Steps the runner of the present actor-0 has done."""
    saved: int = 0
    """Step of the newest checkpoint."""
    runner: str = ""
    """Phase of the runner; empty while there is none."""
    runner_epoch: int = 0
    applied: int = 0
    streaks: dict[str, int] = field(default_factory=dict)
    workload: dict[str, Any] | None = None
    """What the runner tells of waiting; None = a release that tells nothing."""
    stall: dict[str, Any] | None = None
    drained: set[str] = field(default_factory=set)
    operator_ahead: float = 0.0
    """Seconds that the operator's clock is ahead of the API server's."""
    refused_change: tuple[int, str] | None = None
    """What the runner said to the newest spec, where it refuses it."""
    silent_since: float | None = None
    """Since when the runner does not answer."""
    quota: int | None = None
    """Most pods the namespace allows."""
    no_image: bool = False
    dead_nodes: set[str] = field(default_factory=set)
    claims: dict[str, Any] = field(default_factory=dict)
    calls: list[Any] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    writes: int = 0
    created: list[tuple[str, str]] = field(default_factory=list)
    """(name, attempt) of pods ever made."""
    parsed: ParsedJob = field(default_factory=ParsedJob)
    """What earlier looks understood of the spec."""
    _uids: int = 0

    # --- what the operator sees and does -----------------------------------------------------------------------------

    def observed(self) -> Observed:
        """Return what a cache without delay would show."""
        return pod_views.observe(
            pods=list(self.pods.values()),
            objects=list(self.objects.values()),
            refusals=dict(self.refusals),
            claims=self.claims,
            progress=self.progress(),
            refused_change=self.refused_change,
        )

    def progress(self) -> Progress | None:
        """Return the runner's answer to a poll."""
        actor = self.pods.get("x-actor-0")
        if actor is None or not self.runner or not _running(actor):
            return None
        members = [
            {
                "pod": name,
                "role": role_of(pod),
                "state": "drained" if name in self.drained else "serving",
                "policyVersion": self.steps,
            }
            for name, pod in sorted(self.pods.items())
            if _running(pod) and role_of(pod) != "actor"
        ]
        status = {**self.summary(), "members": members, "stall": self._stalled()}
        failing = self.silent_since
        return Progress(
            status=status,
            at=self.now,
            pod_uid=uid_of(actor),
            error="timed out" if failing else "",
            failing_since=failing,
            failures=2 if failing else 0,
        )

    def _stalled(self) -> dict[str, Any] | None:
        """Return the stall with the silence that has grown since it was made."""
        if self.stall is None:
            return None
        began = self.stall.setdefault("began", self.now - self.stall["since"])
        return {**self.stall, "since": self.now - began}

    def summary(self) -> dict[str, Any]:
        """Return what the runner says of itself."""
        ready = sum(1 for pod in self.pods.values() if role_of(pod) == "rollout" and _ready(pod))
        return {
            "phase": self.runner,
            "epoch": self.runner_epoch,
            "step": self.steps,
            "totalSteps": self.job["spec"].get("algorithm", {}).get("steps", 200),
            "policyVersion": self.steps,
            "reward": self.steps / 100,
            "metrics": {"train/loss": 0.5, "reward/mean": self.steps / 100},
            "roles": [{"name": "rollout", "ready": ready, "lag": 0, "versions": {str(self.steps): ready}}],
            "appliedGeneration": self.applied,
            "streaks": self.streaks,
            "workload": self.workload,
            "checkpoint": {"lastStep": self.saved} if self.saved else {},
        }

    def plan(self) -> Plan:
        """Return what the operator would do now."""
        return reconcile(self.job, self.observed(), self.now, config=CONFIG, known=self.parsed)

    def apply(self, plan: Plan, *, at_most: int | None = None) -> int:
        """Carry out the effects of `plan` in order, the first `at_most` of them; return how many there are."""
        effects = list(self._effects(plan))
        for effect in effects if at_most is None else effects[:at_most]:
            effect()
        self.events += plan.events if at_most is None else ()
        return len(effects)

    def reconcile(self) -> Plan:
        """Make and carry out one plan."""
        plan = self.plan()
        self.apply(plan)
        return plan

    def _effects(self, plan: Plan) -> Iterator[Any]:
        if plan.status is not None:
            yield lambda: self._write(plan.status)
        for deletion in plan.delete:
            yield lambda deletion=deletion: self._delete(deletion)
        for obj in plan.ensure:
            yield lambda obj=obj: self._ensure(obj)
        for pod in plan.create:
            yield lambda pod=pod: self._create(pod)
        for call in plan.calls:
            yield lambda call=call: self._call(call)
        if plan.scale is not None and plan.scale.generation == self.job["metadata"]["generation"]:
            yield lambda: self.edit(rollout={"replicas": plan.scale.replicas})

    def _ensure(self, obj: Any) -> None:
        made = copy.deepcopy(dict(obj))
        self._uids += 1
        made["metadata"]["uid"] = f"object-{self._uids}"
        self.objects[obj["kind"], obj["metadata"]["name"]] = made

    def _write(self, status: Any) -> None:
        self.job["status"] = json.loads(json.dumps(status))
        self.writes += 1

    def _delete(self, deletion: Any) -> None:
        if deletion.kind == "RLJob":
            self.deleted_job = deletion.uid == self.job["metadata"]["uid"]
            return
        if deletion.kind == "ResourceClaimTemplate":
            assert self.objects.pop((deletion.kind, deletion.name))["metadata"]["uid"] == deletion.uid
            return
        pod = self.pods.get(deletion.name)
        if pod is None or uid_of(pod) != deletion.uid:
            return
        if deletion.grace_seconds == 0 or not pod["spec"].get("nodeName"):
            del self.pods[deletion.name]
        else:
            grace = deletion.grace_seconds if deletion.grace_seconds is not None else GRACE
            pod["metadata"].setdefault("deletionTimestamp", to_text(self.now + grace))

    def _create(self, pod: Any) -> None:
        name = pod["metadata"]["name"]
        assert name not in self.pods, f"{name} is made while it is there"
        if self.quota is not None and len(self.pods) >= self.quota:
            self.refusals[f"Pod/{name}"] = f'pods "{name}" is forbidden: exceeded quota: q, limited: pods={self.quota}'
            return
        self.refusals.pop(f"Pod/{name}", None)
        made = copy.deepcopy(dict(pod))
        self._uids += 1
        created = to_text(self.now - self.operator_ahead)
        made["metadata"] |= {"uid": f"pod-{self._uids}", "creationTimestamp": created}
        made["status"] = {"phase": "Pending"}
        self.pods[name] = made
        attempt = next((e["value"] for e in pod["spec"]["containers"][0]["env"] if e["name"] == "RLJOB_POD_PLAN"), "")
        self.created.append((name, attempt))

    def _call(self, call: Any) -> None:
        self.calls.append(call)
        if not self.runner or self.silent_since is not None:
            return
        if call.method == "PUT /control":
            self.applied = max(self.applied, call.body["generation"])
        elif call.method == "POST /drain":
            self.drained |= set(call.body["pods"])
        elif call.method == "POST /finish":
            if call.body["reason"] != "rollback":
                self.saved = self.steps
            self.end_pod("x-actor-0", 0 if call.body["reason"] == "suspend" else 3, phase="Suspended")

    # --- what the cluster does ---------------------------------------------------------------------------------------

    def tick(self, seconds: float = 1.0) -> None:
        """Let `seconds` pass: pods are bound, start and end, the runner makes a step."""
        self.now += seconds
        for name, pod in list(self.pods.items()):
            self._step_pod(name, pod)
        self._step_runner()

    def _step_pod(self, name: str, pod: dict[str, Any]) -> None:
        node = pod["spec"].get("nodeName")
        if node in self.dead_nodes:
            _set_condition(pod, "Ready", "False", "")
            return
        deadline = to_seconds(pod["metadata"].get("deletionTimestamp"))
        if deadline is not None:
            if role_of(pod) == "actor" and _running(pod):
                self.saved = max(self.saved, self.steps) if name == "x-actor-0" else self.saved
                self.end_pod(name, 3)
            else:
                del self.pods[name]
        elif node is None:
            alive = [name for name in ("node-0", "node-1", "node-2") if name not in self.dead_nodes]
            if alive:
                pod["spec"]["nodeName"] = alive[sum(map(ord, name)) % len(alive)]
            _set_condition(pod, "PodScheduled", "True" if alive else "False", "0/3 nodes are available")
        elif pod["status"]["phase"] == "Pending":
            if self.no_image:
                pod["status"] |= {"startTime": to_text(self.now)}
                pod["status"]["containerStatuses"] = [
                    {
                        "name": "c",
                        "state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}},
                    }
                ]
                return
            pod["status"] |= {"phase": "Running", "podIP": "10.0.0.1", "startTime": to_text(self.now)}
            pod["status"]["containerStatuses"] = [{"name": role_of(pod), "state": {"running": {}}}]
            _set_condition(pod, "Ready", "True", "")

    def _step_runner(self) -> None:
        actor = self.pods.get("x-actor-0")
        gang = [
            pod
            for pod in self.pods.values()
            if role_of(pod) == "actor" and _ready(pod) and "deletionTimestamp" not in pod["metadata"]
        ]
        if actor is None or not _running(actor) or "deletionTimestamp" in actor["metadata"]:
            self.runner = ""
            return
        epoch = int(actor["metadata"]["labels"]["rljob.dev/epoch"])
        if not self.runner:
            self.runner, self.runner_epoch, self.steps, self.applied = "Starting", epoch, self.saved, 0
            self.streaks, self.stall, self.drained = {}, None, set()
        wanted = self.job["spec"].get("actor", {}).get("replicas", 1)
        if len([pod for pod in gang if int(pod["metadata"]["labels"]["rljob.dev/epoch"]) == epoch]) < wanted:
            return
        mode = self.job["spec"].get("placement", {}).get("mode")
        generators = "actor" if mode in ("colocated", "hybrid") else "rollout"
        if self.stall is None and any(role_of(pod) == generators and _ready(pod) for pod in self.pods.values()):
            self.runner = "Generating"
            self.steps += 1
            if self.steps % 5 == 0:
                self.saved = self.steps
            if self.steps >= self.job["spec"].get("algorithm", {}).get("steps", 200):
                self.runner = "Finished"
                self.end_pod("x-actor-0", 0, phase="Finished")

    # --- what goes wrong ---------------------------------------------------------------------------------------------

    def end_pod(self, name: str, code: int, *, phase: str = "", reason: str = "", message: str | None = None) -> None:
        """End the main container of a running pod."""
        pod = self.pods.get(name)
        if pod is None or not _running(pod):
            return
        summary = {**self.summary(), "phase": phase or "Failed"} if name == "x-actor-0" and self.runner else None
        word = json.dumps({"reason": "ended", "process": "p", "code": code, "tail": "last line", "summary": summary})
        ended = {
            "exitCode": code,
            "reason": reason or ("Completed" if code == 0 else "Error"),
            "message": word if message is None else message,
            "finishedAt": to_text(self.now),
        }
        pod["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
        pod["status"]["containerStatuses"] = [{"name": role_of(pod), "state": {"terminated": ended}}]
        _set_condition(pod, "Ready", "False", "PodCompleted")
        if name == "x-actor-0":
            self.runner = ""

    def delete_pod(self, name: str, *, disruption: str = "") -> None:
        """Someone deletes a pod; `disruption` = the cluster does, for this reason."""
        pod = self.pods.get(name)
        if pod is None:
            return
        pod["metadata"].setdefault("deletionTimestamp", to_text(self.now + GRACE))
        if disruption:
            _set_condition(pod, "DisruptionTarget", "True", disruption)

    def kill_node(self, node: str) -> None:
        """A node dies: the taint manager deletes its pods, which nobody ends."""
        self.dead_nodes.add(node)
        for pod in self.pods.values():
            if pod["spec"].get("nodeName") == node:
                pod["metadata"].setdefault("deletionTimestamp", to_text(self.now + GRACE))
                _set_condition(pod, "DisruptionTarget", "True", "DeletionByTaintManager")

    def edit(self, **spec: Any) -> None:
        """The user edits the spec."""
        for key, value in spec.items():
            old = self.job["spec"].get(key)
            self.job["spec"][key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
        self.job["metadata"]["generation"] += 1

    # --- runs to an end ----------------------------------------------------------------------------------------------

    def settle(self, *, ticks: int = 400) -> None:
        """Reconcile and let time pass until the job stands still or has ended."""
        quiet = 0
        for _ in range(ticks):
            plan = self.reconcile()
            idle = plan.status is None and not plan.delete and not plan.create and not plan.ensure
            quiet = quiet + 1 if idle else 0
            if quiet > 12 and self.phase in ("Succeeded", "Failed", "Suspended"):
                return
            self.tick(0.0 if plan.requeue_after == 0.0 else 1.0)

    def go_on(self, *, ticks: int) -> None:
        """Reconcile and let time pass, whatever happens."""
        for _ in range(ticks):
            self.reconcile()
            self.tick()

    def run_until(self, condition: Any, *, ticks: int = 200) -> None:
        """Reconcile and let time pass until `condition()` holds."""
        for _ in range(ticks):
            if condition():
                return
            self.reconcile()
            self.tick()
        raise AssertionError(
            f"never happened; phase {self.phase}, pods {sorted(self.pods)}, status {json.dumps(self.status, indent=1)}"
        )

    @property
    def status(self) -> dict[str, Any]:
        """The job's status."""
        return self.job.get("status") or {}

    @property
    def phase(self) -> str:
        """The job's phase."""
        return self.status.get("phase", "")

    def condition(self, kind: str) -> dict[str, Any]:
        """Return a condition of the job."""
        return next((c for c in self.status.get("conditions", []) if c["type"] == kind), {})

    def role(self, name: str) -> dict[str, Any]:
        """Return `status.roles` of one role."""
        return next((r for r in self.status.get("roles", []) if r["name"] == name), {})


def role_of(pod: dict[str, Any]) -> str:
    """Return the role of a pod."""
    return pod["metadata"]["labels"]["rljob.dev/role"]


def uid_of(pod: dict[str, Any]) -> str:
    """Return the uid of a pod."""
    return pod["metadata"]["uid"]


def _running(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") == "Running"


def _ready(pod: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


def _set_condition(pod: dict[str, Any], kind: str, status: str, reason: str) -> None:
    conditions = [c for c in pod["status"].get("conditions", []) if c["type"] != kind]
    pod["status"]["conditions"] = [*conditions, {"type": kind, "status": status, "reason": reason}]


def running(**spec: Any) -> World:
    """Return a world whose job trains."""
    world = World(make_job(**{"algorithm": {"steps": 500}, **spec}))
    world.run_until(lambda: world.phase == "Running" and all(r["ready"] == r["desired"] for r in world.status["roles"]))
    return world


def reason(world: World, kind: str) -> str:
    """Return why a condition is as it is."""
    return str(world.condition(kind)["reason"])
