"""Messages between a worker and its child arrive whole and unchanged, or not at all."""

import asyncio
import socket
import struct

import pytest

from rl_core.api.errors import FrameError
from rl_core.transports import pipe

MESSAGE = {"rows": [{"metadata": {"grid": ((1, 2), (3, 4)), 5: None}, "text": "x" * 200_000}], "flag": True}


@pytest.fixture
def pair():
    near, far = socket.socketpair()
    yield near, far
    near.close()
    far.close()


def test_a_message_keeps_tuples_and_integer_keys(pair):
    near, far = pair
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    near.sendall(pipe.pack(MESSAGE))
    assert pipe.receive_blocking(far) == MESSAGE


async def test_the_asynchronous_half_reads_the_same_bytes():
    reader = asyncio.StreamReader()
    reader.feed_data(pipe.pack(MESSAGE) + pipe.pack([1, 2]))
    assert await pipe.receive(reader) == MESSAGE
    assert await pipe.receive(reader) == [1, 2]


def test_the_end_of_the_stream_inside_a_message_is_an_end(pair):
    near, far = pair
    near.sendall(pipe.pack([1, 2, 3])[:-1])
    near.close()
    with pytest.raises(EOFError):
        pipe.receive_blocking(far)


@pytest.mark.parametrize("head", [struct.pack("<I", 0), struct.pack("<I", 2**31), struct.pack("<IQ", 1, 2**40)])
async def test_garbage_sizes_are_refused_before_anything_is_allocated(head):
    reader = asyncio.StreamReader()
    reader.feed_data(head)
    with pytest.raises(FrameError):
        await pipe.receive(reader)


def test_what_cannot_travel_is_named_with_its_path():
    with pytest.raises(TypeError, match="set at rows"):
        pipe.pack({"rows": [{"metadata": {"seen": {1}}}]})
