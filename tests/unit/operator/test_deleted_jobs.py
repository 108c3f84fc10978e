"""The policies of a deleted job stay until its pods have ended: the remaining pods become their owners, and a lost policy is made again."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_operator import kinds
from rljob_operator.errors import Forbidden
from rljob_operator.manifests import network
from rljob_operator.reconcile import pod_views, reconcile
from rljob_operator.runtime.apply import Applied
from rljob_operator.runtime.cache import Cache, JobKey, policy
from rljob_operator.runtime.controller import Controller
from tests.unit.operator.fake_cluster import FakeCluster
from tests.unit.operator.manifest_samples import CONFIG, UID, make_job

KEY = JobKey("default", "sums")


class NothingApplied:
    """Stands in for apply.Applier: the job is parsed, and nothing is written."""

    async def apply(self, work: Any) -> Applied:
        return Applied()


class Bench:
    """A controller whose cache holds a job with its policies and four pods."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.cache = Cache(projections={kinds.POD: pod_views.pod_view, kinds.NETWORK_POLICY: policy})
        self.controller = Controller(
            cluster=cluster, cache=self.cache, applier=NothingApplied(), reconcile=reconcile, config=CONFIG
        )
        self.typed = make_job()
        written = self.typed.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
        written["metadata"] |= {"namespace": "default", "uid": UID}
        self.job = cluster.put(kinds.RLJOB, "default", written)
        self.cache.put(kinds.RLJOB, self.job)
        for one in network.build(self.typed, config=CONFIG):
            self.cache.put(kinds.NETWORK_POLICY, cluster.put(kinds.NETWORK_POLICY, "default", one))
        for role, index in (("actor", 0), ("rollout", 0), ("rollout", 1), ("env", 0)):
            self.pod(role, index)

    def pod(self, role: str, index: int) -> None:
        labels = {"rljob.dev/job": "sums", "rljob.dev/role": role, "rljob.dev/index": str(index)}
        owner = [{"kind": "RLJob", "uid": UID}]
        meta = {"name": f"sums-{role}-{index}", "labels": labels, "ownerReferences": owner, "uid": f"{role}-{index}"}
        self.cache.put(kinds.POD, self.cluster.put(kinds.POD, "default", {"metadata": meta}))

    async def delete_job(self) -> None:
        await self.controller.handle(KEY)
        self.cache.drop(kinds.RLJOB, self.job)
        self.cluster.calls.clear()
        await self.controller.handle(KEY)

    def owners(self) -> dict[str, list[str]]:
        return {
            name: [owner["uid"] for owner in obj["metadata"]["ownerReferences"]]
            for (kind, _, name), obj in self.cluster.objects.items()
            if kind == "NetworkPolicy"
        }


@pytest.fixture
def bench(cluster: FakeCluster) -> Bench:
    return Bench(cluster)


async def test_each_policy_belongs_to_the_pods_that_it_fences_and_keeps_its_rules(bench: Bench) -> None:
    await bench.delete_job()
    assert bench.owners() == {
        "sums-actor": ["actor-0"],
        "sums-actor-0": ["actor-0"],
        "sums-rollout": ["rollout-0", "rollout-1"],
        "sums-env": ["env-0"],
    }
    rules = {p["metadata"]["name"]: network.digest_of(p) for p in network.build(bench.typed, config=CONFIG)}
    held = {p["metadata"]["name"]: network.digest_of(p) for p in bench.cache.children(kinds.NETWORK_POLICY, KEY)}
    assert held == rules


async def test_it_is_done_once_and_a_policy_that_went_first_is_made_again(bench: Bench) -> None:
    await bench.delete_job()
    bench.cluster.calls.clear()
    await bench.controller.handle(KEY)
    assert bench.cluster.calls == []
    gone = bench.cluster.objects.pop(("NetworkPolicy", "default", "sums-env"))
    bench.cache.drop(kinds.NETWORK_POLICY, gone)
    await bench.controller.handle(KEY)
    assert bench.cluster.calls == [("apply", "NetworkPolicy", "sums-env")] and bench.owners()["sums-env"] == ["env-0"]


async def test_with_the_last_pod_the_job_is_forgotten(bench: Bench) -> None:
    await bench.delete_job()
    for pod in bench.cache.children(kinds.POD, KEY):
        bench.cache.drop_uid(kinds.POD, KEY, pod.name, pod.uid)
    for obj in [obj for key, obj in bench.cluster.objects.items() if key[0] == "NetworkPolicy"]:
        bench.cache.drop(kinds.NETWORK_POLICY, obj)
    bench.cluster.calls.clear()
    await bench.controller.handle(KEY)
    assert bench.cluster.calls == [] and bench.controller.progress(KEY) is None
    bench.pod("env", 7)
    await bench.controller.handle(KEY)
    assert bench.cluster.calls == [], "nothing is known of it any more"


async def test_a_refusal_ends_nothing(bench: Bench) -> None:
    bench.cluster.fail("apply", "sums-env", Forbidden("the namespace is being terminated"))
    await bench.delete_job()
    assert bench.owners()["sums-rollout"] == ["rollout-0", "rollout-1"]


async def test_a_job_that_is_deleted_in_the_foreground_is_one_too(bench: Bench) -> None:
    await bench.controller.handle(KEY)
    meta = {**bench.job["metadata"], "deletionTimestamp": "2025-06-15T15:06:40Z"}
    bench.cache.put(kinds.RLJOB, bench.cluster.put(kinds.RLJOB, "default", {**bench.job, "metadata": meta}))
    await bench.controller.handle(KEY)
    assert bench.owners()["sums-env"] == ["env-0"]
