"""One look at a job: fresh facts before anything ends, obstacles remembered, volume claims read now and then."""

import pytest

from rljob_operator import kinds
from rljob_operator.manifests import gang
from rljob_operator.model import Deletion, OperatorConfig, Plan, Progress
from rljob_operator.runtime.apply import Applied
from rljob_operator.runtime.cache import Cache, JobKey
from rljob_operator.runtime.controller import Controller, claim_names, needs_fresh_reads

KEY = JobKey("ns", "x")
LABELS = {"rljob.dev/job": "x", "rljob.dev/job-uid": "job-uid"}


class Applier:
    """Stands in for apply.Applier: keeps what it was given."""

    def __init__(self):
        self.works = []
        self.effect = lambda work: Applied()

    async def apply(self, work):
        self.works.append(work)
        return self.effect(work)


class Bench:
    def __init__(self, cluster):
        self.cluster, self.cache, self.applier = cluster, Cache(), Applier()
        self.seen, self.plans, self.now = [], [], [1000.0]
        self.controller = Controller(
            cluster=cluster,
            cache=self.cache,
            applier=self.applier,
            reconcile=self.reconcile,
            config=OperatorConfig(),
            clock=lambda: self.now[0],
        )
        self.job = self.place()

    def place(self, *, uid="job-uid", spec=None, status=None):
        job = {"metadata": {"name": "x", "uid": uid, "generation": 1}, "spec": spec or {}, "status": status or {}}
        placed = self.cluster.put(kinds.RLJOB, "ns", job)
        self.cache.put(kinds.RLJOB, placed)
        return placed

    def reconcile(self, job, observed, now, *, config, known):
        self.seen.append((job, observed))
        return self.plans.pop(0) if self.plans else Plan()

    def pod(self, name):
        return self.cluster.put(kinds.POD, "ns", {"metadata": {"name": name, "labels": LABELS}})


@pytest.fixture
def bench(cluster):
    return Bench(cluster)


async def test_a_quiet_look_costs_no_request(bench):
    assert await bench.controller.handle(KEY) is None
    assert bench.cluster.calls == []
    assert len(bench.seen) == 1


async def test_a_job_that_is_gone_is_not_looked_at(bench):
    bench.cache.drop(kinds.RLJOB, bench.job)
    assert await bench.controller.handle(KEY) is None
    assert bench.seen == []


async def test_a_pod_missing_from_the_cache_alone_is_found_before_anything_ends(bench):
    pod = bench.pod("x-actor-1")
    bench.plans = [Plan(delete=(Deletion(kind="Pod", name="x-actor-0", uid="u"),)), Plan()]
    await bench.controller.handle(KEY)
    assert bench.seen[0][1].pods == ()
    assert [p["metadata"]["uid"] for p in bench.seen[1][1].pods] == [pod["metadata"]["uid"]]
    assert bench.applier.works[0].plan == Plan(), "the second look's plan is the one that counts"


async def test_a_pod_that_is_gone_is_dropped_by_the_fresh_look(bench):
    pod = bench.pod("x-actor-0")
    bench.cache.put(kinds.POD, pod)
    del bench.cluster.objects["Pod", "ns", "x-actor-0"]
    bench.plans = [Plan(status={"phase": "Failed"})]
    await bench.controller.handle(KEY)
    assert len(bench.seen[0][1].pods) == 1
    assert bench.seen[1][1].pods == ()


async def test_a_job_deleted_meanwhile_ends_the_look(bench):
    del bench.cluster.objects["RLJob", "ns", "x"]
    bench.plans = [Plan(status={"phase": "Failed"})]
    assert await bench.controller.handle(KEY) is None
    assert bench.applier.works == []


@pytest.mark.parametrize(
    ("status", "plan", "expected"),
    [
        ({"epoch": 1, "phase": "Running"}, Plan(), False),
        ({"epoch": 1, "phase": "Running"}, Plan(status={"epoch": 1, "phase": "Running", "step": 3}), False),
        ({}, Plan(status={"epoch": 1, "phase": "Pending"}), False),
        ({"epoch": 1, "phase": "Running"}, Plan(status={"epoch": 2, "phase": "Restarting"}), True),
        ({"epoch": 1, "phase": "Running"}, Plan(status={"epoch": 1, "phase": "Succeeded"}), True),
        ({"epoch": 1, "phase": "Failed"}, Plan(status={"epoch": 1, "phase": "Failed", "restarts": 1}), False),
        ({"epoch": 1, "phase": "Running"}, Plan(delete=(Deletion(kind="Pod", name="p", uid="u"),)), True),
    ],
    ids=["nothing", "progress", "first epoch", "restart", "end", "ended before", "deletion"],
)
def test_deletions_restarts_and_ends_need_fresh_facts(status, plan, expected):
    assert needs_fresh_reads({"status": status}, plan) is expected


