"""`weights.fanout` between real processes: receivers of other hosts give the version to each other, each proves it by itself."""

import os
import signal

import pytest

from tests.integration.weight_world import Receiver, about, model, publisher, serves, source_of, started, tensors


@pytest.fixture(scope="module")
def four():
    """Four receivers, two of which write in place and two whose engines copy."""
    with started(*(Receiver(f"rollout:{i}", in_place=i % 2 == 0, silence=2.0) for i in range(4))) as made:
        yield made


def test_who_has_the_version_passes_it_on_and_all_hold_exactly_its_bits(four):
    with publisher("stream", fanout=1) as source:
        for version in (1, 2, 5):
            weights = tensors(version)
            report = source.publish(version, source_of(weights), about(four), 4)
            assert len(report.acked) == 4 and report.transport == "stream"
            assert 2 <= len(report.relayed) <= 3  # the publisher gives the first, and one more if it has room again
            assert all(serves(receiver, version, weights) for receiver in four)
        loads = four[3].call("probe")["loads"]
        four[3].call("forget")
        assert four[3].call("pull", source.address, elsewhere=True)[0] == 5  # a late joiner, from a peer
        assert serves(four[3], 5, tensors(5)) and four[3].call("probe")["loads"] == loads + 1


def test_a_receiver_that_passes_on_other_bytes_is_found_and_the_publisher_gives_them(four):
    with publisher("stream", fanout=1) as source:
        source.publish(1, model(1), about(four[:1]), 1)
        four[0].call("flip", "d")  # after its proof
        four[1].call("forget")
        assert four[1].call("pull", source.address, elsewhere=True)[0] == 1
        assert serves(four[1], 1, tensors(1))  # first from the peer, then from the publisher


def test_the_children_of_a_receiver_that_dies_go_back_to_the_publisher(four):
    """The last test of the file: it kills one of the four."""
    killed = []
    with publisher("stream", fanout=1) as source:
        stream = source._relays.stream

        async def dies_when_first_asked(peer):
            given = await stream(peer)
            if not killed:
                killed.append(peer.name)
                os.kill(next(one for one in four if one.name == peer.name).process.pid, signal.SIGKILL)
                source.lost(peer.name, "the hub declared it dead")
            return given

        source._relays.stream = dies_when_first_asked
        report = source.publish(1, model(1), about(four), 3)
    living = [receiver for receiver in four if receiver.name not in killed]
    assert sorted(report.acked) == [receiver.name for receiver in living] and list(report.failed) == killed
    assert all(serves(receiver, 1, tensors(1)) for receiver in living)
