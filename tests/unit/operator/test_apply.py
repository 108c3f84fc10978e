"""Applying a plan: the order of effects, what a taken name means, refusals that pace themselves, answers that are remembered."""

import asyncio

import pytest

from rljob_operator import kinds
from rljob_operator.errors import Conflict, Forbidden, Invalid, NotFound, Unavailable, error_of
from rljob_operator.model import ControlCall, Deletion, JobEvent, Plan
from rljob_operator.runtime.app import PROJECTIONS
from rljob_operator.runtime.apply import EARLIER_JOB_PAUSE, Application, Applier
from rljob_operator.runtime.cache import Cache, JobKey, trim
from rljob_operator.runtime.fairness import FairSlots
from rljob_operator.runtime.master_key import UnknownKey
from rljob_operator.runtime.memory import JobMemory

KEY = JobKey("ns", "x")


class Calls:
    """Notes the calls of the newest plan."""

    def __init__(self):
        self.sent = []

    def send(self, key, job_uid, calls):
        self.sent.append((key, job_uid, calls))


class Recorder:
    def __init__(self):
        self.events = []

    def record(self, job, event):
        self.events.append(event)


def labels(uid, job="x"):
    return {"rljob.dev/job": job, "rljob.dev/job-uid": uid}


def pod(name, uid="job-uid", **more):
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels(uid), **more}}


def service(uid="job-uid"):
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x", "labels": labels(uid)}}


def secret(job):
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x-keys-1"}}


