"""Buckets cut the wire order into runs of whole tensors; a stream is accepted only without gaps, strangers or damage."""

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.api.errors import DataError
from rl_core.weights.bucket import ALIGNMENT, Layout, bucket_plan, decode, encode
from rl_core.weights.manifest import WeightEntry, WeightManifest, build_manifest

MODEL = {
    "embed": torch.randn(40, 16),
    "norm": torch.randn(16).bfloat16(),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "mask": torch.tensor([True, False, True]),
    "mlp": torch.randn(16, 64),
}


def entries_of(sizes):
    return [WeightEntry(f"t{index}", (size,), "uint8", size, (0, 0)) for index, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "bucket_bytes", "plan"),
    [
        ([100, 100, 100], 1024, [[0, 1], [2]]),  # the third would start at 1024
        ([100, 100], 612, [[0, 1]]),  # ends at 612 exactly
        ([100, 100], 611, [[0], [1]]),
        ([10, 5000, 10], 1024, [[0], [1], [2]]),  # a larger one travels alone
        ([512, 512], 1024, [[0, 1]]),
        ([0, 0, 1], 1, [[0, 1, 2]]),
    ],
)
def test_a_bucket_closes_before_the_next_tensor_would_exceed_it(sizes, bucket_bytes, plan):
    assert bucket_plan(entries_of(sizes), bucket_bytes) == plan


@given(sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=40), bucket_bytes=st.integers(1, 8000))
def test_every_tensor_is_in_one_bucket_in_order_aligned_and_without_overlap(sizes, bucket_bytes):
    entries = entries_of(sizes)
    layout = Layout.of(entries, bucket_bytes)
    assert [member for bucket in layout.buckets for member in bucket.entries] == list(range(len(sizes)))
    end = 0
    for bucket in layout.buckets:
        assert bucket.start % ALIGNMENT == 0 and bucket.start >= end
        assert bucket.nbytes <= bucket_bytes or len(bucket.entries) == 1
        for member, offset in zip(bucket.entries, bucket.offsets, strict=True):
            assert layout.starts[member] == bucket.start + offset >= end and offset % ALIGNMENT == 0
            end = bucket.start + offset + sizes[member]
        assert end == bucket.start + bucket.nbytes
    assert layout.nbytes >= end


def test_aliases_are_in_no_bucket():
    entries = [*entries_of([10]), WeightEntry("tied", (10,), "uint8", 10, (0, 0), "t0")]
    assert bucket_plan(entries, 4096) == [[0]]


def test_no_tensors_and_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="at least one tensor"):
        bucket_plan([], 1024)
    with pytest.raises(ValueError, match="bucket_bytes must be positive, got 0"):
        bucket_plan(entries_of([1]), 0)


@pytest.mark.parametrize("bucket_bytes", [1, 2048, 1 << 20])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_what_is_encoded_is_decoded_bit_equal_in_the_wire_type(bucket_bytes, dtype):
    manifest = build_manifest(MODEL, version=2, epoch=1, dtype=dtype)
    arrived = dict(decode([bytes(frame) for frame in encode(manifest, MODEL, bucket_bytes)]))
    assert list(arrived) == list(MODEL)
    for name, tensor in MODEL.items():
        expected = tensor.bfloat16() if dtype and tensor.is_floating_point() else tensor
        assert arrived[name].dtype == expected.dtype and torch.equal(arrived[name], expected)


def test_tied_names_arrive_from_one_transfer():
    weight = torch.randn(4, 4)
    tensors = {"embed": weight, "norm": torch.ones(4), "head": weight}
    manifest = build_manifest(tensors, version=0, epoch=0)
    frames = list(encode(manifest, tensors, 1 << 20))
    arrived = dict(decode(frames))
    assert len(frames[2]) == 512 + 16 and torch.equal(arrived["head"], weight)
    assert arrived["head"].data_ptr() == arrived["embed"].data_ptr()


def small_buckets():
    tensors = {name: torch.full((100,), float(index)) for index, name in enumerate("abc")}
    manifest = build_manifest(tensors, version=2, epoch=1)
    return [bytes(frame) for frame in encode(manifest, tensors, 400)]


