"""Messages between workers by group name and rank: order, kinds of payload, broadcasts, and what happens when the other end is gone."""

import itertools

import numpy as np
import pytest

from rl_core import Cluster
from rl_core.api.errors import DeadlineExceeded, Deadlock, InfrastructureError, RemoteError, WorkerLost
from rl_core.plan.placement import NodePlacementStrategy
from rl_core.workers.result import WorkerErrors
from tests.integration.script_workers import Talker

tries = itertools.count()
"""Numbers in the names of groups: a test that is run again cannot use the names of its first run, as the cluster still knows them."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster.local(processes=2, output=tmp_path_factory.mktemp("messages")) as started:
        yield started


@pytest.fixture(scope="module")
def groups(cluster):
    return [Talker.create_group({}).launch(cluster, name=name) for name in ("left", "right")]


def test_messages_of_a_pair_arrive_in_order_whenever_they_are_received(groups):
    left, right = groups
    items = [1, "two", {"three": [3.0]}, None, np.arange(3)]
    left.execute_on(0).send_all(items, "right", 1).wait(timeout=60)
    [found] = right.execute_on(1).recv_all(len(items), "left", 0).wait(timeout=60)
    assert found[:4] == items[:4]
    assert np.array_equal(found[4], items[4])


def test_two_groups_swap_arrays_at_the_same_time(groups):
    left, right = groups
    calls = [left.exchange("right"), right.exchange("left")]
    assert [call.wait(timeout=60) for call in calls] == [[0.0, 2.0**19]] * 2


def test_async_methods_send_and_receive(groups):
    left, right = groups
    call = left.execute_on(0).echo("right", 0)
    assert right.execute_on(0).recv_all(1, "left", 0).wait(timeout=60) == [["ping"]]
    right.execute_on(0).send_all(["pong"], "left", 0).wait(timeout=60)
    assert call.wait(timeout=60) == ["pong"]
    right.execute_on(0).send_all(["there already"], "left", 0).wait(timeout=60)
    assert left.execute_on(0).take_late("right", 0).wait(timeout=60) == ["there already"]


def test_a_broadcast_reaches_every_member_of_the_groups(groups):
    left, right = groups
    value = np.arange(2**17, dtype=np.float64)
    calls = [group.spread(value, ["left", "right"], ("left", 1)) for group in (left, right)]
    assert all(np.array_equal(found, value) for call in calls for found in call.wait(timeout=60))


def test_async_methods_broadcast_and_receive_into_a_buffer(groups):
    left, _ = groups
    assert left.spread_async(np.array([1.0, 2.0]), ["left"], ("left", 0)).wait(timeout=60) == [[2.0, 3.0], [1.0, 2.0]]


def test_what_stops_a_broadcast_is_raised_at_every_member_and_the_next_one_is_complete(groups):
    left, right = groups
    calls = [group.spread_unsendable(["left", "right"], ("left", 1)) for group in (left, right)]
    for call in calls:
        errors = errors_of(call)
        assert len(errors) == 2 and all("TypeError: builtins.object" in str(error) for error in errors), errors
    calls = [group.spread("again", ["left", "right"], ("left", 1)) for group in (left, right)]
    assert [call.wait(timeout=60) for call in calls] == [["again"] * 2] * 2


def test_rows_are_divided_equally_between_groups_of_unequal_size_in_both_directions(cluster, groups):
    left, _ = groups
    three = Talker.create_group({}).launch(cluster, placement_strategy=NodePlacementStrategy([0, 0, 0]), name="three")
    for senders, receivers in ((left, three), (three, left)):
        each = 12 // senders.world_size
        sending = senders.send_part(each, receivers.name)
        found = receivers.recv_part(senders.name).wait(timeout=60)
        sending.wait(timeout=60)
        assert [len(ids) for ids, _ in found] == [12 // receivers.world_size] * receivers.world_size
        assert [row for ids, _ in found for row in ids] == list(range(12))
        assert [text for _, texts in found for text in texts] == [str(row) for row in range(12)]
    with pytest.raises(WorkerErrors, match="must be divisible by both numbers of ranks, got 8 rows, 2 and 3 ranks"):
        left.send_part(4, "three").wait(timeout=60)
    left.execute_on(0).send_part(3, "three").wait(timeout=60)
    left.execute_on(1).send_part(6, "three").wait(timeout=60)
    with pytest.raises(
        RemoteError, match=r"all ranks of left must send the same number of rows to three, got \{0: 3, 1: 6\}"
    ):
        three.execute_on(1).recv_part("left").wait(timeout=60)


@pytest.mark.parametrize("sent", [np.zeros(3, np.float32), np.zeros((2, 2)), {"a": 1}], ids=["shape", "type", "kind"])
def test_a_tensor_of_another_shape_or_type_is_refused_at_the_receiver(groups, sent):
    left, right = groups
    left.execute_on(0).send_all([sent], "right", 0).wait(timeout=60)
    with pytest.raises(
        RemoteError, match=r"message of left:0 must be a tensor of shape \(2, 2\) and type float32, got"
    ):
        right.execute_on(0).recv_into((2, 2), "left", 0).wait(timeout=60)


def test_a_rank_that_the_group_does_not_have_is_refused(groups):
    with pytest.raises(RemoteError, match=r"rank of group right must be in \[0, 2\), got 7"):
        groups[0].execute_on(0).send_all([1], "right", 7).wait(timeout=60)


def test_a_receive_is_bounded_and_names_both_ends_and_takes_nothing_later(groups):
    left, right = groups
    with pytest.raises(DeadlineExceeded, match="left:0 must receive a message of right:0 within 0.3 s"):
        left.execute_on(0).recv_all(1, "right", 0, timeout=0.3).wait(timeout=60)
    right.execute_on(0).send_all(["later"], "left", 0).wait(timeout=60)
    assert left.execute_on(0).recv_all(1, "right", 0).wait(timeout=60) == [["later"]]


def test_a_cycle_of_receives_is_named_at_every_member(groups):
    left, right = groups
    calls = [left.execute_on(0).recv_all(1, "right", 0), right.execute_on(0).recv_all(1, "left", 0)]
    for call in calls:
        with pytest.raises(Deadlock, match="left:0 waits for right:0|right:0 waits for left:0"):
            call.wait(timeout=60)


def test_a_loss_ends_the_receives_of_its_messages_and_the_replacement_gets_later_messages_only(cluster, groups):
    left, right = groups
    left.execute_on(0).send_all(["to the lost worker"], "right", 1).wait(timeout=60)
    waiting = left.recv_all(1, "right", 1)
    with pytest.raises(WorkerLost, match="right:1 is lost"):
        right.execute_on(1).die().wait(timeout=60)
    with pytest.raises(WorkerErrors) as failed:
        waiting.wait(timeout=60)
    assert ["right:1 is gone" in str(error) for error in failed.value.exceptions] == [True, True]
    cluster.wait_ready(["right"], timeout=60)
    waiting = left.execute_on(1).recv_all(1, "right", 1)  # no heartbeat needs to have told of the replacement
    right.execute_on(1).send_all(["again"], "left", 1).wait(timeout=60)
    assert waiting.wait(timeout=60) == [["again"]]
    left.execute_on(0).send_all(["to the replacement"], "right", 1).wait(timeout=60)
    assert right.execute_on(1).recv_all(1, "left", 0).wait(timeout=60) == [["to the replacement"]]


def test_a_sender_that_is_killed_in_a_send_delivers_whole_messages_only_and_is_named(cluster, groups):
    left, right = groups
    waiting = right.execute_on(0).recv_all(3, "left", 1)
    with pytest.raises(WorkerLost, match="left:1 is lost"):
        left.execute_on(1).die_in_send(np.ones(2**23), "right", 0).wait(timeout=60)
    with pytest.raises(WorkerLost, match="left:1 is gone; right:0 waited"):
        waiting.wait(timeout=60)
    cluster.wait_ready(["left"], timeout=60)
    left.execute_on(1).send_all(["again"], "right", 0).wait(timeout=60)
    assert right.execute_on(0).recv_all(1, "left", 1).wait(timeout=60) == [["again"]]


def test_a_message_and_a_broadcast_to_a_group_that_has_ended_are_refused_with_the_name_of_its_rank(cluster, groups):
    left, _ = groups
    name = f"doomed{next(tries)}"
    doomed = Talker.create_group({}).launch(cluster, placement_strategy=NodePlacementStrategy([0]), name=name)
    for life in range(4):
        with pytest.raises(WorkerLost, match=f"{name}:0 is lost: .*137"):
            doomed.die().wait(timeout=60)
        if life < 3:
            cluster.wait_ready([name], timeout=60)
    with pytest.raises(
        InfrastructureError, match=f"the processes of group {name} have ended: {name}-0 ended by signal"
    ):
        cluster.wait_ready([name], timeout=60)
    with pytest.raises(WorkerLost, match=f"{name}:0 is gone; left:0 cannot send to it"):
        left.execute_on(0).send_all([1], name, 0).wait(timeout=60)
    for error in errors_of(left.spread(1, ["left", name], ("left", 0))):
        assert isinstance(error, WorkerLost) and f"{name}:0 is gone; left:0 cannot send to it" in str(error)


def test_a_send_to_a_misspelt_group_names_those_that_there_are_and_one_that_still_starts_is_waited_for(cluster, groups):
    left, _ = groups
    one = left.execute_on(0)
    for tensor in (False, True):
        with pytest.raises(
            RemoteError, match="group rihgt must have members that left:0 sees, .* of .*left, right.*; launch"
        ):
            one.send_to("rihgt", tensor, 0.5).wait(timeout=60)
    sending = one.send_to("late", False, 60)
    place = NodePlacementStrategy([0])
    late = Talker.create_group({}).launch(cluster, placement_strategy=place, name="late")
    sending.wait(timeout=60)
    assert late.recv_all(1, "left", 0).wait(timeout=60) == [["sent"]]


def errors_of(call):
    with pytest.raises(WorkerErrors) as failed:
        call.wait(timeout=60)
    return failed.value.exceptions
