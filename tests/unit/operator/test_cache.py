"""The cache: the newest version wins from whatever side, what is gone stays gone, a list drops only what is older than it."""

from hypothesis import given
from hypothesis import strategies as st

from rljob_operator.kinds import POD, RLJOB, SERVICE
from rljob_operator.runtime.cache import Cache, JobKey, trim

KEY = JobKey("ns", "x")


def pod(name="x-actor-0", uid="u1", version=1, **more):
    meta = {
        "name": name,
        "namespace": "ns",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": {"rljob.dev/job": "x"},
    }
    return {"kind": "Pod", "metadata": meta, **more}


def phases(cache):
    return [obj["phase"] for obj in cache.children(POD, KEY)]


@given(order=st.permutations([1, 2, 3, 9, 10, 11]))
def test_the_newest_version_wins_in_any_order(order):
    cache = Cache()
    for version in order:
        cache.put(POD, pod(version=version, phase=str(version)))
    assert phases(cache) == ["11"]


def test_put_names_the_job_only_when_something_changed():
    cache = Cache(projections={POD: lambda obj: obj["phase"]})
    assert cache.put(POD, pod(version=1, phase="Pending")) == KEY
    assert cache.put(POD, pod(version=1, phase="Pending")) is None
    assert cache.put(POD, pod(version=2, phase="Pending")) is None, "a newer version that reads the same"
    assert cache.put(POD, pod(version=3, phase="Running")) == KEY
    assert cache.put(POD, pod(version=2, phase="Pending")) is None
    assert cache.children(POD, KEY) == ["Running"]


def test_an_object_of_nobody_is_left_out():
    cache = Cache()
    stranger = pod()
    stranger["metadata"]["labels"] = {}
    assert cache.put(POD, stranger) is None
    assert cache.sizes()["pods"] == 0


def test_a_late_event_does_not_bring_back_what_is_gone():
    cache = Cache()
    cache.put(POD, pod(version=1))
    assert cache.drop(POD, pod(version=5)) == KEY
    assert cache.put(POD, pod(version=4)) is None
    assert cache.children(POD, KEY) == []
    assert cache.put(POD, pod(uid="u2", version=6)) == KEY, "its successor is another object"


def test_the_end_of_a_forerunner_leaves_its_successor():
    cache = Cache()
    cache.put(POD, pod(uid="u1", version=1))
    cache.put(POD, pod(uid="u2", version=7))
    assert cache.drop(POD, pod(uid="u1", version=6)) is None
    assert cache.entry(POD, KEY, "x-actor-0").uid == "u2"


def test_a_list_drops_what_it_does_not_name():
    now = [0.0]
    cache = Cache(clock=lambda: now[0])
    cache.put(POD, pod("a", "ua", 1))
    cache.put(POD, pod("b", "ub", 2))
    now[0] = 10.0
    assert cache.sweep(POD, alive={"ub"}, began=5.0) == {KEY}
    assert [obj["metadata"]["name"] for obj in cache.children(POD, KEY)] == ["b"]
    assert cache.put(POD, pod("a", "ua", 3)) is None, "it was deleted: no event can bring it back"


def test_a_list_leaves_what_came_in_after_it_began():
    now = [0.0]
    cache = Cache(clock=lambda: now[0])
    cache.put(POD, pod("old", "u-old", 1))
    now[0] = 7.0
    cache.put(POD, pod("young", "u-young", 2))
    assert cache.sweep(POD, alive=set(), began=5.0) == {KEY}
    assert [obj["metadata"]["name"] for obj in cache.children(POD, KEY)] == ["young"]


def test_a_list_of_one_namespace_says_nothing_about_the_others():
    cache = Cache(clock=lambda: 0.0)
    cache.put(POD, pod())
    assert cache.sweep(POD, alive=set(), began=5.0, within=lambda key: key.namespace == "other") == set()
    assert len(cache.children(POD, KEY)) == 1


def test_children_outlive_their_job_until_they_go():
    cache = Cache()
    job = {"metadata": {"name": "x", "namespace": "ns", "uid": "j", "resourceVersion": "1"}}
    cache.put(RLJOB, job)
    cache.put(SERVICE, {"kind": "Service", "metadata": {**pod()["metadata"], "name": "x"}})
    cache.drop(RLJOB, job)
    assert cache.job(KEY) is None
    assert cache.sizes()["services"] == 1
    assert list(cache.jobs()) == []


def test_trimmed_objects_keep_everything_but_bookkeeping():
    obj = pod(spec={"a": 1})
    obj["metadata"] |= {
        "managedFields": [1],
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "mine": "1"},
    }
    trimmed = trim(obj)
    assert trimmed["metadata"]["annotations"] == {"mine": "1"}
    assert "managedFields" not in trimmed["metadata"]
    assert trimmed["spec"] == {"a": 1}
    assert "managedFields" in obj["metadata"], "the original is not touched"


def test_a_job_is_found_by_its_uid_as_long_as_it_is_there():
    cache = Cache()
    for uid, version in (("first", "1"), ("second", "2")):
        cache.put(RLJOB, {"metadata": {"namespace": "ns", "name": "x", "uid": uid, "resourceVersion": version}})
    assert cache.job_of("first") is None and cache.job_of("second")["metadata"]["uid"] == "second"
    cache.drop(RLJOB, cache.job_of("second"))
    assert cache.job_of("second") is None


class Clocked:
    """A cache whose clock a test turns."""

    def __init__(self):
        self.now = 100.0
        self.cache = Cache(clock=lambda: self.now)

    def read(self, obj, *, began):
        self.now += 1.0
        return self.cache.put(POD, obj, read_at=began)


def test_a_read_after_a_restore_of_etcd_counts_though_its_version_is_lower():
    held = Clocked()
    held.cache.put(POD, pod(version=900, phase="Running"))
    held.now += 1.0
    assert held.cache.put(POD, pod(version=400, phase="Pending")) is None, "an event may be late"
    assert held.read(pod(version=400, phase="Pending"), began=held.now) == KEY
    assert phases(held.cache) == ["Pending"]
    assert held.cache.put(POD, pod(version=401, phase="Failed")) == KEY, "and what follows is compared with it"


def test_a_read_that_began_before_a_newer_version_came_does_not_take_it_back():
    held = Clocked()
    began = held.now
    held.now += 1.0
    held.cache.put(POD, pod(version=900, phase="Running"))
    assert held.read(pod(version=899, phase="Pending"), began=began) is None
    assert phases(held.cache) == ["Running"]


def test_an_object_that_a_restore_brings_back_is_seen_again():
    held = Clocked()
    held.cache.put(POD, pod(version=900, phase="Running"))
    began = held.now
    held.cache.drop(POD, pod(version=901))
    assert held.read(pod(version=400, phase="Running"), began=began) is None, "the list may be older than the deletion"
    assert held.read(pod(version=400, phase="Running"), began=held.now) == KEY
    assert held.cache.put(POD, pod(version=401, phase="Failed")) == KEY and phases(held.cache) == ["Failed"]
