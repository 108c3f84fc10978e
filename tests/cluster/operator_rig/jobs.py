"""RLJobs for tests, and words to wait for what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from rljob_operator import kinds, naming
from rljob_operator.errors import NotFound
from rljob_operator.runtime.cluster import ApiCluster

PATIENCE = 180.0
"""Seconds a test waits for what should take one: machines of CI are slow, and the garbage collector learns of a new CRD within 30 s."""
IMAGE = "registry.test/none:1"


def manifest(name: str = "job", **sections: dict[str, Any] | Any) -> dict[str, Any]:
    """Return an RLJob of one actor, two rollouts and one env; sections of spec are merged in one level deep."""
    spec: dict[str, Any] = {
        "model": {"path": "/models/tiny"},
        "data": {"train": "/data/train.jsonl"},
        "algorithm": {"name": "grpo", "promptsPerStep": 8, "groupSize": 4, "steps": 20},
        "actor": {"image": IMAGE},
        "rollout": {"image": IMAGE, "replicas": 2, "maxReplicas": 64},
        "env": {"image": IMAGE, "type": "math"},
    }
    for key, value in sections.items():
        spec[key] = {**spec.get(key, {}), **value} if isinstance(value, dict) else value
    return {"apiVersion": kinds.RLJOB.api_version, "kind": "RLJob", "metadata": {"name": name}, "spec": spec}


class Jobs:
    """The API server as a test sees it, in one namespace."""

    def __init__(self, api: ApiCluster, namespace: str) -> None:
        self.api = api
        self.namespace = namespace

    async def create(self, name: str = "job", **sections: Any) -> dict[str, Any]:
        """Create a job and return it."""
        return await self.api.create(kinds.RLJOB, self.namespace, manifest(name, **sections))

    async def get(self, name: str = "job") -> dict[str, Any]:
        """Return the job."""
        return await self.api.read(kinds.RLJOB, self.namespace, name)

    async def change(self, spec: dict[str, Any], name: str = "job") -> dict[str, Any]:
        """Merge into the job's spec."""
        return await self.api.patch(kinds.RLJOB, self.namespace, name, {"spec": spec})

    async def delete(self, name: str = "job") -> None:
        """Delete the job."""
        job = await self.get(name)
        await self.api.delete(kinds.RLJOB, self.namespace, name, uid=job["metadata"]["uid"])

    async def pods(self, name: str = "job", *, role: str = "") -> dict[str, dict[str, Any]]:
        """Return the job's pods by name."""
        selector = f"{naming.LABEL_JOB}={name}" + (f",{naming.LABEL_ROLE}={role}" if role else "")
        return {pod["metadata"]["name"]: pod for pod in await self.list(kinds.POD, selector=selector)}

    async def delete_pod(self, name: str, *, now: bool = False) -> str:
        """Delete a pod as a person would; return its uid."""
        pod = await self.api.read(kinds.POD, self.namespace, name)
        uid = str(pod["metadata"]["uid"])
        await self.api.delete(kinds.POD, self.namespace, name, uid=uid, grace_seconds=0 if now else None)
        return uid

    async def list(self, kind: kinds.Kind, *, selector: str = "") -> list[dict[str, Any]]:
        """Return all objects of a kind in the namespace."""
        return [obj async for page in self.api.list(kind, self.namespace, selector=selector) for obj in page]

    async def condition(self, kind: str, name: str = "job") -> tuple[str, str, str]:
        """Return (status, reason, message) of a condition of the job; empty while there is none."""
        conditions = (await self.get(name)).get("status", {}).get("conditions", [])
        found = next((c for c in conditions if c["type"] == kind), {})
        return found.get("status", ""), found.get("reason", ""), found.get("message", "")

    async def phase(self, name: str = "job") -> str:
        """Return status.phase."""
        return str((await self.get(name)).get("status", {}).get("phase", ""))

    async def events(self, reason: str, name: str = "job") -> list[dict[str, Any]]:
        """Return the events of a reason about the job."""
        found = await self.list(kinds.EVENT)
        return [e for e in found if e["reason"] == reason and e["involvedObject"].get("name") == name]

    async def wait_pods(self, *names: str, name: str = "job") -> dict[str, dict[str, Any]]:
        """Wait until the job has exactly these pods, none of them being deleted."""

        async def same() -> list[dict[str, dict[str, Any]]]:
            pods = await self.pods(name)
            whole = not any(pod["metadata"].get("deletionTimestamp") for pod in pods.values())
            return [pods] if whole and sorted(pods) == sorted(names) else []

        return (await until(same, f"pods {sorted(names)}", seen=lambda: self.summary(name)))[0]

    async def wait_condition(self, kind: str, status: str, reason: str = "", name: str = "job") -> str:
        """Wait for a condition; return its message."""

        async def there() -> tuple[str, str, str] | None:
            got = await self.condition(kind, name)
            return got if got[0] == status and reason in ("", got[1]) else None

        return (await until(there, f"{kind}={status}/{reason}", seen=lambda: self.summary(name)))[2]

    async def wait_phase(self, phase: str, name: str = "job") -> dict[str, Any]:
        """Wait for a phase; return the job."""

        async def there() -> dict[str, Any] | None:
            job = await self.get(name)
            return job if job.get("status", {}).get("phase") == phase else None

        return await until(there, f"phase {phase}", seen=lambda: self.summary(name))

    async def wait_roles(self, field: str, *, name: str = "job", **numbers: int) -> None:
        """Wait until the status counts so many pods of each role as `active` or `ready`."""

        async def counted() -> bool:
            roles = (await self.get(name)).get("status", {}).get("roles", [])
            return {role["name"]: role[field] for role in roles if role["name"] in numbers} == numbers

        await until(counted, f"roles {field}: {numbers}", seen=lambda: self.summary(name))

    async def summary(self, name: str = "job") -> str:
        """Return the job's phase, its conditions and what the cluster says of its pods: for the message of a wait in vain."""
        status = (await self.get(name)).get("status", {})
        lines = [f"phase {status.get('phase')}, epoch {status.get('epoch')}"]
        lines += [
            f"{c['type']}={c['status']}/{c['reason']}: {c.get('message', '')}" for c in status.get("conditions", [])
        ]
        for pod, found in (await self.pods(name)).items():
            told = [f"{c['type']}={c['status']}/{c.get('reason', '')}" for c in found["status"].get("conditions", [])]
            lines.append(f"{pod} on {found['spec'].get('nodeName')}: {found['status'].get('phase')} {' '.join(told)}")
        return "\n".join(lines)

    async def wait_gone(self, kind: kinds.Kind, name: str) -> None:
        """Wait until an object is gone."""

        async def gone() -> bool:
            with contextlib.suppress(NotFound):
                await self.api.read(kind, self.namespace, name)
                return False
            return True

        await until(gone, f"{kind.kind} {name} gone")


async def until(
    look: Callable[[], Awaitable[Any]],
    what: str,
    *,
    patience: float = PATIENCE,
    seen: Callable[[], Awaitable[str]] | None = None,
) -> Any:
    """Look again and again until the look gives something; AssertionError names what was waited for, and what there was instead."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    while True:
        got = await look()
        if got:
            return got
        if loop.time() >= deadline:
            raise AssertionError(f"waited {patience:.0f} s in vain for {what}\n{await seen() if seen else got}")
        await asyncio.sleep(0.05)


STANDARD = ("job-actor-0", "job-rollout-0", "job-rollout-1", "job-env-0")
"""The pods of `manifest()`."""
