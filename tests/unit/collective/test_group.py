"""A group forms with everybody or says who is missing; a poisoned one refuses further work."""

import queue
import threading
import time

import pytest
import torch

from rl_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError
from rl_core.collective.group import GroupStore, TensorGroup
from rl_core.messages.weights import GroupPlan


@pytest.fixture(scope="module")
def store():
    return GroupStore("127.0.0.1")


def plan_of(store, generation, *members, backend="gloo"):
    return GroupPlan(
        name="weights", epoch=1, generation=generation, members=members, backend=backend, host=store.host, port=store.port
    )  # fmt: skip


def form_in_threads(plan):
    groups = {}

    def join(rank):
        groups[rank] = TensorGroup.form(plan, rank, timeout=60)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(plan.members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups[rank] for rank in range(len(plan.members))]


def test_members_get_the_roots_tensor_and_an_abort_ends_a_blocked_broadcast(store):
    root, member = form_in_threads(plan_of(store, 2, "p", "a"))
    received = torch.zeros(5)
    receiving = threading.Thread(target=member.broadcast, args=(received,))
    receiving.start()
    root.broadcast(torch.arange(5.0))
    receiving.join()
    assert torch.equal(received, torch.arange(5.0))

    errors = []

    def receive():
        try:
            member.broadcast(torch.zeros(5))
        except InfrastructureError as error:
            errors.append(str(error))

    blocked = threading.Thread(target=receive)
    blocked.start()
    member.abort("rollout:3 is gone")
    blocked.join(60)
    assert errors == ["group weights/1/2 is over: rollout:3 is gone; form a new generation"]
    with pytest.raises(InfrastructureError, match="rollout:3 is gone"):
        member.broadcast(torch.zeros(1))
    root.abort("as well")


class SlowToEnd:
    """Stands in for a process group; `ended_by` gets the name of the thread that drops it last, and so would join its threads."""

    def __init__(self, ended_by, during_broadcast=lambda: None):
        self.ended_by, self.during_broadcast = ended_by, during_broadcast
        self.aborted = threading.Event()

    def broadcast(self, tensors, options):
        self.during_broadcast()
        raise RuntimeError("connection closed")

    def abort(self):
        self.aborted.set()

    def __del__(self):
        self.ended_by.put(threading.current_thread().name)


def lone_group(process_group):
    plan = GroupPlan(name="w", epoch=1, generation=1, members=("p",), backend="gloo", host="h", port=1)
    return TensorGroup(plan, 0, process_group=process_group, store=None, timeout=5)


def test_who_aborts_never_waits_for_the_end_of_the_groups_threads(monkeypatch):
    ended_by = queue.SimpleQueue()

    class Sooner(threading.Thread):
        """Has ended before its starter goes on."""

        def start(self):
            super().start()
            self.join()

    group = lone_group(SlowToEnd(ended_by))
    monkeypatch.setattr("rl_core.collective.group.threading.Thread", Sooner)
    group.abort("lost")
    assert ended_by.get(timeout=60) == "rljob-group-end"


def test_nor_does_a_broadcast_that_is_aborted_while_it_begins():
    ended_by = queue.SimpleQueue()

    def lose():
        (fake,) = made
        made.clear()
        group.abort("lost")
        assert fake.aborted.wait(60)

    made = [SlowToEnd(ended_by, lose)]
    group = lone_group(made[0])
    with pytest.raises(InfrastructureError, match="is over: lost"):
        group.broadcast(torch.zeros(1))
    assert ended_by.get(timeout=60) == "rljob-group-end"


def test_who_closes_a_group_ends_the_broadcast_that_runs_in_it(store):
    _, member = form_in_threads(plan_of(store, 20, "p", "a"))
    errors = queue.SimpleQueue()

    def receive():
        try:
            member.broadcast(torch.zeros(3), timeout=600)
        except InfrastructureError as error:
            errors.put(str(error))

    threading.Thread(target=receive, daemon=True).start()
    while not member._in_use:
        time.sleep(0.001)
    member.close()
    assert "is over: closed" in errors.get(timeout=60)


