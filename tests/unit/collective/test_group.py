"""A group forms with everybody or says who is missing; a poisoned one refuses further work."""

import threading

import pytest
import torch

from rl_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError
from rl_core.collective.group import GroupPlan, GroupStore, TensorGroup


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
        groups[rank] = TensorGroup.form(plan, rank, timeout=20)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(plan.members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups[rank] for rank in range(len(plan.members))]


def test_a_plan_travels_unchanged(store):
    plan = plan_of(store, 1, "p", "a")
    assert GroupPlan.from_wire(plan.to_wire()) == plan


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
    blocked.join(10)
    assert errors == ["group weights/1/2 is over: rollout:3 is gone; form a new generation"]
    with pytest.raises(InfrastructureError, match="rollout:3 is gone"):
        member.broadcast(torch.zeros(1))
    root.abort("as well")


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
    early.join(20)
    join(2)
    assert len(errors) == 2 and all("was given up" in error for error in errors)


def test_nccl_without_an_accelerator_and_unknown_backends_are_refused(store):
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="nccl needs an accelerator"):
            TensorGroup.form(plan_of(store, 5, "p", backend="nccl"), 0, timeout=1)
    with pytest.raises(ConfigError, match="backend must be gloo or nccl, got 'mpi'"):
        TensorGroup.form(plan_of(store, 6, "p", backend="mpi"), 0, timeout=5)
