"""A stream delivers exactly the host copy, to the holder of the ticket only, and nothing that is not authentic."""

import os

import numpy as np
import pytest
import torch
import zmq

from rl_core.api.errors import ConfigError, FrameError, InfrastructureError
from rl_core.weights import stream
from rl_core.weights.host_copy import HostCopies
from rl_core.weights.stream import CHUNK, StreamClient, StreamServer


class FullStore:
    """A segment store without room: copies lie in private memory."""

    def lend(self, size, holder):
        return None


@pytest.fixture
def copy():
    copies = HostCopies(FullStore(), bucket_bytes=1 << 20, dtype=None)
    return copies.write({"a": torch.randn(700_000), "b": torch.randn(3_000_001)}, version=1, epoch=0)


@pytest.fixture
def server():
    made = StreamServer("tcp://127.0.0.1:0", None, encrypt=False)
    yield made
    made.close()


@pytest.fixture
def wake():
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    yield descriptor
    os.close(descriptor)


def fetch(source, wake):
    client = StreamClient(source, None, wake)
    try:
        return list(client.pieces())
    finally:
        client.close()


def test_a_stream_delivers_the_whole_copy_in_order(server, copy, wake):
    source = server.open(copy)
    pieces = fetch(source, wake)
    server.end(source)
    assert [start for start, _ in pieces] == list(range(0, copy.layout.nbytes, CHUNK))
    assert np.array_equal(np.concatenate([data for _, data in pieces]), copy.memory)


def test_streams_of_one_copy_share_the_key_and_hash_each_chunk_once(server, copy, wake, monkeypatch):
    first, second = server.open(copy), server.open(copy)
    assert first["key"] == second["key"] and first["ticket"] != second["ticket"]
    hashed = []
    monkeypatch.setattr(stream, "chunk_tag", lambda key, index, data: hashed.append(index) or bytes(32))
    for source in (first, second):
        assert len(fetch(source, wake)) == -(-copy.layout.nbytes // CHUNK)
    count = -(-copy.layout.nbytes // CHUNK)
    assert sorted(hashed) == sorted([*range(count)] * 3)  # once at the server, once at each receiver


@pytest.mark.parametrize("change", [{"key": bytes(32)}, {"nbytes": 5}], ids=["forged", "resized"])
def test_a_chunk_that_is_not_authentic_is_refused(server, copy, wake, change):
    with pytest.raises(FrameError, match="chunk 0 of .* is not authentic"):
        fetch({**server.open(copy), **change}, wake)


def test_memory_written_during_the_stream_is_refused(server, copy, wake):
    source = server.open(copy)
    client = StreamClient(source, None, wake)
    pieces = client.pieces()
    next(pieces)
    server._streams[source["ticket"]].tags.known.update(dict.fromkeys(range(1, 99), bytes(32)))
    with pytest.raises(FrameError, match="is not authentic"):
        for _ in range(40):
            next(pieces)
    client.close()


def test_a_ticket_serves_one_connection_only(server, copy, wake):
    source = server.open(copy)
    assert fetch(source, wake)
    thief = zmq.Context.instance().socket(zmq.DEALER)
    thief.connect(source["address"])
    for ticket in (source["ticket"], b"x" * 16):
        thief.send_multipart([ticket, (4).to_bytes(4, "little")])
    thief.send_multipart([b"garbage"])
    assert fetch(server.open(copy), wake)  # the server goes on
    assert thief.poll(50) == 0 and server.counters["refused"] == 3
    thief.close(0)


def test_an_interrupt_ends_the_wait(server, copy, wake):
    source = server.open(copy)
    server.end(source)
    os.eventfd_write(wake, 1)
    with pytest.raises(InfrastructureError, match="interrupted at chunk 0"):
        fetch(source, wake)


def test_a_silent_publisher_is_given_up(server, copy, wake, monkeypatch):
    monkeypatch.setattr(stream, "SILENCE_SECONDS", 0.05)
    source = server.open(copy)
    server.end(source)
    with pytest.raises(InfrastructureError, match="sent nothing for 0.05 s at chunk 0"):
        fetch(source, wake)


def test_a_stream_that_leaves_the_machine_needs_keys():
    with pytest.raises(ConfigError, match="without CURVE keys only loopback"):
        StreamServer("tcp://0.0.0.0:0", None, encrypt=False)
