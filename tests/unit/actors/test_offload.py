"""Offloaded bytes are away, and back bit for bit in the same objects."""

import gc
import weakref

import pytest
import torch

from rl_core.weights.offload import Offloader
from rl_core.weights.storage_alias import storage_alias


def test_storages_are_emptied_and_come_back_in_the_same_objects():
    whole = torch.randn(4, 4)
    view, tied = whole[1:], whole.view(-1)
    other = torch.tensor([float("nan"), -0.0]).bfloat16()
    before, other_bits = whole.clone(), other.view(torch.int16).clone()
    offloader = Offloader()
    offloader.offload([whole, view, tied, other])
    assert offloader.is_offloaded
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    assert offloader.bytes == 64 + 4  # views and tied tensors count once
    offloader.reload()
    assert not offloader.is_offloaded and offloader.bytes == 68
    assert torch.equal(whole, before) and torch.equal(view, before[1:]) and torch.equal(tied, before.view(-1))
    assert torch.equal(other.view(torch.int16), other_bits)


def test_a_second_call_does_nothing():
    tensor = torch.ones(3)
    offloader = Offloader()
    offloader.offload([tensor])
    offloader.offload([tensor])
    offloader.reload("cpu")
    offloader.reload()
    assert tensor.tolist() == [1, 1, 1] and offloader.bytes == 0


def test_storages_do_not_change_their_device():
    offloader = Offloader()
    offloader.offload([torch.ones(3)])
    with pytest.raises(ValueError, match="cpu"):
        offloader.reload("meta")


def test_gradients_flow_after_a_round_trip():
    parameter = torch.nn.Parameter(torch.ones(3))
    offloader = Offloader()
    offloader.offload([parameter])
    offloader.reload()
    (parameter * 2).sum().backward()
    assert parameter.grad.tolist() == [2, 2, 2]


def test_an_alias_with_its_own_storage_shares_memory_and_leaves_the_storage_resizable():
    tensor = torch.arange(6.0).view(2, 3)
    alias = storage_alias(tensor)
    assert alias.numpy()[1, 2] == 5 and alias.data_ptr() == tensor.data_ptr()
    Offloader().offload([tensor])
    assert tensor.untyped_storage().nbytes() == 0
    transposed = torch.zeros(2, 3).t()
    assert storage_alias(transposed) is transposed


def test_an_alias_with_its_own_storage_keeps_its_memory_alive():
    tensor = torch.arange(1000.0)
    watched = weakref.ref(tensor)
    view = storage_alias(tensor)[500:].reshape(-1)
    del tensor
    assert watched() is not None and view[0] == 500
    del view
    gc.collect()
    assert watched() is None
