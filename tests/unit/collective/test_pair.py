"""The group of a sender and a receiver is kept, is formed again after an abort, and ends at both members."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rl_core.api.errors import InfrastructureError
from rl_core.collective import group
from rl_core.collective.group import TensorGroup
from rl_core.collective.pair import NotFormed, PairGroups


@pytest.fixture
def ends():
    made = [PairGroups(name=name, host="127.0.0.1", epoch=3, backend="gloo") for name in ("a:0", "b:1")]
    yield made
    for end in made:
        end.close()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(2) as pool:
        yield pool


def transfer(end, plan, data):
    group = end.formed(plan) or end.form(plan, data.device, timeout=60)
    group.broadcast(data, timeout=60)


def exchange(ends, threads, plan):
    sender, receiver = ends
    data, found = torch.arange(5, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)
    sending = threads.submit(transfer, sender, plan, data)
    transfer(receiver, plan, found)
    sending.result(60)
    assert torch.equal(data, found)


def test_a_group_is_used_again_until_one_of_its_ends_has_lost_it(ends, threads):
    sender, receiver = ends
    first = sender.plan("b:1", receiver.key_of("a:0"))
    assert first.key == "tensors/a:0/b:1/3/1" and first.members == ("a:0", "b:1")
    exchange(ends, threads, first)
    assert receiver.key_of("a:0") == first.key
    again = sender.plan("b:1", receiver.key_of("a:0"))
    assert again == first
    exchange(ends, threads, again)
    receiver.abort(first, "the receiver has failed")
    assert receiver.key_of("a:0") == ""
    second = sender.plan("b:1", receiver.key_of("a:0"))
    assert second.generation == 2
    exchange(ends, threads, second)
    assert receiver.key_of("a:0") == second.key


def test_an_abort_by_the_sender_ends_the_transfer_of_the_receiver(ends, threads):
    sender, receiver = ends
    plan = sender.plan("b:1", "")
    exchange(ends, threads, plan)
    receiving = threads.submit(transfer, receiver, plan, torch.zeros(5, dtype=torch.uint8))
    sender.abort(plan, "the sender has failed")
    with pytest.raises(InfrastructureError, match="tensors/a:0/b:1/3/1 is over"):
        receiving.result(60)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_abort_by_the_sender_ends_the_formation_at_the_end_that_waits(ends, threads, rank):
    sender, _ = ends
    plan = sender.plan("b:1", "")
    waiting = threads.submit(transfer, ends[rank], plan, torch.zeros(5, dtype=torch.uint8))
    sender.abort(plan, "the other end is gone")
    with pytest.raises(NotFormed, match="given up"):
        waiting.result(60)


def test_a_library_without_nccl_and_a_host_that_is_not_this_one_are_reasons_for_no_group(monkeypatch):
    monkeypatch.setattr(group, "STORE_SECONDS", 1.0)
    data = torch.zeros(5, dtype=torch.uint8)
    sender = PairGroups(name="a:0", host="127.0.0.1", epoch=3, backend="nccl")
    with pytest.raises(NotFormed, match="backend nccl needs an accelerator"):
        transfer(sender, sender.plan("b:1", ""), data)
    sender.close()
    with pytest.raises(NotFormed, match="a:0 cannot start a store at nowhere.invalid"):
        PairGroups(name="a:0", host="nowhere.invalid", epoch=3, backend="gloo").plan("b:1", "")


def test_a_group_that_is_given_up_while_it_forms_does_not_stay(ends, threads, monkeypatch):
    sender, receiver = ends
    plan = sender.plan("b:1", "")
    forming = threads.submit(receiver.form, plan, torch.device("cpu"), timeout=60)
    form = TensorGroup.form

    def abort_first(plan, rank, *, timeout):
        group = form(plan, rank, timeout=timeout)
        monkeypatch.undo()
        sender.abort(plan, "the receiver is gone")
        return group

    while receiver._plans.get(plan.name) != plan:
        time.sleep(0.001)
    monkeypatch.setattr(TensorGroup, "form", abort_first)
    with pytest.raises(NotFormed):
        sender.form(plan, torch.device("cpu"), timeout=60)
    assert sender.formed(plan) is None
    with pytest.raises(InfrastructureError):
        forming.result(60).broadcast(torch.zeros(5, dtype=torch.uint8), timeout=60)
