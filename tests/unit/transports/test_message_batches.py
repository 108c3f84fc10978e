"""Small messages that share a frame come out as they went in, in order; no large one waits for others, and no garbage is believed."""

import msgpack
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from rl_core.api.errors import FrameError
from rl_core.transports.frames import FRAME_BYTES, read_header
from rl_core.transports.message_batches import BATCH, MOST_MESSAGES, SMALL_BYTES, batched, unbatched

HEAD = b"\x01"
heads = st.binary(max_size=20) | st.sampled_from([0, SMALL_BYTES - 1, SMALL_BYTES]).map(bytes)
messages = st.builds(lambda head, others: [HEAD + head, *others], heads, st.lists(st.binary(max_size=9), max_size=2))


def received(message):
    return unbatched([zmq.Frame(part) for part in message])


@given(st.lists(messages | st.just([HEAD]), max_size=200))
def test_messages_come_out_as_they_went_in(sent):
    travelled = list(batched(sent))
    found = [[bytes(part) for part in message] for frames in travelled for message in received(frames)]
    assert found == sent
    small = [len(message) == 1 and len(message[0]) <= SMALL_BYTES for message in sent]
    runs = [len(run) for run in "".join("x" if one else " " for one in small).split()]
    assert len(travelled) == small.count(False) + sum(-(-run // MOST_MESSAGES) for run in runs)
    assert all(len(part) <= FRAME_BYTES for frames in travelled for part in frames)


def test_a_message_alone_travels_as_without_batches():
    assert list(batched([[b"\x01alone"]])) == [[b"\x01alone"]]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgpack.packb(5),
        msgpack.packb(["text"]),
        msgpack.packb([b"one", None]),
        msgpack.packb([b""] * (MOST_MESSAGES + 1)),
        msgpack.packb([bytes(SMALL_BYTES + 1)]),
        msgpack.packb([b"one"]) + b"rest",
        b"\x91" * 5000,
    ],
    ids=["nothing", "no value", "number", "text", "nil", "too many", "too large", "rest", "deep"],
)
def test_what_is_no_batch_is_refused(body):
    (message,) = received([bytes((BATCH,)) + body])
    with pytest.raises(FrameError, match="wire version must be 1, got 2"):
        read_header(message[0])


@pytest.mark.parametrize("frame", [b"", b"\x01\x80", b"garbage"])
def test_another_frame_is_left_to_the_reader_of_messages(frame):
    assert [[bytes(part) for part in message] for message in received([frame, b"x"])] == [[frame, b"x"]]
