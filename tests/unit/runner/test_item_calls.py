"""Items over the members of an elastic group: each item once to its end, again where a member is lost, and never without a bound."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from rl_core.api.errors import DataError, DeadlineExceeded, WorkerLost
from rl_core.messages.calls import MethodResult
from rl_core.messages.members import MemberState
from rl_core.runner.item_calls import MOST_LOSSES, call_each
from rl_core.runner.stopping import Stopped


class Cluster:
    """Members whose calls end at once as `answer(member, item)` says: by a value, or by an exception that it returns."""

    def __init__(self, answer, *states):
        self.answer, self.asked, self.futures, self.looks = answer, [], [], 0
        self.there = [SimpleNamespace(name=f"judge:{rank}", state=state) for rank, state in enumerate(states)]
        self.hub = SimpleNamespace(revision=0, wait_changed=self.look)

    def look(self, version, seconds):
        self.looks += 1

    def members(self, group):
        return [member for member in self.there if group == "judge"]

    def submit(self, name, method, args, kwargs, *, timeout):
        (item,) = args
        self.asked.append((name, item))
        self.futures.append(Future())
        found = self.answer(name, item)
        if isinstance(found, Exception):
            self.futures[-1].set_exception(found)
        elif found is not None:
            self.futures[-1].set_result(MethodResult(value=found, durations={}))
        return SimpleNamespace(future=self.futures[-1])


def each(cluster, items, *, shortage=60.0, at=lambda: None):
    return call_each(cluster, "judge", "score", items, seconds=5.0, shortage=shortage, at=at)


def test_results_are_in_the_order_of_the_items_and_each_member_has_one_at_a_time():
    cluster = Cluster(lambda name, item: item * 10, MemberState.READY, MemberState.SERVING)
    assert each(cluster, [1, 2, 3, 4, 5]) == [10, 20, 30, 40, 50]
    assert {name for name, _ in cluster.asked[:2]} == {"judge:0", "judge:1"} and len(cluster.asked) == 5
    assert each(cluster, []) == []


def test_members_that_leave_are_silent_or_have_no_worker_get_no_item():
    states = (MemberState.JOINING, MemberState.DRAINING, MemberState.SUSPECT, MemberState.READY)
    cluster = Cluster(lambda name, item: item, *states)
    assert each(cluster, [1, 2]) == [1, 2] and {name for name, _ in cluster.asked} == {"judge:3"}


def test_the_item_of_a_lost_member_goes_to_another():
    cluster = Cluster(None, MemberState.READY, MemberState.READY)

    def answer(name, item):
        if name == "judge:0":
            cluster.there = [member for member in cluster.there if member.name != name]
            return WorkerLost(f"{name} is gone")
        return item

    cluster.answer = answer
    assert each(cluster, ["a", "b"]) == ["a", "b"]
    assert sorted(cluster.asked) == [("judge:0", "a"), ("judge:1", "a"), ("judge:1", "b")]


def test_an_item_that_ends_every_member_ends_the_calls_by_name():
    cluster = Cluster(lambda name, item: WorkerLost(f"{name} is gone"), MemberState.READY)
    with pytest.raises(
        WorkerLost, match=f"judge.score was lost with {MOST_LOSSES} members for item 0, the last: judge:0"
    ):
        each(cluster, ["poison"])
    assert len(cluster.asked) == MOST_LOSSES


def test_what_the_method_raises_ends_the_calls_and_cancels_the_others():
    cluster = Cluster(lambda name, item: DataError("bad") if item == 1 else None, MemberState.READY, MemberState.READY)
    with pytest.raises(DataError, match="bad"):
        each(cluster, [0, 1])
    assert cluster.futures[0].cancelled()


def test_a_stop_ends_the_wait_and_cancels_the_calls():
    cluster = Cluster(lambda name, item: None, MemberState.READY)
    asked = iter([None, Stopped("asked")])

    def at():
        if (found := next(asked)) is not None:
            raise found

    with pytest.raises(Stopped):
        each(cluster, [1], at=at)
    assert cluster.futures[0].cancelled()


def test_a_group_without_members_is_waited_for_in_a_cluster_and_given_up_on_one_machine():
    cluster = Cluster(lambda name, item: item)
    with pytest.raises(DeadlineExceeded, match="judge.score must find a member within -1 s, got none"):
        each(cluster, [1], shortage=-1.0)
    came = SimpleNamespace(name="judge:0", state=MemberState.READY)
    cluster.hub.wait_changed = lambda version, seconds: cluster.there.append(came)
    assert each(cluster, [1], shortage=None) == [1]
