"""Our own lists: what vanished without an event is dropped, and a watch that began anew is followed by a list. Time jumps."""

import asyncio
import copy

import pytest

from rljob_operator import kinds
from rljob_operator.errors import Expired, Forbidden, NotFound, Unavailable
from rljob_operator.manifests import gang
from rljob_operator.runtime.cache import Cache, JobKey
from rljob_operator.runtime.relist import FAILED_PAUSE, QUIET_SECONDS, Relister

KEY = JobKey("ns", "x")


class Bench:
    def __init__(self, cluster, **more):
        self.cluster, self.enqueued = cluster, []
        self.cache = Cache(clock=lambda: asyncio.get_running_loop().time())
        self.relister = Relister(cluster=cluster, cache=self.cache, enqueue=self.enqueued.append, **more)
        cluster.put(kinds.RLJOB, "ns", {"metadata": {"name": "x"}})
        self.pod("x-env-0")

    def pod(self, name):
        self.cluster.put(kinds.POD, "ns", {"metadata": {"name": name, "labels": {"rljob.dev/job": "x"}}})

    def vanish(self, name):
        del self.cluster.objects["Pod", "ns", name]

    @property
    def lists_of_pods(self):
        return self.cluster.calls.count(("list", "Pod", ""))

    def names(self):
        return [obj["metadata"]["name"] for obj in self.cache.children(kinds.POD, KEY)]


def test_the_first_lists_fill_the_cache_and_enqueue(fake_time, cluster):
    async def scenario():
        bench = Bench(cluster)
        await bench.relister.fill()
        assert bench.relister.filled.is_set()
        assert bench.names() == ["x-env-0"] and bench.cache.job(KEY) is not None
        assert set(bench.enqueued) == {KEY}

    fake_time(scenario())


def test_what_vanished_without_an_event_is_dropped_at_the_next_list(fake_time, cluster):
    async def scenario():
        bench = Bench(cluster, interval=300.0)
        await bench.relister.fill()
        running = asyncio.create_task(bench.relister.run())
        await asyncio.sleep(1)
        bench.vanish("x-env-0")
        bench.enqueued.clear()
        await asyncio.sleep(300)
        assert bench.names() == [] and bench.enqueued == [KEY]
        running.cancel()

    fake_time(scenario())


def test_a_watch_that_began_anew_is_followed_by_one_list_when_it_is_quiet(fake_time, cluster):
    async def scenario():
        bench = Bench(cluster, interval=10_000.0)
        await bench.relister.fill()
        running = asyncio.create_task(bench.relister.run())
        await asyncio.sleep(1)
        bench.vanish("x-env-0")
        before = bench.lists_of_pods
        for _ in range(100):
            bench.relister.suspect(kinds.POD)
            await asyncio.sleep(0.01)
        assert bench.lists_of_pods == before
        await asyncio.sleep(QUIET_SECONDS + 0.5)
        assert bench.lists_of_pods == before + 1 and bench.names() == []
        running.cancel()

    fake_time(scenario())


@pytest.mark.parametrize("refusal", [Forbidden("no right"), NotFound("no namespace")], ids=["403", "404"])
def test_a_namespace_that_was_deleted_holds_up_no_other(fake_time, cluster, refusal):
    async def scenario():
        bench = Bench(cluster, namespaces=("gone", "ns"))
        listing = cluster.list

        async def list_but_one(kind, namespace, *, selector=""):
            if namespace == "gone":
                raise refusal
            async for page in listing(kind, namespace, selector=selector):
                yield page

        cluster.list = list_but_one
        await bench.relister.fill()
        assert bench.relister.filled.is_set() and bench.names() == ["x-env-0"] and bench.cache.job(KEY) is not None

    fake_time(scenario())


def test_each_kind_is_listed_once_per_interval(fake_time, cluster):
    async def scenario():
        bench = Bench(cluster, interval=100.0)
        await bench.relister.fill()
        running = asyncio.create_task(bench.relister.run())
        await asyncio.sleep(1005)
        assert 10 <= bench.lists_of_pods - 1 <= 11
        running.cancel()

    fake_time(scenario())


def test_a_list_that_failed_drops_nothing_and_is_repeated_soon(fake_time, cluster):
    async def scenario():
        bench = Bench(cluster, interval=100.0, kinds=[kinds.POD])
        await bench.relister.fill()
        running = asyncio.create_task(bench.relister.run())
        cluster.fail("list", "", Unavailable("no answer"))
        await asyncio.sleep(100)
        assert bench.names() == ["x-env-0"]
        await asyncio.sleep(FAILED_PAUSE + 1)
        assert bench.lists_of_pods == 3
        running.cancel()

    fake_time(scenario())


