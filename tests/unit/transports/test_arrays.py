"""Messages of arrays by name: what arrives is exactly what was sent, and nothing malformed is taken."""

import msgpack
import numpy as np
import pytest

from rl_core.api.errors import FrameError
from rl_core.transports import arrays
from rl_core.transports.arrays import HEAD, ArrayCodec

SHAPES = [(), (0,), (3,), (2, 0, 4), (2, 3, 4)]
TYPES = ["?", "u1", "<i2", ">i4", "<i8", "<f2", "<f4", ">f8", "<f8"]


def opened(codec, packed):
    size, key_bytes, layout_bytes = HEAD.unpack_from(packed)
    assert size == len(packed) - HEAD.size
    return codec.unpack(bytearray(packed[HEAD.size :]), key_bytes, layout_bytes)


@pytest.mark.parametrize("kind", TYPES)
def test_types_shapes_and_values_arrive_exactly(kind):
    generator, sender, receiver = np.random.default_rng(0), ArrayCodec(), ArrayCodec()
    for _ in range(2):  # a layout that is new, and one that is known
        sent = {f"obs.{shape}": (100 * generator.random(shape)).astype(kind) for shape in SHAPES}
        sent["turned"] = np.arange(12).reshape(3, 4).T.astype(kind)
        key, got = opened(receiver, sender.pack("schlüssel", sent))
        assert key == "schlüssel" and list(got) == list(sent)
        for name, array in sent.items():
            assert got[name].dtype == array.dtype and got[name].shape == array.shape
            assert np.array_equal(got[name], array)
            got[name][...] = 0  # the receiver may write


def test_numbers_that_are_not_finite_keep_their_bits():
    sent = np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324])
    assert opened(ArrayCodec(), ArrayCodec().pack("k", {"x": sent}))[1]["x"].tobytes() == sent.tobytes()


@pytest.mark.parametrize("array", [np.array([{}], object), np.array(["a"]), np.zeros(2, "f4,i4"), np.zeros(1, "M8[s]")])
def test_arrays_without_numbers_are_not_sent(array):
    with pytest.raises(TypeError, match="array x must have numbers"):
        ArrayCodec().pack("k", {"x": array})


def test_a_message_that_is_too_large_is_not_sent(monkeypatch):
    monkeypatch.setattr(arrays, "MAX_BYTES", 100)
    with pytest.raises(FrameError, match="at most 100 bytes"):
        ArrayCodec().pack("k", {"x": np.zeros(100)})


def body(layout, data=b""):
    packed = layout if isinstance(layout, bytes) else msgpack.packb(layout)
    return bytearray(b"k" + packed + data), 1, len(packed)


@pytest.mark.parametrize(
    "layout",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        7,
        {"x": 1},
        [["x", "<f4"]],
        [["x", "|O", [1]]],
        [["x", "<f4,<i4", [1]]],
        [["x", "no type", [1]]],
        [["x", "(1000000,1000000)f8", [1]]],
        [["x", "<f4", [-1]]],
        [["x", "<f4", ["1"]]],
        [["x", "<f4", [2.0]]],
        [["x", "<f4", [True]]],
        [["x", "<f4", 3]],
        [["x", "<f4", [2**62, 2**62]]],
        [["x", "<f4", [3]]],
        [["x", "<f4", [1]]],
        [],
    ],
    ids=str,
)
def test_a_layout_that_is_malformed_or_does_not_fit_its_bytes_is_refused(layout):
    with pytest.raises(FrameError):
        ArrayCodec().unpack(*body(layout, b"\0" * 8))


def test_a_key_that_is_no_text_is_refused():
    with pytest.raises(FrameError):
        ArrayCodec().unpack(bytearray(b"\xff\x90"), 1, 1)


def test_more_layouts_than_are_kept_arrive_too(monkeypatch):
    monkeypatch.setattr(arrays, "MOST_LAYOUTS", 4)
    sender, receiver = ArrayCodec(), ArrayCodec()
    for size in [*range(20), *range(20)]:
        assert opened(receiver, sender.pack("k", {"x": np.arange(size)}))[1]["x"].tolist() == list(range(size))
    assert len(sender._packed) <= 4 and len(receiver._layouts) <= 4