def edit_header(frames, at, field, value):
    header = msgpack.unpackb(frames[at])
    header[field] = value
    return [*frames[:at], msgpack.packb(header), *frames[at + 1 :]]


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda f: f[:3] + f[5:], "without gaps: expected index 1, got 2"),
        (lambda f: [*f[:5], *f[3:]], "without gaps: expected index 2, got 1"),
        (lambda f: [*f[:3], *f[5:], *f[3:5]], "without gaps: expected index 1, got 2"),
        (lambda f: f[:5], "ended before header of bucket 2"),
        (lambda f: f[:6], "ended before bucket 2"),
        (lambda f: edit_header(f, 3, 0, 9), "must be of version 2 epoch 1, got 9"),
        (lambda f: edit_header(f, 3, 5, [["x", 0]]), "must hold 'b' next, got 'x'"),
        (lambda f: edit_header(f, 3, 5, [["b", 100]]), "must lie inside"),
        (lambda f: edit_header(f, 5, 5, [["c", 0], ["d", 0]]), "nothing more"),
        (lambda f: edit_header(f, 1, 3, 1), "ended without 2 tensors, first 'b'"),
        (lambda f: [*f[:4], f[4][:-1], *f[5:]], "must have 400 bytes, got 399"),
        (lambda f: [*f[:4], f[4][:-1] + b"\x01", *f[5:]], "'b' must have checksum"),
        (lambda f: [f[0], b"\xc1", *f[2:]], "header of bucket 0 is malformed"),
        (lambda f: [], "ended before the manifest"),
    ],
)
def test_a_damaged_stream_is_a_data_error_that_says_what_is_wrong(damage, rule):
    with pytest.raises(DataError, match=rule):
        list(decode(damage(small_buckets())))


SAMPLE = build_manifest(MODEL, version=2, epoch=1)
STREAM = [bytes(frame) for frame in encode(SAMPLE, MODEL, 2048)]


def damaged(frame, byte, bits):
    frames = [bytearray(one) for one in STREAM]
    frames[frame][byte % len(frames[frame])] ^= bits
    return list(map(bytes, frames))


@given(frame=st.integers(1, len(STREAM) - 1), byte=st.integers(0, 10**6), bits=st.integers(1, 255))
def test_a_damaged_byte_of_a_header_or_a_bucket_is_a_data_error_or_changes_nothing(frame, byte, bits):
    try:
        arrived = dict(decode(damaged(frame, byte, bits)))
    except DataError:
        return
    # padding between tensors, or the same number written in another way
    assert all(torch.equal(arrived[name], tensor) for name, tensor in MODEL.items())


@pytest.mark.parametrize("frame", range(1, len(STREAM), 2))
def test_every_flipped_bit_of_a_header_is_a_data_error(frame):
    for byte in range(len(STREAM[frame])):
        for bit in range(8):
            with pytest.raises(DataError):
                list(decode(damaged(frame, byte, 1 << bit)))


def test_a_flipped_bit_of_the_manifest_is_a_data_error_or_shows_in_its_digest():
    for byte in range(len(STREAM[0])):
        for bit in range(8):
            frames = damaged(0, byte, 1 << bit)
            try:
                manifest = WeightManifest.unpack(frames[0])
                list(decode(frames))
            except DataError:
                continue
            assert manifest == SAMPLE or manifest.digest != SAMPLE.digest  # an offer says which digest it must have


def test_encoding_other_tensors_than_the_manifest_lists_is_refused():
    manifest = build_manifest({"a": torch.ones(2), "b": torch.ones(3)}, version=0, epoch=0)
    with pytest.raises(ValueError, match="without it"):
        list(encode(manifest, {"a": torch.ones(2)}))
    with pytest.raises(ValueError, match="expected 'a', got 'x'"):
        list(encode(manifest, {"x": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"must have shape \[3\], got \[4\]"):
        list(encode(manifest, {"a": torch.ones(2), "b": torch.ones(4)}))
