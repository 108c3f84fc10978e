"""The manifest is the identity of a version: its checksums are exact, additive over slices, equal on every path."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.api.errors import DataError
from rl_core.weights import checksums
from rl_core.weights.manifest import WeightEntry, WeightManifest, checksum, host_bytes
from tests.weight_samples import build_manifest

MASK = 2**64 - 1


def brute_force(data: bytes, offset: int = 0) -> tuple[int, int]:
    padded = data + bytes(-len(data) % 4)
    values = [int.from_bytes(padded[at : at + 4], "little") for at in range(0, len(padded), 4)]
    return sum(values) & MASK, sum((offset + i + 1) * w for i, w in enumerate(values)) & MASK


def test_checksum_equals_the_worked_example_of_the_spec():
    assert checksum(torch.tensor([1.5, -2.0, 0.25])) == (0x13E400000, 0x27B400000)


@given(data=st.binary(max_size=300), offset=st.integers(0, 2**40))
def test_checksum_equals_its_definition_for_any_bytes_and_offset(data, offset):
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    assert checksum(tensor, offset) == brute_force(data, offset)


@given(cuts=st.lists(st.integers(0, 1000), max_size=5))
def test_checksums_of_slices_add_up_to_that_of_the_whole(cuts):
    tensor = torch.arange(1000, dtype=torch.float32).mul(0.37)
    edges = [0, *sorted(cuts), 1000]
    parts = [checksum(tensor[a:b], a) for a, b in itertools.pairwise(edges)]
    total = (0, 0)
    for part in parts:
        total = checksums.add(total, part)
    assert total == checksum(tensor)


@pytest.mark.parametrize(
    "size", [0, 1, 3, 4, 5, checksums.BLOCK * 4 - 1, checksums.BLOCK * 4, checksums.BLOCK * 12 + 6]
)
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
def test_copy_and_sum_in_one_pass_equals_copy_then_sum(size, shift):
    source = np.random.default_rng(size).integers(0, 256, size + shift, dtype=np.uint8)[shift:]
    source.flags.writeable = False
    target = np.full(size + shift, 7, np.uint8)[shift:]
    for copy in (checksums.copy_bytes, checksums.copy_and_read_back):
        target[:] = 7
        assert copy(target, source, offset=5) == checksums.sum_bytes(source, offset=5)
        assert np.array_equal(target, source)
    assert checksums.sum_bytes(source) == (checksum(torch.from_numpy(source.copy())) if size else (0, 0))


def test_the_compiled_kernels_are_loaded_for_a_tensor_of_a_mebibyte():
    assert checksums.has_large_tensor([(3,), (512, 512)]) and not checksums.has_large_tensor([(511, 512), (), (64, 64)])


def test_numpy_fallback_equals_the_compiled_kernels():
    source = np.random.default_rng(0).integers(0, 2**32, checksums.BLOCK * 2 + 17, dtype=np.uint32)
    target = np.zeros_like(source)
    total, *copies = checksums.kernels()
    offset = np.uint64(2**33)
    expected = tuple(int(value) for value in total(source, offset))
    assert checksums._sum_numpy(source, offset) == expected
    for copy in (checksums._copy_numpy, *copies):
        target[:] = 0
        assert tuple(int(value) for value in copy(target, source, offset)) == expected
        assert np.array_equal(target, source)


def test_device_checksum_equals_the_host_checksum(monkeypatch):
    from rl_core.weights import manifest

    monkeypatch.setattr(manifest, "_DEVICE_CHUNK", 100)  # several chunks
    for tensor in (torch.randn(333), torch.randn(301).to(torch.bfloat16), torch.arange(7, dtype=torch.int8)):
        assert manifest._device_checksum(tensor, 11) == checksum(tensor, 11)


def test_checksum_refuses_a_negative_offset():
    with pytest.raises(ValueError, match="offset must be 0 or more"):
        checksum(torch.zeros(1), -1)


def test_checksum_of_a_transposed_tensor_is_that_of_its_logical_bytes():
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert checksum(tensor.T) == checksum(tensor.T.contiguous()) != checksum(tensor)


def test_one_flipped_bit_or_two_swapped_words_change_the_checksum():
    tensor = torch.arange(8, dtype=torch.int32)
    flipped, swapped = tensor.clone(), tensor.clone()
    flipped[3] ^= 1
    swapped[[2, 5]] = tensor[[5, 2]]
    assert len({checksum(tensor), checksum(flipped), checksum(swapped)}) == 3


def test_floating_tensors_are_cast_before_the_checksum_and_integers_never():
    weight, steps, flag = torch.randn(5, 3), torch.arange(4), torch.tensor([True, False])
    manifest = build_manifest({"w": weight, "n": steps, "b": flag}, version=1, epoch=0, dtype="bfloat16")
    assert [entry.dtype for entry in manifest.entries] == ["bfloat16", "int64", "bool"]
    assert manifest.entries[0].checksum == checksum(weight.bfloat16())
    assert manifest.total_bytes == 30 + 32 + 2


def test_tied_tensors_travel_once():
    embedding = torch.randn(10, 4)
    tensors = {"embed": embedding, "norm": torch.ones(4), "head": torch.nn.Parameter(embedding)}
    manifest = build_manifest(tensors, version=1, epoch=0)
    assert [entry.alias_of for entry in manifest.entries] == [None, None, "embed"]
    assert manifest.total_bytes == 160 + 16


def test_digest_proves_version_epoch_names_and_contents():
    weights = {"a": torch.ones(4), "b": torch.zeros(2)}
    base = build_manifest(weights, version=3, epoch=1)
    others = [
        build_manifest(weights, version=4, epoch=1),
        build_manifest(weights, version=3, epoch=2),
        build_manifest({"a": torch.ones(4), "c": torch.zeros(2)}, version=3, epoch=1),
        build_manifest({"a": torch.ones(4), "b": torch.tensor([0.0, -0.0])}, version=3, epoch=1),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 5
    assert build_manifest(weights, version=3, epoch=1).digest == base.digest and len(base.digest) == 32


def test_manifest_travels_unchanged():
    manifest = build_manifest({"a": torch.full((300,), -1.0), "s": torch.tensor(2.0)}, version=3, epoch=1)
    again = WeightManifest.unpack(manifest.packed)
    assert again == manifest and again.digest == manifest.digest


def test_duplicate_names_no_names_and_dangling_aliases_are_refused():
    entry = WeightEntry("a", (1,), "float32", 4, (0, 0))
    with pytest.raises(ValueError, match="unique, got 'a' twice"):
        WeightManifest(version=0, epoch=0, entries=(entry, entry))
    with pytest.raises(ValueError, match="at least one tensor"):
        WeightManifest(version=0, epoch=0, entries=())
    with pytest.raises(ValueError, match="alias of an earlier tensor"):
        WeightManifest(version=0, epoch=0, entries=(WeightEntry("b", (1,), "float32", 4, (0, 0), "a"),))


def test_a_flipped_bit_of_a_manifest_is_a_data_error_or_shows_in_its_digest():
    sample = build_manifest({"a": torch.ones(40, 16), "b": torch.tensor(3)}, version=2, epoch=1)
    for position in range(len(sample.packed) * 8):
        packed = bytearray(sample.packed)
        packed[position // 8] ^= 1 << position % 8
        try:
            manifest = WeightManifest.unpack(bytes(packed))
        except DataError:
            continue
        assert manifest == sample or manifest.digest != sample.digest


@pytest.mark.parametrize("cut", [0, 1, 20, -1])
def test_a_damaged_manifest_is_a_data_error(cut):
    packed = build_manifest({"a": torch.ones(4)}, version=0, epoch=0).packed
    with pytest.raises(DataError, match="malformed"):
        WeightManifest.unpack(packed[:cut])


def test_a_manifest_whose_sizes_disagree_is_refused():
    good = WeightEntry("a", (2,), "float32", 8, (0, 0))
    bad = WeightManifest(version=0, epoch=0, entries=(WeightEntry("a", (2,), "float32", 9, (0, 0)),))
    assert WeightManifest.unpack(WeightManifest(version=0, epoch=0, entries=(good,)).packed).entries == (good,)
    with pytest.raises(DataError, match="must have 8 bytes, got 9"):
        WeightManifest.unpack(bad.packed)


def test_host_bytes_views_contiguous_memory():
    tensor = torch.zeros(4)
    host_bytes(tensor)[0] = 1
    assert tensor.view(torch.uint8)[0] == 1