def test_other_members_learn_of_an_abort_at_once_though_its_error_is_kept(store, monkeypatch):
    """The frames of its traceback must not hold the connections: gloo closes them when nobody refers to them any more."""
    root, member = form_in_threads(plan_of(store, 21, "p", "a"))
    begun, errors, wait = threading.Event(), queue.SimpleQueue(), member._wait

    def wait_until_aborted(work, device, timeout):
        begun.set()
        wait(work, device, timeout)

    monkeypatch.setattr(member, "_wait", wait_until_aborted)

    def receive():
        try:
            member.broadcast(torch.zeros(1 << 22), timeout=600)
        except InfrastructureError as error:
            errors.put(error)

    threading.Thread(target=receive, daemon=True).start()
    assert begun.wait(60)
    member.abort("it cannot load")
    kept = errors.get(timeout=60)
    with pytest.raises(InfrastructureError, match="form a new generation"):
        for _ in range(3):  # the first one ends the receive that was begun
            root.broadcast(torch.zeros(1 << 22), timeout=60)
    assert "it cannot load" in str(kept)


def test_a_device_that_is_not_done_in_time_is_not_waited_for():
    group, looks = lone_group(SlowToEnd(queue.SimpleQueue())), iter([False, False, True])
    group._poll(lambda: next(looks), 60)
    with pytest.raises(DeadlineExceeded, match="broadcast in group w/1/1 was not received by all members within 0 s"):
        group._poll(lambda: False, 0.0)
    group.abort("lost")
    group._poll(lambda: False, 60)  # abort ends its kernels


def test_a_formation_that_misses_its_deadline_names_who_did_not_come(store):
    with pytest.raises(DeadlineExceeded, match="group weights/1/3 waits for rollout:0, rollout:1$"):
        TensorGroup.form(plan_of(store, 3, "p", "rollout:0", "rollout:1"), 0, timeout=0.3)


def test_a_released_formation_ends_at_once_for_who_waits_and_who_comes_late(store):
    plan = plan_of(store, 4, "p", "a", "b")
    errors = []

    def join(rank):
        try:
            TensorGroup.form(plan, rank, timeout=60)
        except InfrastructureError as error:
            errors.append(str(error))

    early = threading.Thread(target=join, args=(1,))
    early.start()
    store.release(plan)
    early.join(60)
    join(2)
    assert len(errors) == 2 and all("was given up" in error for error in errors)


def test_a_broadcast_that_is_late_ends_the_group(store):
    _, member = form_in_threads(plan_of(store, 7, "p", "a"))
    with pytest.raises((DeadlineExceeded, InfrastructureError)):  # gloo or this class, whichever looks first
        member.broadcast(torch.zeros(5), timeout=0.1)
    assert member.poisoned


@pytest.mark.parametrize("lost", [False, True], ids=["released", "its store is gone"])
def test_who_waits_in_a_broadcast_sees_that_the_group_is_over(lost):
    own = GroupStore("127.0.0.1")
    plan = plan_of(own, 1, "p", "a")
    _, member = form_in_threads(plan)
    errors = []

    def receive():
        try:
            member.broadcast(torch.zeros(5))
        except InfrastructureError as error:
            errors.append(str(error))

    blocked = threading.Thread(target=receive)
    blocked.start()
    if lost:
        del own._store  # ends the server, as the end of its process does
    else:
        own.release(plan)
    blocked.join(60)
    assert len(errors) == 1 and ("p, who holds its store, is lost" if lost else "p ended it") in errors[0]


def test_nccl_without_an_accelerator_and_unknown_backends_are_refused(store):
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="nccl needs an accelerator"):
            TensorGroup.form(plan_of(store, 5, "p", backend="nccl"), 0, timeout=1)
    with pytest.raises(ConfigError, match="backend must be gloo or nccl, got 'mpi'"):
        TensorGroup.form(plan_of(store, 6, "p", backend="mpi"), 0, timeout=5)
