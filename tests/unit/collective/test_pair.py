"""The group of a sender and a receiver is kept, is formed again after an abort, and ends at both members."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rl_core.api.errors import InfrastructureError
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


def exchange(ends, threads, plan):
    sender, receiver = ends
    data, found = torch.arange(5, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)
    sending = threads.submit(sender.transfer, plan, data, form_timeout=60, timeout=60)
    receiver.transfer(plan, found, form_timeout=60, timeout=60)
    sending.result(60)
    assert torch.equal(data, found)


def test_a_group_is_used_again_until_one_of_its_ends_has_lost_it(ends, threads):
    sender, receiver = ends
    first = sender.plan("b:1", receiver.held("a:0"))
    assert first.key == "tensors/a:0/b:1/3/1" and first.members == ("a:0", "b:1")
    exchange(ends, threads, first)
    assert receiver.held("a:0") == first.key
    again = sender.plan("b:1", receiver.held("a:0"))
    assert again == first
    exchange(ends, threads, again)
    receiver.abort(first, "the receiver has failed")
    assert receiver.held("a:0") == ""
    second = sender.plan("b:1", receiver.held("a:0"))
    assert second.generation == 2
    exchange(ends, threads, second)
    assert receiver.held("a:0") == second.key


def test_an_abort_by_the_sender_ends_the_transfer_of_the_receiver(ends, threads):
    sender, receiver = ends
    plan = sender.plan("b:1", "")
    exchange(ends, threads, plan)
    receiving = threads.submit(receiver.transfer, plan, torch.zeros(5, dtype=torch.uint8), form_timeout=60, timeout=60)
    sender.abort(plan, "the sender has failed")
    with pytest.raises(InfrastructureError, match="tensors/a:0/b:1/3/1 is over"):
        receiving.result(60)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_abort_by_the_sender_ends_the_formation_at_the_end_that_waits(ends, threads, rank):
    sender, _ = ends
    plan = sender.plan("b:1", "")
    waiting = threads.submit(ends[rank].transfer, plan, torch.zeros(5, dtype=torch.uint8), form_timeout=60, timeout=60)
    sender.abort(plan, "the other end is gone")
    with pytest.raises(NotFormed, match="given up"):
        waiting.result(60)
