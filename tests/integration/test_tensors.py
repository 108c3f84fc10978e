"""Tensors on accelerators between workers, by name: the transports, their order among messages, and what happens when an end fails or is lost.

The CPU takes the place of accelerators: shared memory that of CUDA IPC, gloo that of NCCL.
"""

import pytest

from rl_core import Cluster
from rl_core.api.errors import DeadlineExceeded, Deadlock, RemoteError, WorkerLost
from rl_core.plan.placement import NodePlacementStrategy
from tests.integration.tensor_workers import Courier, samples


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster.local(processes=2, output=tmp_path_factory.mktemp("tensors")) as started:
        yield started


@pytest.fixture(scope="module")
def groups(cluster):
    """Two groups whose members have an accelerator each."""
    return [Courier.create_group("").launch(cluster, name=name).execute_on(0) for name in ("left", "right")]


@pytest.fixture
def _no_messages_left(groups):
    yield
    assert [stored for group in groups for _, stored in group.left_over().wait(timeout=60)] == [[], []]


@pytest.fixture(autouse=True)
def _no_threads_left(groups):
    yield
    assert [threads for group in groups for threads, _ in group.left_over(False).wait(timeout=60)] == [[], []]


def transfer(left, right, names=("left", "right")):
    """Send a tensor from left to right, whose groups have the given names, and return what arrived."""
    sending = left.send_one(7, names[1], 0)
    [found] = right.recv_one(names[0], 0).wait(timeout=120)
    sending.wait(timeout=120)
    return found


def error_of(call):
    with pytest.raises(Exception) as failed:
        call.wait(timeout=120)
    return failed.value


@pytest.mark.usefixtures("_no_messages_left")
def test_tensors_of_every_type_and_layout_keep_their_values_and_their_place_among_messages(groups):
    left, right = groups
    sending = left.send_samples("right", 0)
    assert right.recv_samples("left", 0).wait(timeout=300) == [[]]
    assert sending.wait(timeout=60) == [{"gloo": len(samples()) - 1}]  # one has no elements
    [[key]] = left.group_keys().wait(timeout=60)
    assert key.startswith("tensors/left:0/right:0/")


@pytest.mark.usefixtures("_no_messages_left")
def test_a_receiver_on_the_same_accelerator_copies_from_the_memory_of_the_sender(cluster):
    one, other = [Courier.create_group("gpu").launch(cluster, name=name).execute_on(0) for name in ("one", "other")]
    sending = one.send_samples("other", 0)
    assert other.recv_samples("one", 0).wait(timeout=300) == [[]]
    assert sending.wait(timeout=60) == [{"ipc": len(samples()) - 1}]
    assert one.group_keys().wait(timeout=60) == other.group_keys().wait(timeout=60) == [[]]
    assert [found for group in (one, other) for found in group.left_over().wait(timeout=60)] == [([], [])] * 2


@pytest.mark.usefixtures("_no_messages_left")
def test_a_receiver_in_host_memory_and_a_plain_receive_get_the_tensor_through_host_memory(groups):
    left, right = groups
    [before] = left.sent().wait(timeout=60)
    for receive in (right.recv_array, right.recv_plain):
        sending = left.send_one(3, "right", 0)
        [found] = receive("left", 0).wait(timeout=60)
        assert list(found) == [3.0] * 4
        sending.wait(timeout=60)
    [after] = left.sent().wait(timeout=60)
    assert after["host"] - before.get("host", 0) == 2 and after.get("gloo") == before.get("gloo")


@pytest.mark.usefixtures("_no_messages_left")
def test_a_tensor_of_another_shape_is_refused_at_both_ends_and_the_next_one_arrives(groups):
    left, right = groups
    sending = left.send_one(1, "right", 0, shape=(2, 2))
    text = (
        r"the message of left:0 must be a tensor of shape \(4,\) and type torch.float32, got \(2, 2\) of torch.float32"
    )
    with pytest.raises(RemoteError, match=f"ValueError: {text}"):
        right.recv_one("left", 0).wait(timeout=60)
    with pytest.raises(RemoteError, match=f"ValueError: {text}"):
        sending.wait(timeout=60)
    assert transfer(left, right) == [7.0] * 4


@pytest.mark.usefixtures("_no_messages_left")
def test_sends_that_nobody_waits_for_are_received_in_any_order_of_the_waits(groups):
    left, right = groups
    sending = left.send_many(list(range(5)), "right", 0)
    assert right.recv_backwards(5, "left", 0).wait(timeout=120) == [[0.0, 1.0, 2.0, 3.0, 4.0]]
    sending.wait(timeout=60)


@pytest.mark.usefixtures("_no_messages_left")
def test_async_methods_of_both_ends_swap_tensors(groups):
    left, right = groups
    calls = [left.swap("right", 0), right.swap("left", 0)]
    assert [call.wait(timeout=120) for call in calls] == [[0.0], [0.0]]


