"""Patches between real processes: whoever serves serves exactly the published bits, and what cannot take a patch gets all of it.

The receivers are those of `test_weight_sync`: one is patched in place, one keeps the bytes that its engine copies.
"""

import random

import pytest
import torch

from tests.integration.weight_world import Receiver, about, model, publisher, serves, source_of, started, tensors


@pytest.fixture(params=["shared", "stream"])
def patching(request):
    """A publisher of patches, and what carries them."""
    with publisher(request.param, syncer="patch", verifyEvery=3) as source:
        yield source, request.param


def stepped(weights, version):
    """Return `weights` after a small step: few elements of "a" differ, "b" in its sign of zero, the rest in nothing."""
    moved = {name: tensor.clone() for name, tensor in weights.items()}
    moved["a"][version % 500, ::100] += 1.0
    moved["b"] = torch.tensor([0.0, -0.0, float("nan")]).roll(version)
    return moved


def test_patches_leave_every_receiver_with_exactly_the_published_bits(receivers, patching):
    source, way = patching
    weights = tensors(1)
    assert source.publish(1, source_of(weights), about(receivers), 2).patched == ()
    for version in (2, 3, 4, 9):  # in three each tensor has its turn to be read whole
        weights = stepped(weights, version)
        report = source.publish(version, source_of(weights), about(receivers), 2)
        assert report.patched == ("rollout:0", "rollout:1")
        assert report.transport == {"shared": "shared", "stream": "message"}[way]  # so small that the offer carries it
        assert report.bytes < 200 and report.patch_share == 10 / 649_714
        assert all(serves(receiver, version, weights) for receiver in receivers)
    report = source.publish(10, source_of(weights), about(receivers), 2)
    assert report.bytes == 0 and report.patched == report.acked == ("rollout:0", "rollout:1")
    report = source.publish(
        11, model(11), about(receivers), 2
    )  # all of it changed: whole, and the chain goes on from there
    assert report.patched == () and report.bytes == sum(tensor.nbytes for tensor in weights.values())
    weights = stepped(tensors(11), 12)
    assert len(source.publish(12, source_of(weights), about(receivers), 2).patched) == 2
    assert all(serves(receiver, 12, weights) for receiver in receivers)


@pytest.mark.parametrize(
    ("way", "syncer"),
    [("shared", "bucket"), ("stream", "bucket"), ("gloo", "bucket"), ("shared", "patch"), ("stream", "patch")],
)
def test_after_each_of_50_random_updates_every_receiver_holds_bit_equal_weights(receivers, way, syncer):
    chance = random.Random(f"{way} {syncer}")
    weights, seen = tensors(1), set()
    with publisher(way, syncer=syncer) as source:
        for version in range(50):
            weights = {name: tensor.clone() for name, tensor in weights.items()}
            for name in chance.sample(sorted(weights), chance.randint(0, len(weights))):
                raw = weights[name].view(torch.int32).view(-1)
                count = chance.choice([1, 7, max(1, raw.numel() // 100), raw.numel()])
                raw[torch.randint(raw.numel(), (count,))] ^= 1 << chance.randrange(31)  # NaN too
            report = source.publish(version, source_of(weights), about(receivers), 2)
            seen.add(bool(report.patched))
            assert all(serves(receiver, version, weights) for receiver in receivers)
    assert seen == ({True, False} if syncer == "patch" else {False})


def test_a_receiver_that_missed_a_version_or_joins_late_gets_all_of_it_and_then_patches(receivers, patching):
    source, way = patching
    weights = tensors(1)
    source.publish(1, source_of(weights), about(receivers), 2)
    weights = stepped(weights, 2)
    source.publish(2, source_of(weights), about(receivers[:1]), 1)
    weights = stepped(weights, 3)
    report = source.publish(3, source_of(weights), about(receivers), 2)
    assert report.patched == ("rollout:0",) and report.acked == ("rollout:0", "rollout:1")
    assert report.bytes == sum(tensor.nbytes for tensor in weights.values())
    receivers[1].call("forget")
    assert receivers[1].call("pull", source.address, elsewhere=way == "stream")[0] == 3
    weights = stepped(weights, 4)
    assert len(source.publish(4, source_of(weights), about(receivers), 2).patched) == 2
    assert all(serves(receiver, 4, weights) for receiver in receivers)


def test_a_patch_that_does_not_hold_is_followed_by_the_whole_version_and_nothing_unproven_is_served(
    receivers, patching
):
    source, _ = patching
    weights = tensors(1)
    source.publish(1, source_of(weights), about(receivers), 2)
    receivers[0].call("flip", "a", 2, 0)  # a bit of an element that the patch changes
    weights = stepped(weights, 2)
    report = source.publish(2, source_of(weights), about(receivers), 2)
    assert report.acked == ("rollout:0", "rollout:1") and report.patched == ("rollout:1",)
    assert all(serves(receiver, 2, weights) for receiver in receivers)
    assert receivers[0].call("probe")["states"][-5:] == ["ready", "dirty", "ready", "applied", "serving"]
    receivers[0].call("flip", "d")  # where no patch writes: seen by the one in which "d" has its turn to be read whole
    patched = [
        source.publish(v, source_of(weights := stepped(weights, v)), about(receivers), 2).patched for v in (3, 4, 5)
    ]
    assert patched == [("rollout:0", "rollout:1"), ("rollout:0", "rollout:1"), ("rollout:1",)]
    assert all(serves(receiver, 5, weights) for receiver in receivers)


def test_a_receiver_that_dies_in_a_patch_is_named_and_a_restarted_publisher_begins_a_new_chain(receivers, patching):
    source, way = patching
    doomed = Receiver("rollout:9")
    weights = tensors(1)
    with started(doomed):
        everybody = [*about(receivers), doomed.about]
        source.publish(1, source_of(weights), everybody, 3)
        doomed.call("set_trap", "die")
        weights = stepped(weights, 2)
        report = source.publish(2, source_of(weights), everybody, 2)
    assert report.acked == report.patched == ("rollout:0", "rollout:1") and "WorkerLost" in report.failed["rollout:9"]
    receivers[1].call("set_trap", "fail")
    try:
        weights = stepped(weights, 3)
        report = source.publish(3, source_of(weights), about(receivers), 1)
    finally:
        receivers[1].call("set_trap", "")
    assert report.acked == ("rollout:0",) and "KeyError" in report.failed["rollout:1"]
    with publisher(way, syncer="patch") as restarted:
        assert restarted.publish(1, source_of(weights), about(receivers), 2).patched == ()
        weights = stepped(weights, 2)
        assert len(restarted.publish(2, source_of(weights), about(receivers), 2).patched) == 2
    assert all(serves(receiver, 2, weights) for receiver in receivers)
