"""A kubelet that does as told: one Node, to which the real scheduler binds pods, and pods whose states the test decides.

Pods of the node run at once, unless held; an ended or failing container is what the test says. A deleted pod is removed as soon as it is
seen, unless the kubelet is dead. Every pod has an address of 127.0.0.0/8, so that a runner can be served behind it.
"""

import asyncio
import contextlib
import datetime
import random
import secrets
from typing import Any

from rljob_operator import kinds
from rljob_operator.errors import ApiError, Conflict, NotFound
from rljob_operator.kinds import Kind
from rljob_operator.runtime.cluster import ApiCluster

NODE = Kind(group="", version="v1", kind="Node", plural="nodes")
CAPACITY = {"cpu": "1000", "memory": "4Ti", "pods": "5000", "nvidia.com/gpu": "1000", "ephemeral-storage": "4Ti"}
BEAT = 3.0
LOOK = 0.05


class Kubelet:
    """One node and its pods."""

    def __init__(self, api: ApiCluster, *, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self.node = f"rig-{secrets.token_hex(4)}"
        self._net = f"127.{random.randint(10, 250)}.{random.randint(0, 250)}"
        self._addresses: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None
        self.held: set[str] = set()
        """Names of pods that stay in ContainerCreating."""
        self.failing: dict[str, tuple[str, str]] = {}
        """Names of pods whose container waits with (reason, message)."""

    async def __aenter__(self) -> "Kubelet":
        node = {"metadata": {"name": self.node, "labels": {"kubernetes.io/hostname": self.node}}}
        await self._call("create", NODE, None, node)
        await self._beat()
        self._task = asyncio.create_task(self._run(), name="kubelet")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()
        with contextlib.suppress(ApiError):
            await self._raw("DELETE", NODE.path(None, self.node))

    async def die(self) -> None:
        """Stop: no heartbeat, no pod changes any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def address(self, pod: str) -> str:
        """Return the address the pod of that name has or will have."""
        return self._addresses.setdefault(pod, f"{self._net}.{len(self._addresses) + 1}")

    async def end(self, name: str, *, code: int, message: str = "", reason: str = "") -> None:
        """End the pod's containers with an exit code and a termination message."""
        pod = await self._api.read(kinds.POD, self._namespace, name)
        ended = {
            "exitCode": code,
            "message": message,
            "reason": reason or ("Completed" if code == 0 else "Error"),
            "finishedAt": _now(),
        }
        status = {
            **pod["status"],
            "phase": "Succeeded" if code == 0 else "Failed",
            "conditions": _conditions(pod, ready=False, reason="PodCompleted" if code == 0 else "PodFailed"),
            "containerStatuses": _containers(pod, {"terminated": ended}, ready=False),
        }
        await self._api.patch(kinds.POD, self._namespace, name, {"status": status}, subresource="status")

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        beat = 0.0
        while True:
            with contextlib.suppress(ApiError):
                if loop.time() >= beat:
                    await self._beat()
                    beat = loop.time() + BEAT
                async for page in self._api.list(kinds.POD, self._namespace):
                    await asyncio.gather(*(self._look(pod) for pod in page if pod["spec"].get("nodeName") == self.node))
            await asyncio.sleep(LOOK)

    async def _look(self, pod: dict[str, Any]) -> None:
        meta, name = pod["metadata"], pod["metadata"]["name"]
        with contextlib.suppress(NotFound, Conflict):
            if meta.get("deletionTimestamp"):
                await self._api.delete(kinds.POD, self._namespace, name, uid=meta["uid"], grace_seconds=0)
            elif pod["status"].get("phase", "Pending") == "Pending" and (status := self._state(pod)) is not None:
                body = {"metadata": {"uid": meta["uid"]}, "status": status}
                await self._api.patch(kinds.POD, self._namespace, name, body, subresource="status")

    def _state(self, pod: dict[str, Any]) -> dict[str, Any] | None:
        """Return the status to write; None when it is written already."""
        name = pod["metadata"]["name"]
        if name in self.failing or name in self.held:
            reason, message = self.failing.get(name, ("ContainerCreating", ""))
            waiting = {"waiting": {"reason": reason, "message": message}}
            if [s["state"] for s in pod["status"].get("containerStatuses", [])][:1] == [waiting]:
                return None
            return {
                "startTime": _now(),
                "conditions": _conditions(pod, ready=False, reason="ContainersNotReady"),
                "containerStatuses": _containers(pod, waiting, ready=False),
            }
        return {
            "phase": "Running",
            "startTime": _now(),
            "podIP": self.address(name),
            "podIPs": [{"ip": self.address(name)}],
            "conditions": _conditions(pod, ready=True),
            "containerStatuses": _containers(pod, {"running": {"startedAt": _now()}}, ready=True),
        }

    async def _beat(self) -> None:
        condition = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "lastHeartbeatTime": _now(),
            "lastTransitionTime": _now(),
        }
        status = {"capacity": CAPACITY, "allocatable": CAPACITY, "conditions": [condition]}
        await self._call("patch", NODE, self.node, {"status": status}, subresource="status")

    async def _call(
        self, verb: str, kind: Kind, name: str | None, body: dict[str, Any], *, subresource: str | None = None
    ) -> None:
        """Nodes have no namespace, which the operator's port always names."""
        method, content = (
            ("POST", "application/json") if verb == "create" else ("PATCH", "application/merge-patch+json")
        )
        await self._raw(method, kind.path(None, name, subresource), body=body, content=content)

    async def _raw(self, method: str, path: str, **more: Any) -> None:
        await self._api._call(method, NODE, path, **more)


def _containers(pod: dict[str, Any], state: dict[str, Any], *, ready: bool) -> list[dict[str, Any]]:
    return [
        {"name": c["name"], "image": c["image"], "imageID": "", "restartCount": 0, "ready": ready, "state": state}
        for c in pod["spec"]["containers"]
    ]


def _conditions(pod: dict[str, Any], *, ready: bool, reason: str = "") -> list[dict[str, Any]]:
    kept = [c for c in pod["status"].get("conditions", []) if c["type"] == "PodScheduled"]
    own = {"status": "True" if ready else "False", "lastTransitionTime": _now()} | (
        {"reason": reason} if reason else {}
    )
    return [
        *kept,
        {"type": "Initialized", "status": "True"},
        {"type": "Ready", **own},
        {"type": "ContainersReady", **own},
    ]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