@pytest.mark.usefixtures("_no_messages_left")
def test_a_receive_with_async_op_goes_on_while_its_worker_waits_for_a_send(groups):
    left, right = groups
    calls = [left.swap_waiting_for_the_send_first("right", 0), right.swap_waiting_for_the_send_first("left", 0)]
    assert [call.wait(timeout=120) for call in calls] == [[8.0], [8.0]]


@pytest.mark.usefixtures("_no_messages_left")
def test_two_workers_that_wait_for_each_others_receive_are_named_as_a_deadlock(groups):
    left, right = groups
    calls = [left.send_then_recv("right", 0), right.send_then_recv("left", 0)]
    errors = [error_of(call) for call in calls]
    assert all(isinstance(error, Deadlock) and "left:0" in str(error) and "right:0" in str(error) for error in errors)
    # The headers are there still; their receivers learn what has become of the senders.
    for group, sender in ((right, "left"), (left, "right")):
        assert isinstance(error_of(group.recv_one(sender, 0)), Deadlock)
    assert transfer(left, right) == [7.0] * 4


@pytest.mark.usefixtures("_no_messages_left")
def test_a_send_ends_with_its_deadline_and_who_receives_later_learns_why(groups):
    left, right = groups
    with pytest.raises(
        DeadlineExceeded, match="right:0 must receive a tensor of left:0 within 0.5 s, it has not begun to"
    ):
        left.send_one(1, "right", 0, timeout=0.5).wait(timeout=60)
    with pytest.raises(
        DeadlineExceeded, match="right:0 must receive a tensor of left:0 within 0.5 s, it has not begun to"
    ):
        right.recv_one("left", 0).wait(timeout=60)
    assert transfer(left, right) == [7.0] * 4


@pytest.mark.usefixtures("_no_messages_left")
@pytest.mark.parametrize("failing", [0, 1], ids=["sender", "receiver"])
def test_an_error_in_a_transfer_is_raised_at_both_ends_and_the_next_send_forms_a_new_group(groups, failing):
    left, right = groups
    assert transfer(left, right) == [7.0] * 4
    [[before]] = left.group_keys().wait(timeout=60)
    groups[failing].fail_in_transfer("error").wait(timeout=60)
    calls = [left.send_one(1, "right", 0), right.recv_one("left", 0)]
    assert ["the device is broken" in str(error_of(call)) for call in calls] == [True, True]
    assert transfer(left, right) == [7.0] * 4
    [[after]] = left.group_keys().wait(timeout=60)
    assert generation(after) > generation(before)


@pytest.mark.usefixtures("_no_messages_left")
def test_a_transfer_over_a_group_that_has_failed_does_not_write_to_the_tensor(groups):
    left, right = groups
    right.fail_in_transfer("late").wait(timeout=60)
    sending = left.send_one(1, "right", 0)
    assert right.recv_after_error("left", 0).wait(timeout=60) == [[0.0] * 4]
    assert "the device is broken" in str(error_of(sending))
    assert transfer(left, right) == [7.0] * 4


@pytest.mark.parametrize("how", ["killed", "killed in formation"])
@pytest.mark.parametrize("killed", [0, 1], ids=["sender", "receiver"])
def test_the_loss_of_an_end_is_raised_at_the_other_and_its_replacement_is_reached_over_a_new_group(
    cluster, groups, killed, how
):
    left, right = groups
    if how == "killed":
        assert transfer(left, right) == [7.0] * 4
    groups[killed].fail_in_transfer(how).wait(timeout=60)
    size = 2**22  # more than the sockets hold
    calls = [left.send_one(1, "right", 0, shape=(size,)), right.recv_one("left", 0, size=size)]
    errors = [error_of(call) for call in calls]
    name = ("left:0", "right:0")[killed]
    assert isinstance(errors[1 - killed], WorkerLost) and f"{name} is gone" in str(errors[1 - killed]), errors
    cluster.wait_ready(["left", "right"], timeout=120)
    assert transfer(left, right) == [7.0] * 4
    assert len(left.group_keys().wait(timeout=60)[0]) == 1


@pytest.mark.parametrize("how", ["unformed", "stuck"])
@pytest.mark.parametrize("failing", [0, 1], ids=["sender", "receiver"])
def test_a_group_that_cannot_be_formed_is_replaced_by_host_memory(cluster, how, failing):
    names = [f"{how}-{failing}-{end}" for end in range(2)]
    left, right = groups = [Courier.create_group("").launch(cluster, name=name).execute_on(0) for name in names]
    groups[failing].fail_in_transfer(how).wait(timeout=60)
    assert [transfer(left, right, names) for _ in range(2)] == [[7.0] * 4] * 2
    assert left.sent().wait(timeout=60) == [{"host": 2}]


# --- broadcasts ---


RECEIVERS = ["same", "apart", "apart-too", "plain"]


@pytest.fixture(scope="module")
def members(cluster):
    """The source of broadcasts and one receiver on its accelerator, two on others and one in host memory."""
    devices = {"source": "gpu", "same": "gpu", "apart": "gpu 1", "apart-too": "gpu 2", "plain": "gpu 3"}
    return {
        name: Courier.create_group(device).launch(cluster, NodePlacementStrategy([0]), name=name)
        for name, device in devices.items()
    }


