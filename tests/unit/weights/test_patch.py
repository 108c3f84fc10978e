"""Patches: applied to the old state they give the new one bit by bit; what does not fit is refused before anything is written."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.api.errors import DataError
from rl_core.weights import checksums, delta
from tests.weight_samples import apply_patch, make_patch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8)
SHAPES = ((), (1,), (7,), (0, 4), (3, 5), (300, 7))
ODD = {torch.float32: 0x7FC00001, torch.bfloat16: 0x7FC1, torch.float16: 0x7E01}
"""A NaN with a payload: equal to nothing as a number, a value like any other as bits."""


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).clone()


def same(left, right):
    return list(left) == list(right) and all(torch.equal(bits(left[name]), bits(right[name])) for name in left)


def random_bits(shape, dtype, generator):
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@given(
    tensors=st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), min_size=1, max_size=4),
    share=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_a_patch_makes_the_new_state_of_the_old_one_bit_by_bit(tensors, share, seed):
    generator = torch.Generator().manual_seed(seed)
    old = {str(i): random_bits(shape, dtype, generator) for i, (dtype, shape) in enumerate(tensors)}
    new = {}
    for name, tensor in old.items():
        chosen = torch.rand(tensor.shape, generator=generator) < share
        new[name] = torch.where(chosen, random_bits(tensor.shape, tensor.dtype, generator), tensor)
    patch = make_patch(old, new)
    target = {name: tensor.clone() for name, tensor in old.items()}
    apply_patch(target, patch)
    assert same(target, new)
    size = sum(tensor.nbytes for tensor in old.values())
    assert patch.data.size <= size + 8 * len(old)  # a tensor that changed too much goes whole
    if share == 0.0:
        assert patch.tensors == () and patch.data.size == 0


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5])
def test_the_compiled_passes_find_write_and_sum_as_numpy_does(bits, share, monkeypatch):
    random, kind = np.random.default_rng(bits), np.dtype(f"u{bits // 8}")
    size = (checksums.COMPILED_FROM + 100) * 8 // bits + 3  # with a tail that is no whole word
    old = random.integers(0, 2**bits, size, kind)
    new = np.where(random.random(size) < share, old ^ kind.type(1 << (bits - 1)), old)
    new[-1] ^= kind.type(1)
    results = []
    for compiled in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(delta, "_compiled", lambda data, answer=compiled: answer)
            memory, buffers = old.copy(), delta.DeltaBuffers(size, kind)
            found = delta.find(memory, new, buffers, last=-7, offset=5, overwrite=True)
            assert (memory == new).all() and found.checksum == checksums.sum_bytes(new.view(np.uint8), offset=5)
            gaps, values = buffers.gaps[: found.num_changed].copy(), buffers.values[: found.num_changed].copy()
            gaps[:1] -= 7
            gaps = gaps.astype(np.min_scalar_type(gaps.max()))
            assert delta.last_position(gaps) == (size - 1, True)
            assert delta.last_position(np.append(gaps, gaps[:1] * 0)) == (size - 1, False)
            memory = old.copy()
            change = delta.write(memory, gaps, values)
            assert (memory == new).all()
            assert checksums.add(checksums.sum_bytes(old.view(np.uint8)), change) == checksums.sum_bytes(
                new.view(np.uint8)
            )
            results.append((found, gaps.tolist(), values.tolist()))
    assert results[0] == results[1] and found.last == size - 1


@pytest.mark.parametrize("dtype", list(ODD), ids=str)
def test_nan_payloads_and_the_sign_of_zero_travel_and_an_unchanged_nan_does_not(dtype):
    kind = torch.int32 if dtype.itemsize == 4 else torch.int16
    old = {"a": torch.zeros(100, dtype=dtype)}
    old["a"].view(kind)[3] = ODD[dtype]
    new = {"a": old["a"].clone()}
    new["a"][10] = -0.0
    new["a"].view(kind)[11] = ODD[dtype]
    patch = make_patch(old, new)
    assert [change.count for change in patch.tensors] == [2]
    apply_patch(old, patch)
    assert same(old, new)


@pytest.mark.parametrize(("position", "gap_bytes"), [(255, 1), (256, 2), (65_536, 4)])
def test_gaps_take_the_narrowest_type_that_holds_them(position, gap_bytes):
    old = {"a": torch.zeros(70_000)}
    new = {"a": old["a"].clone()}
    new["a"][position] = 1.0
    patch = make_patch(old, new)
    assert patch.tensors[0].gap_bytes == gap_bytes and patch.data.size == 16
    apply_patch(old, patch)
    assert same(old, new)


def test_a_small_change_is_small_on_the_wire_and_a_large_one_no_larger_than_the_tensor():
    generator = torch.Generator().manual_seed(0)
    old = {"a": torch.randn(100_000, generator=generator).bfloat16()}
    sparse = {"a": old["a"].clone()}
    sparse["a"][torch.randperm(100_000, generator=generator)[:1000]] += 1
    assert make_patch(old, sparse).data.nbytes < 1000 * 4 + 16
    assert make_patch(old, {"a": old["a"] + 1}).data.nbytes <= old["a"].nbytes


GOOD = make_patch(
    {"a": torch.zeros(8), "b": torch.zeros(1000)}, {"a": torch.ones(8), "b": torch.eye(1000)[400] + torch.eye(1000)[9]}
)


def with_gaps(*gaps):
    data = GOOD.data.copy()
    start = GOOD.tensors[1].start
    data[start : start + 4] = np.array(gaps, np.uint16).view(np.uint8)
    return GOOD._replace(data=data)


def with_b(**fields):
    return GOOD._replace(tensors=(GOOD.tensors[0], replace(GOOD.tensors[1], **fields)))


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        (with_gaps(9, 991), "'b' must have positions below 1000 in a patch, got 1000"),
        (with_gaps(9, 0), "'b' must have rising positions in a patch, got one twice"),
        (with_b(count=0), "'b' has 1000 elements, a patch cannot change 0 of them"),
        (with_b(count=1001), "'b' has 1000 elements, a patch cannot change 1001 of them"),
        (with_b(gap_bytes=0), "'b' has 1000 elements, a patch cannot change 2 of them"),
        (with_b(count=3), "'b' must lie inside the 48 bytes of its patch"),
        (with_b(start=-8), "'b' must lie inside the 48 bytes of its patch"),
        (with_b(start=33), "'b' must lie inside the 48 bytes of its patch, aligned to 8"),
        (with_b(gap_bytes=3), "'b' must have gaps of 0, 1, 2 or 4 bytes in a patch, got 3"),
        (with_b(name="a"), "patch must change a tensor once, got 'a' twice"),
        (GOOD._replace(data=GOOD.data[:-8]), "'b' must lie inside the 40 bytes of its patch"),
    ],
)  # fmt: skip
def test_a_patch_that_does_not_fit_is_refused_by_name_and_nothing_is_written(patch, words):
    target = {"a": torch.zeros(8), "b": torch.zeros(1000)}
    with pytest.raises(DataError, match=words):
        apply_patch(target, patch)
    assert not target["a"].any() and not target["b"].any()