class Bench:
    """An applier over the fake cluster, with one job in both."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.cache = Cache(projections={**PROJECTIONS, kinds.POD: trim})
        self.calls, self.recorder, self.now = Calls(), Recorder(), [1000.0]
        self.memory = JobMemory("job-uid")
        self.secret = secret
        self.applier = Applier(
            cluster=cluster,
            cache=self.cache,
            slots=FairSlots(total=8, per_key=4),
            recorder=self.recorder,
            calls=self.calls,
            build_secret=lambda job: self.secret(job),
            clock=lambda: self.now[0],
        )
        job = cluster.put(
            kinds.RLJOB, "ns", {"metadata": {"name": "x", "uid": "job-uid"}, "status": {"phase": "Pending", "old": 1}}
        )
        self.cache.put(kinds.RLJOB, job)

    async def apply(self, **plan):
        job = self.cache.job(KEY)
        work = Application(key=KEY, job=job, plan=Plan(**plan), memory=self.memory, progress_interval=10.0)
        return await self.applier.apply(work)

    @property
    def verbs(self):
        return [verb for verb, _, _ in self.cluster.calls]


@pytest.fixture
def bench(cluster):
    return Bench(cluster)


async def test_intent_is_written_before_anything_is_deleted_or_made(bench):
    old = bench.cluster.put(kinds.POD, "ns", pod("x-actor-0"))
    await bench.apply(
        status={"phase": "Restarting"},
        delete=(Deletion(kind="Pod", name="x-actor-0", uid=old["metadata"]["uid"]),),
        ensure=(service(),),
        ensure_secret=True,
        create=(pod("x-actor-1"),),
    )
    kinds_and_verbs = [(verb, kind) for verb, kind, _ in bench.cluster.calls if verb != "read"]
    assert kinds_and_verbs == [
        ("patch", "RLJob"),
        ("delete", "Pod"),
        ("apply", "Service"),
        ("create", "Secret"),
        ("create", "Pod"),
    ]
    assert bench.cluster.objects["RLJob", "ns", "x"]["status"] == {"phase": "Restarting"}


async def test_an_equal_status_is_not_written(bench):
    await bench.apply(status={"phase": "Pending", "old": 1})
    assert bench.cluster.calls == []


async def test_a_status_that_meets_a_newer_job_ends_the_application(bench):
    bench.cluster.put(
        kinds.RLJOB, "ns", {"metadata": {"name": "x", "uid": "job-uid"}, "status": {"phase": "Suspended"}}
    )
    applied = await bench.apply(status={"phase": "Running"}, create=(pod("x-env-0"),))
    assert applied.stale and applied.again_after == 0.0
    assert "create" not in bench.verbs
    assert bench.cache.job(KEY)["status"] == {"phase": "Suspended"}, "the newer job is read for the next look"


async def test_a_job_that_is_gone_leaves_the_cache(bench):
    del bench.cluster.objects["RLJob", "ns", "x"]
    applied = await bench.apply(status={"phase": "Running"}, create=(pod("x-env-0"),))
    assert applied.stale
    assert bench.cache.job(KEY) is None
    assert "create" not in bench.verbs


async def test_a_job_made_anew_under_the_name_does_not_take_the_old_ones_status(bench):
    bench.cluster.put(kinds.RLJOB, "ns", {"metadata": {"name": "x", "uid": "another"}, "status": {}})
    assert (await bench.apply(status={"phase": "Running"})).stale
    assert bench.cluster.objects["RLJob", "ns", "x"]["status"] == {}


async def test_progress_is_written_once_per_interval_and_a_change_of_state_at_once(bench):
    await bench.apply(status={"phase": "Running", "step": 1}, progress_only=True)
    bench.now[0] += 4
    applied = await bench.apply(status={"phase": "Running", "step": 2}, progress_only=True)
    assert applied.again_after == 6.0
    assert bench.cluster.objects["RLJob", "ns", "x"]["status"]["step"] == 1
    await bench.apply(status={"phase": "Failed", "step": 2})
    assert bench.cluster.objects["RLJob", "ns", "x"]["status"] == {"phase": "Failed", "step": 2}
    bench.now[0] += 6
    await bench.apply(status={"phase": "Failed", "step": 3}, progress_only=True)
    assert bench.cluster.objects["RLJob", "ns", "x"]["status"]["step"] == 3


async def test_what_is_made_is_seen_by_the_next_look_without_an_event(bench):
    applied = await bench.apply(create=(pod("x-env-0"), pod("x-env-1")), ensure=(service(),))
    assert [p["metadata"]["name"] for p in bench.cache.children(kinds.POD, KEY)] == ["x-env-0", "x-env-1"]
    assert len(bench.cache.children(kinds.SERVICE, KEY)) == 1
    assert applied.again_after == 0.0


async def test_what_is_deleted_is_gone_for_the_next_look(bench):
    old = bench.cluster.put(kinds.POD, "ns", pod("x-env-0"))
    bench.cache.put(kinds.POD, old)
    await bench.apply(delete=(Deletion(kind="Pod", name="x-env-0", uid=old["metadata"]["uid"]),))
    assert bench.cache.children(kinds.POD, KEY) == []


@pytest.mark.parametrize("why", [NotFound("gone"), Conflict("another uid")], ids=["gone", "successor"])
async def test_deleting_what_is_gone_is_success(bench, why):
    old = bench.cluster.put(kinds.POD, "ns", pod("x-env-0"))
    bench.cache.put(kinds.POD, old)
    bench.cluster.fail("delete", "x-env-0", why)
    await bench.apply(delete=(Deletion(kind="Pod", name="x-env-0", uid=old["metadata"]["uid"]),))
    assert bench.cache.children(kinds.POD, KEY) == []


async def test_a_pod_of_ours_under_the_name_is_adopted(bench):
    bench.cluster.put(kinds.POD, "ns", pod("x-env-0"))
    applied = await bench.apply(create=(pod("x-env-0"),))
    assert bench.cache.entry(kinds.POD, KEY, "x-env-0") is not None
    assert not bench.memory.name_conflicts and applied.again_after == 0.0


async def test_a_pod_of_an_earlier_job_is_waited_for(bench):
    bench.cluster.put(kinds.POD, "ns", pod("x-env-0", uid="old-job"))
    applied = await bench.apply(create=(pod("x-env-0"),))
    assert bench.cache.entry(kinds.POD, KEY, "x-env-0") is not None, "observed, so that reconcile can say so"
    assert not bench.memory.name_conflicts and applied.again_after == EARLIER_JOB_PAUSE


@pytest.mark.parametrize("kind", [kinds.POD, kinds.SERVICE], ids=["pod", "service"])
async def test_someone_elses_object_is_left_alone_and_told(bench, kind):
    theirs = bench.cluster.put(kind, "ns", {"metadata": {"name": "x", "labels": {"app": "theirs"}}})
    wanted = {"create": (pod("x"),)} if kind == kinds.POD else {"ensure": (service(),)}
    applied = await bench.apply(**wanted)
    assert bench.memory.name_conflicts == {f"{kind.kind}/x": kind}
    assert applied.again_after == 0.0
    assert bench.cluster.objects[kind.kind, "ns", "x"] == theirs


async def test_no_pod_is_created_beside_someone_elses_object(bench):
    """A pod would join a gang, or be reached by a service, of theirs."""
    bench.cluster.put(kinds.SERVICE, "ns", {"metadata": {"name": "x"}})
    await bench.apply(ensure=(service(),), create=(pod("x-env-0"),))
    assert bench.memory.name_conflicts and ("Pod", "ns", "x-env-0") not in bench.cluster.objects


async def test_a_service_of_an_earlier_job_is_not_taken_over(bench):
    old = bench.cluster.put(kinds.SERVICE, "ns", service(uid="old-job"))
    applied = await bench.apply(ensure=(service(),))
    assert applied.again_after == EARLIER_JOB_PAUSE
    assert bench.cluster.objects["Service", "ns", "x"] == old


async def test_a_refused_create_is_told_at_once_and_tried_again_ever_later(bench):
    words = 'pods "x-env-0" is forbidden: exceeded quota'
    bench.cluster.fail("create", "x-env-0", *[Forbidden(words)] * 3)
    assert (await bench.apply(create=(pod("x-env-0"),))).again_after == 0.0
    assert {label: refusal.message for label, refusal in bench.memory.refusals.items()} == {"Pod/x-env-0": words}
    pauses = []
    for _ in range(2):
        pause = (await bench.apply(create=(pod("x-env-0"),))).again_after
        bench.now[0] += pause
        pauses.append(pause)
        await bench.apply(create=(pod("x-env-0"),))
    assert pauses == [1.0, 2.0]
    bench.now[0] += 4.0
    await bench.apply(create=(pod("x-env-0"),))
    assert not bench.memory.refusals and bench.cluster.of(kinds.POD) == ["x-env-0"]


def hashed_service(manifest):
    made = service()
    made["metadata"]["annotations"] = {"rljob.dev/manifest-hash": manifest}
    return made


async def test_a_refused_apply_is_paced_and_another_manifest_is_sent_at_once(bench):
    bench.cache.put(kinds.SERVICE, bench.cluster.put(kinds.SERVICE, "ns", hashed_service("1")))
    bench.cluster.fail("apply", "x", *[Invalid("spec: Invalid value: field is immutable")] * 3)
    assert (await bench.apply(ensure=(hashed_service("2"),))).again_after == 0.0, "it is told of at once"
    for _ in range(20):
        assert (await bench.apply(ensure=(hashed_service("2"),))).again_after == 1.0
    assert bench.verbs.count("apply") == 1
    bench.now[0] += 1.0
    assert (await bench.apply(ensure=(hashed_service("2"),))).again_after == 2.0
    assert bench.verbs.count("apply") == 2
    await bench.apply(ensure=(hashed_service("3"),))
    assert bench.verbs.count("apply") == 3


def policy(*ingress):
    meta = {"name": "x-pods", "labels": labels("job-uid"), "annotations": {"rljob.dev/manifest-hash": "1"}}
    spec = {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": list(ingress)}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": meta, "spec": spec}


async def test_no_pod_is_created_before_its_network_policies(bench):
    bench.cluster.fail("apply", "x-pods", Forbidden("exceeded quota: networkpolicies=0"))
    for _ in range(2):  # refused, then not sent before its time
        await bench.apply(ensure=(policy(),), create=(pod("x-env-0"),))
        assert bench.cluster.of(kinds.POD) == [] and "exceeded quota" in str(bench.memory.refusals)
    bench.now[0] += 60
    await bench.apply(ensure=(policy(),), create=(pod("x-env-0"),))
    assert bench.cluster.of(kinds.NETWORK_POLICY) == ["x-pods"] and bench.cluster.of(kinds.POD) == ["x-env-0"]


async def test_no_pod_is_created_under_a_policy_that_was_edited_while_its_apply_is_refused(bench):
    """The edit leaves the annotation with the manifest hash as it was."""
    bench.cache.put(kinds.NETWORK_POLICY, bench.cluster.put(kinds.NETWORK_POLICY, "ns", policy({})))
    bench.cluster.fail("apply", "x-pods", Forbidden("denied by a policy of the cluster"))
    for _ in range(2):  # refused, then not sent before its time
        await bench.apply(ensure=(policy(),), create=(pod("x-env-0"),))
        assert bench.cluster.of(kinds.POD) == [] and "denied by a policy" in str(bench.memory.refusals)
    bench.now[0] += 60
    await bench.apply(ensure=(policy(),), create=(pod("x-env-0"),))
    assert bench.cluster.of(kinds.POD) == ["x-env-0"] and not bench.memory.refusals


async def test_no_pod_is_created_while_an_edited_policy_waits_for_its_next_apply(bench):
    """Another client opens the policy again and again, so that its applies are spread out."""
    for _ in range(5):
        bench.cache.put(kinds.NETWORK_POLICY, bench.cluster.put(kinds.NETWORK_POLICY, "ns", policy({})))
        paused = (await bench.apply(ensure=(policy(),))).again_after
    assert paused and bench.verbs.count("apply") < 5
    await bench.apply(ensure=(policy(),), create=(pod("x-env-0"),))
    assert bench.cluster.of(kinds.POD) == []
    bench.now[0] += paused
    await bench.apply(ensure=(policy(),), create=(pod("x-env-0"),))
    assert bench.cluster.of(kinds.POD) == ["x-env-0"]


async def test_no_pod_is_created_under_a_policy_whose_rules_a_webhook_changes(bench):
    apply = bench.cluster.apply

    async def changed(kind, namespace, name, body):
        return await apply(kind, namespace, name, policy({}))

    bench.cluster.apply = changed
    await bench.apply(ensure=(policy(),), create=(pod("x-env-0"),))
    assert bench.cluster.of(kinds.POD) == [] and "stored other rules" in str(bench.memory.refusals)


async def test_a_deletion_that_changes_nothing_is_tried_ever_later(bench):
    held = bench.cluster.put(kinds.POD, "ns", pod("x-env-0", deletionTimestamp="t", finalizers=["their/own"]))
    bench.cache.put(kinds.POD, held)

    async def delete(kind, namespace, name, *, uid, grace_seconds=None):
        bench.cluster.calls.append(("delete", kind.kind, name))
        return held

    bench.cluster.delete = delete
    forced = Deletion(kind="Pod", name="x-env-0", uid=held["metadata"]["uid"], grace_seconds=0)
    pauses = []
    for _ in range(4):
        pauses.append((await bench.apply(delete=(forced,))).again_after)
        assert (await bench.apply(delete=(forced,))).again_after == pauses[-1], "not sent before its time"
        bench.now[0] += pauses[-1]
    assert pauses == [1.0, 2.0, 4.0, 8.0] and bench.verbs.count("delete") == 4


async def test_a_refused_secret_that_is_made_later_is_refused_no_more(bench):
    bench.cluster.fail("create", "x-keys-1", Forbidden("exceeded quota"))
    await bench.apply(ensure_secret=True, create=(pod("x-env-0"),))
    assert bench.memory.refusals
    bench.now[0] += 1.0  # the first back-off
    await bench.apply(ensure_secret=True, create=(pod("x-env-1"),))
    assert not bench.memory.refusals


async def test_a_secret_whose_master_key_is_not_there_is_told_and_not_made(bench):
    def unknown(job):
        raise UnknownKey("no such key")

    bench.secret = unknown
    await bench.apply(ensure_secret=True, create=(pod("x-env-0"),))
    assert "no such key" in str(bench.memory.refusals["Secret/x-keys-job-uid"]) and bench.cluster.of(kinds.SECRET) == []


async def test_one_refused_pod_does_not_hold_up_the_others(bench):
    bench.cluster.fail("create", "x-env-0", Forbidden("quota"))
    await bench.apply(create=(pod("x-env-0"), pod("x-env-1")))
    assert bench.cluster.of(kinds.POD) == ["x-env-1"]


async def test_a_failure_that_passes_is_raised_after_all_were_tried(bench):
    bench.cluster.fail("create", "x-env-0", Unavailable("no answer"))
    with pytest.raises(Unavailable):
        await bench.apply(create=(pod("x-env-0"), pod("x-env-1")))
    assert bench.cluster.of(kinds.POD) == ["x-env-1"]


async def test_the_secret_is_asserted_before_pods_and_else_only_now_and_then(bench):
    await bench.apply(ensure_secret=True, create=(pod("x-env-0"),))
    await bench.apply(ensure_secret=True)
    assert bench.cluster.calls.count(("create", "Secret", "x-keys-1")) == 1
    del bench.cluster.objects["Secret", "ns", "x-keys-1"]
    bench.now[0] += 601
    await bench.apply(ensure_secret=True)
    assert bench.cluster.of(kinds.SECRET) == ["x-keys-1"]
    await bench.apply(ensure_secret=True, create=(pod("x-env-1"),))
    assert bench.cluster.calls.count(("create", "Secret", "x-keys-1")) == 3, "before pods always"


async def test_pods_are_made_in_parallel_within_the_jobs_limit(bench):
    held, most = [], []
    create = bench.cluster.create

    async def slow(kind, namespace, body):
        held.append(body)
        most.append(len(held))
        await asyncio.sleep(0)
        held.remove(body)
        return await create(kind, namespace, body)

    bench.cluster.create = slow
    await bench.apply(create=tuple(pod(f"x-env-{index}") for index in range(12)))
    assert max(most) == 4
    assert len(bench.cluster.of(kinds.POD)) == 12


async def test_events_of_a_written_status_are_not_lost_with_a_create_that_fails(bench):
    event = JobEvent(type="Warning", reason="PodFailed", message="exit code 1")
    bench.cluster.fail("create", "x-env-0", Unavailable("no answer"))
    with pytest.raises(Unavailable):
        await bench.apply(status={"phase": "Restarting"}, create=(pod("x-env-0"),), events=(event,))
    assert bench.recorder.events == [event]


async def test_events_of_a_status_that_was_not_written_are_not_told(bench):
    bench.cluster.put(kinds.RLJOB, "ns", {"metadata": {"name": "x", "uid": "job-uid"}, "status": {"phase": "Failed"}})
    await bench.apply(status={"phase": "Running"}, events=(JobEvent(type="Normal", reason="Started", message=""),))
    assert bench.recorder.events == []


def test_a_changed_spec_that_the_runner_refuses_is_recorded_once():
    memory = JobMemory("job-uid")
    call = ControlCall(method="PUT /control", body={"generation": 3, "spec": {}}, ip="10.0.0.1", epoch=1)
    assert memory.record_answer(call, "HTTP 400: steps must be above 7")
    assert memory.refused_change == (3, "HTTP 400: steps must be above 7")
    assert not memory.record_answer(call, "HTTP 400: in other words")
    assert memory.refused_change == (3, "HTTP 400: steps must be above 7")
    assert memory.record_answer(call, "") and memory.refused_change is None


async def test_calls_and_events_are_passed_on(bench):
    call = ControlCall(method="POST /drain", body={"pods": ["x-rollout-1"]}, ip="10.0.0.1", epoch=1)
    event = JobEvent(type="Normal", reason="Scaled", message="down")
    applied = await bench.apply(calls=(call,), events=(event,), requeue_after=7.0)
    assert bench.calls.sent == [(KEY, "job-uid", (call,))]
    assert bench.recorder.events == [event]
    assert applied.again_after == 7.0


async def test_a_status_whose_answer_was_lost_counts_as_written_and_its_events_are_told(bench):
    """The first attempt was carried out, and the second one, with the same resourceVersion, meets its result."""
    wanted, event = {"phase": "Restarting"}, JobEvent(type="Warning", reason="PodFailed", message="exit code 1")
    bench.cluster.put(kinds.RLJOB, "ns", {"metadata": {"name": "x", "uid": "job-uid"}, "status": wanted})
    applied = await bench.apply(status=wanted, events=(event,), create=(pod("x-env-0"),))
    assert not applied.stale and bench.recorder.events == [event]
    assert bench.cluster.of(kinds.POD) == ["x-env-0"]


async def test_an_object_that_another_client_changes_back_is_applied_ever_later(bench):
    """Two operators with other settings serve one namespace."""
    theirs, applies = hashed_service("theirs"), []
    for second in range(120):
        bench.now[0] = 1000.0 + second
        before = bench.verbs.count("apply")
        await bench.apply(ensure=(hashed_service("ours"),))
        if bench.verbs.count("apply") > before:
            applies.append(second)
        bench.cache.put(kinds.SERVICE, bench.cluster.put(kinds.SERVICE, "ns", theirs))
    assert applies[:3] == [0, 1, 2], "an edit or a deletion is mended at once"
    assert applies[3:] == [3, 4, 6, 10, 18, 34, 66]
    bench.now[0] += 1000.0
    applied = await bench.apply(ensure=(hashed_service("another"),))
    assert applied.again_after is None and bench.cluster.objects["Service", "ns", "x"]["metadata"]["annotations"] == {
        "rljob.dev/manifest-hash": "another"
    }, "a new manifest waits for nothing"


async def test_a_webhook_that_fails_is_told_and_its_pod_tried_ever_later(bench):
    text = b'{"message": "Internal error occurred: failed calling webhook \\"v.example\\": 500", "reason": "InternalError"}'
    failures = [error_of(500, text, retry_after=None) for _ in range(100)]
    bench.cluster.fail("create", "x-env-0", *failures)
    for second in range(26):
        bench.now[0] = 1000.0 + second
        await bench.apply(create=(pod("x-env-0"),))
    assert bench.verbs.count("create") <= 6
    assert 'failed calling webhook "v.example"' in bench.memory.refusals["Pod/x-env-0"].message