@pytest.fixture
def _nothing_left(members):
    yield
    assert [found for group in members.values() for found in group.left_over().wait(timeout=60)] == [([], [])] * 5


def spread(members, value=5, size=4, **sizes):
    """Start a broadcast of the source; `sizes`: number of elements of the tensors of some receivers."""
    sizes = {"plain": 0, **sizes}
    return {
        name: group.spread(value, RECEIVERS, ("source", 0), sizes.get(name, size)) for name, group in members.items()
    }


def assert_all_have_it(calls, value=5):
    found = {name: call.wait(timeout=120)[0] for name, call in calls.items()}
    assert {name: (same, values) for name, (same, values, _) in found.items()} == {
        name: (name != "plain", [float(value)] * 4) for name in calls
    }
    return found["source"][2]


@pytest.mark.usefixtures("_nothing_left")
def test_a_broadcast_takes_the_transport_of_each_receiver_in_one_call(members):
    before, after = (assert_all_have_it(spread(members, value), value) for value in range(2))
    assert {way: after[way] - before[way] for way in after} == {"ipc": 1, "gloo": 2, "host": 1}
    [keys] = members["source"].group_keys().wait(timeout=60)
    assert sorted(key.split("/")[2] for key in keys) == ["apart-too:0", "apart:0"]


@pytest.mark.usefixtures("_nothing_left")
def test_broadcasts_of_several_sources_and_sends_may_overlap_and_be_waited_for_in_any_order(members):
    names = ["source", "same", "apart"]
    calls = {name: members[name].spread_and_swap(names, name == "apart") for name in names}
    for name, call in calls.items():
        assert call.wait(timeout=120) == [
            {other: [[float(number)], [number + 10.0]] for number, other in enumerate(names) if other != name}
        ]


@pytest.mark.usefixtures("_nothing_left")
@pytest.mark.parametrize("wrong", ["same", "apart"])
def test_a_receiver_with_a_tensor_of_another_shape_ends_a_broadcast_at_all_members_with_its_error(members, wrong):
    calls = spread(members, **{wrong: 3})
    text = "the message of source:0 must be a tensor of shape (3,) and type torch.float32, got (4,)"
    assert {name: f"ValueError: {text}" in str(error_of(call)) for name, call in calls.items()} == dict.fromkeys(
        calls, True
    )
    assert_all_have_it(spread(members))


@pytest.mark.usefixtures("_nothing_left")
@pytest.mark.parametrize("failing", ["source", "apart"])
def test_an_error_of_a_member_ends_a_broadcast_at_all_members(members, failing):
    members[failing].fail_in_transfer("error").wait(timeout=60)
    errors = {name: str(error_of(call)) for name, call in spread(members).items()}
    assert all("the device is broken" in error for error in errors.values()), errors
    assert_all_have_it(spread(members))


@pytest.mark.usefixtures("_nothing_left")
def test_a_broadcast_ends_at_all_members_with_the_deadline_of_its_source_and_who_receives_later_learns_why(members):
    calls = {name: group.spread(5, RECEIVERS, ("source", 0), 4, 60 if name != "source" else 0.5)
             for name, group in members.items() if name != "apart"}  # fmt: skip
    errors = [error_of(call) for call in calls.values()] + [
        error_of(members["apart"].spread(5, RECEIVERS, ("source", 0)))
    ]
    text = "apart:0 must receive a tensor of source:0 within 0.5 s, it has not begun to"
    assert all(isinstance(error, DeadlineExceeded) and text in str(error) for error in errors), errors
    assert_all_have_it(spread(members))


@pytest.mark.usefixtures("_nothing_left")
def test_two_sources_that_wait_for_each_others_receive_are_named_as_a_deadlock(members):
    ends = {"source": "same", "same": "source"}
    errors = [error_of(call) for call in [members[end].spread(1, [other], (end, 0)) for end, other in ends.items()]]
    assert all(isinstance(error, Deadlock) and "source:0" in str(error) and "same:0" in str(error) for error in errors)
    for end, other in ends.items():  # the headers are there still
        assert isinstance(error_of(members[end].recv_one(other, 0)), Deadlock)
    assert_all_have_it(spread(members))


@pytest.mark.parametrize("lost", ["source", "apart"])
def test_the_loss_of_a_member_ends_a_broadcast_at_all_others_and_its_replacement_gets_the_next_one(
    cluster, members, lost
):
    members[lost].fail_in_transfer("killed").wait(timeout=60)
    errors = {name: error_of(call) for name, call in spread(members).items() if name != lost}
    assert all(isinstance(error, WorkerLost) and f"{lost}:0 is gone" in str(error) for error in errors.values()), errors
    cluster.wait_ready(list(members), timeout=120)
    assert_all_have_it(spread(members))


def generation(key):
    return int(key.rpartition("/")[2])