def test_a_list_whose_snapshot_expired_begins_anew(fake_time, cluster):
    async def scenario():
        bench = Bench(cluster, kinds=[kinds.POD])
        cluster.fail("list", "", Expired("too old"))
        await bench.relister.fill()
        assert bench.names() == ["x-env-0"]

    fake_time(scenario())


def test_kinds_the_cluster_does_not_serve_are_left_out(fake_time, cluster):
    async def scenario():
        bench = Bench(cluster, kinds=[kinds.POD, kinds.CLAIM_TEMPLATE])
        served = cluster.list

        async def partly(kind, namespace, *, selector=""):
            if kind == kinds.CLAIM_TEMPLATE:
                raise NotFound("the server could not find the requested resource")
            async for page in served(kind, namespace, selector=selector):
                yield page

        cluster.list = partly
        await bench.relister.fill()
        assert bench.relister.served == (kinds.POD,)

    fake_time(scenario())


def test_only_the_watched_namespaces_are_listed(fake_time, cluster):
    async def scenario():
        bench = Bench(cluster, namespaces=["ns"], kinds=[kinds.POD])
        cluster.put(kinds.POD, "other", {"metadata": {"name": "y-env-0", "labels": {"rljob.dev/job": "y"}}})
        await bench.relister.fill()
        assert bench.cache.sizes()["pods"] == 1

    fake_time(scenario())


@pytest.mark.parametrize(
    ("refusals", "used"),
    [
        ({}, gang.KINDS[:1]),
        ({0: NotFound}, gang.KINDS[1:2]),
        ({0: Forbidden, 1: NotFound}, gang.KINDS[2:]),
        ({0: NotFound, 1: NotFound, 2: NotFound}, ()),
        ({0: Forbidden, 1: Forbidden, 2: Forbidden}, ()),
    ],
    ids=["all served", "not served", "forbidden", "none served", "all forbidden"],
)
def test_of_alternatives_the_first_is_used_that_is_served_and_may_be_listed(fake_time, cluster, refusals, used):
    async def scenario():
        bench = Bench(cluster, kinds=[kinds.POD], alternatives=gang.KINDS)
        listed = cluster.list

        async def partly(kind, namespace, *, selector=""):
            if kind in gang.KINDS and (refusal := refusals.get(gang.KINDS.index(kind))) is not None:
                raise refusal("no")
            async for page in listed(kind, namespace, selector=selector):
                yield page

        cluster.list = partly
        await bench.relister.fill()
        assert bench.relister.served == (kinds.POD, *used)

    fake_time(scenario())


def test_a_kind_it_needs_may_not(fake_time, cluster):
    async def scenario():
        bench = Bench(cluster, kinds=[kinds.POD])
        cluster.fail("list", "", Forbidden("cannot list"))
        with pytest.raises(Forbidden):
            await bench.relister.fill()
        assert not bench.relister.filled.is_set()

    fake_time(scenario())


def test_versions_that_a_restore_of_etcd_set_back_are_seen_at_the_next_list(fake_time, cluster):
    """The watch begins anew after a restore, and the list that follows it has lower versions and a pod that was deleted since the backup."""

    async def scenario():
        bench = Bench(cluster, interval=10_000.0)
        backup = copy.deepcopy(cluster.objects)
        bench.pod("x-env-1")
        cluster.put(
            kinds.POD, "ns", {"metadata": {**backup["Pod", "ns", "x-env-0"]["metadata"]}, "status": {"phase": "Failed"}}
        )
        await bench.relister.fill()
        await asyncio.sleep(1)
        bench.cache.drop(kinds.POD, cluster.objects["Pod", "ns", "x-env-0"])
        running = asyncio.create_task(bench.relister.run())
        await asyncio.sleep(1)
        cluster.objects = backup
        bench.relister.suspect(kinds.POD)
        bench.relister.suspect(kinds.RLJOB)
        await asyncio.sleep(QUIET_SECONDS + 1)
        assert bench.names() == ["x-env-0"]
        found = bench.cache.entry(kinds.POD, KEY, "x-env-0")
        assert found.version == int(backup["Pod", "ns", "x-env-0"]["metadata"]["resourceVersion"])
        running.cancel()

    fake_time(scenario())