async def test_what_stood_in_the_way_is_shown_to_the_next_look(bench):
    def refuse(work):
        work.memory.record_refusal("Pod/x-env-0", "exceeded quota", now=1000.0)
        return Applied(again_after=0.0)

    bench.applier.effect = refuse
    assert await bench.controller.handle(KEY) == 0.0
    await bench.controller.handle(KEY)
    assert bench.seen[1][1].refusals == {"Pod/x-env-0": "exceeded quota"}


async def test_a_refusal_is_forgotten_when_the_object_is_there(bench):
    bench.applier.effect = lambda work: (
        (work.memory.record_refusal("Pod/x-env-0", "quota", now=1000.0) and Applied()) or Applied()
    )
    await bench.controller.handle(KEY)
    bench.cache.put(kinds.POD, bench.pod("x-env-0"))
    await bench.controller.handle(KEY)
    assert bench.seen[1][1].refusals == {}


def service(text, manifest):
    meta = {"name": "x", "labels": LABELS, "annotations": {"rljob.dev/manifest-hash": manifest}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"is": text}}


async def test_a_refused_apply_is_not_forgotten_because_the_older_form_is_there(bench):
    def refuse(work):
        work.memory.record_refusal("Service/x", "field is immutable", now=1000.0, manifest="2")
        return Applied()

    bench.cache.put(kinds.SERVICE, bench.cluster.put(kinds.SERVICE, "ns", service("old", "1")))
    bench.plans = [Plan(ensure=(service("new", "2"),))] * 2
    bench.applier.effect = refuse
    await bench.controller.handle(KEY)
    await bench.controller.handle(KEY)
    assert bench.seen[-1][1].refusals == {"Service/x": "field is immutable"}
    assert bench.applier.works[-1].memory.refusal_pause("Service/x", now=1000.5, manifest="2") > 0


async def test_a_refused_apply_is_forgotten_when_it_is_wanted_no_more(bench):
    def refuse_the_first(work):
        if work.plan.ensure:
            work.memory.record_refusal("Service/x", "field is immutable", now=1000.0, manifest="2")
        return Applied()

    bench.cache.put(kinds.SERVICE, bench.cluster.put(kinds.SERVICE, "ns", service("old", "1")))
    bench.plans = [Plan(ensure=(service("new", "2"),))]
    bench.applier.effect = refuse_the_first
    await bench.controller.handle(KEY)
    await bench.controller.handle(KEY)  # the edit was taken back
    assert bench.seen[-1][1].refusals == {}


@pytest.mark.parametrize("kind", [kinds.POD, *gang.KINDS], ids=lambda kind: kind.api_version)
async def test_names_of_others_are_read_again_until_they_are_free(bench, kind):
    label = f"{kind.kind}/x-env-0"
    bench.cluster.put(kind, "ns", {"metadata": {"name": "x-env-0"}})
    bench.applier.effect = lambda work: work.memory.name_conflicts.update({label: kind}) or Applied()
    await bench.controller.handle(KEY)
    bench.applier.effect = lambda work: Applied()
    await bench.controller.handle(KEY)
    assert bench.seen[1][1].name_conflicts == (label,)
    del bench.cluster.objects[kind.kind, "ns", "x-env-0"]
    await bench.controller.handle(KEY)
    assert bench.seen[2][1].name_conflicts == ()


async def test_nothing_is_remembered_of_a_forerunner(bench):
    bench.applier.effect = lambda work: (
        (work.memory.record_refusal("Pod/x-env-0", "quota", now=1000.0) and Applied()) or Applied()
    )
    await bench.controller.handle(KEY)
    bench.place(uid="job-uid-2")
    await bench.controller.handle(KEY)
    assert bench.seen[1][1].refusals == {}
    progress = Progress(status={}, at=1.0, pod_uid="p")
    bench.controller.set_progress(KEY, "job-uid", progress)
    assert bench.controller.progress(KEY) is None
    bench.controller.set_progress(KEY, "job-uid-2", progress)
    assert bench.controller.progress(KEY) == progress


async def test_volume_claims_are_read_often_while_one_is_missing_and_seldom_else(bench):
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "models"}}]
    bench.place(spec={"actor": {"volumes": volumes}})
    await bench.controller.handle(KEY)
    assert bench.seen[-1][1].claims == {}
    bench.cluster.put(kinds.CLAIM, "ns", {"metadata": {"name": "models"}, "spec": {"accessModes": ["ReadWriteOnce"]}})
    bench.now[0] += 16
    await bench.controller.handle(KEY)
    assert bench.seen[-1][1].claims["models"]["spec"] == {"accessModes": ["ReadWriteOnce"]}
    bench.now[0] += 60
    await bench.controller.handle(KEY)
    assert [call for call in bench.cluster.calls if call[1] == "PersistentVolumeClaim"] == [
        ("read", "PersistentVolumeClaim", "models")
    ] * 2


def test_claims_of_all_roles_are_named_once():
    def role(*names):
        return {
            "volumes": [{"name": n, "persistentVolumeClaim": {"claimName": n}} for n in names]
            + [{"name": "e", "emptyDir": {}}]
        }

    assert claim_names({"spec": {"actor": role("b", "a"), "env": role("a"), "rollout": {}}}) == ["a", "b"]
