"""Buckets divide the tensors, in order, into groups of whole tensors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.weights.bucket import ALIGNMENT, Layout, bucket_plan
from rl_core.weights.manifest import WeightEntry


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
