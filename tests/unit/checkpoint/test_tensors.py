"""Sharded tensors come back whatever the cut, through our reader and through torch's own."""

import errno
import itertools
import json
import random
import resource
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from rl_core.api.errors import DataError
from rl_core.checkpoint.files import file_digest
from rl_core.checkpoint.state import capture_rng, derive_rng, restore_rng
from rl_core.checkpoint.tensors import read_shards, write_shard


def whole_parts(tensors):
    return {name: [(tensor, (0,) * tensor.dim(), tuple(tensor.shape))] for name, tensor in tensors.items()}


def write_cut(folder, whole, cuts):
    """Write `whole` as len(cuts) + 1 ranks would that hold the rows between the cuts."""
    edges = [0, *cuts, len(whole)]
    for rank, (start, stop) in enumerate(itertools.pairwise(edges)):
        write_shard(folder, {"w": [(whole[start:stop], (start, *(0,) * (whole.dim() - 1)))]}, rank=rank)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 4), data=st.data())
def test_any_cut_reads_back_whole(tmp_path_factory, rows, columns, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=3)))
    folder = tmp_path_factory.mktemp("cut")
    whole = torch.randn(rows, columns)
    write_cut(folder, whole, cuts)
    target = torch.zeros(rows, columns)
    read_shards(folder, whole_parts({"w": target}))
    assert torch.equal(target, whole)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 4), data=st.data())
def test_any_box_of_a_tensor_is_read_from_any_cut(tmp_path_factory, rows, columns, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=3)))
    folder = tmp_path_factory.mktemp("cut")
    whole = torch.randn(rows, columns)
    write_cut(folder, whole, cuts)
    top, left = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    target = torch.zeros(data.draw(st.integers(0, rows - top)), data.draw(st.integers(0, columns - left)))
    read_shards(folder, {"w": [(target, (top, left), (rows, columns))]})
    assert torch.equal(target, whole[top : top + target.shape[0], left : left + target.shape[1]])


def test_a_file_that_is_missing_is_told_by_the_elements_that_lack(tmp_path):
    whole = torch.randn(6, 2)
    write_cut(tmp_path, whole, [2, 4])
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(DataError, match="all of tensor w, got 8 of 12 elements"):
        read_shards(tmp_path, whole_parts({"w": torch.zeros(6, 2)}))


def test_torch_distributed_checkpoint_reads_the_files(tmp_path):
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    whole = torch.randn(5, 3)
    write_cut(tmp_path, whole, [2])
    state = {"w": torch.zeros(5, 3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch tells that one process reads
        load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(state["w"], whole)


def test_vectors_and_half_precision_keep_their_bits(tmp_path):
    parts = {"norm": torch.randn(7).bfloat16(), "moment": torch.tensor([float("nan"), -0.0, 1e-45])}
    write_shard(tmp_path, {name: [(tensor, (0,))] for name, tensor in parts.items()}, rank=0)
    targets = {name: torch.zeros_like(tensor) for name, tensor in parts.items()}
    read_shards(tmp_path, whole_parts(targets))
    for name, tensor in parts.items():
        assert torch.equal(targets[name].view(torch.uint8), tensor.view(torch.uint8))


def test_the_files_are_safetensors_of_any_type_whose_digests_are_known(tmp_path):
    held = {
        "scalar": torch.tensor(3, dtype=torch.int64),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).bfloat16(),
        "cut": torch.randn(4, 6)[:, 1:4],
        "weights": torch.randn(700, 600),  # more than is written at a time
    }
    parts = {name: [(tensor, (0,) * tensor.dim())] for name, tensor in held.items()}
    ((name, digest),) = write_shard(tmp_path, parts, rank=0).items()
    assert digest == file_digest(tmp_path / name)
    stored = load_file(tmp_path / name)
    assert stored.keys() == held.keys() and all(torch.equal(stored[name], tensor) for name, tensor in held.items())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"v": torch.zeros(5, 3)}, "tensor v, got none"),
        ({"w": torch.zeros(5, 4)}, r"tensor w .* shape \[5, 4\], got \[5, 3\]"),
        ({"w": torch.zeros(5, 3, dtype=torch.bfloat16)}, r"tensor w .* must be torch\.bfloat16, got torch\.float32"),
    ],
    ids=["missing", "shape", "dtype"],
)
def test_tensors_of_another_model_are_named(tmp_path, target, message):
    write_cut(tmp_path, torch.randn(5, 3), [2])
    with pytest.raises(DataError, match=message):
        read_shards(tmp_path, whole_parts(target))


def test_no_files_and_damaged_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="safetensors"):
        read_shards(tmp_path, whole_parts({"w": torch.zeros(1)}))
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(DataError, match="cannot be read"):
        read_shards(tmp_path, whole_parts({"w": torch.zeros(1)}))


def test_a_rank_without_rows_writes_nothing(tmp_path):
    write_shard(tmp_path, {"w": [(torch.zeros(0, 3), (5, 0))]}, rank=1)
    assert list(tmp_path.iterdir()) == []


def draw():
    return random.random(), float(np.random.normal()), torch.randn(3).tolist()


def test_random_state_survives_a_round_trip_through_json():
    kept = capture_rng()
    try:
        derive_rng(3, 4, 5)
        np.random.normal()  # leaves half a pair in numpy's generator
        state = json.loads(json.dumps(capture_rng()))
        expected = [draw() for _ in range(3)]
        restore_rng(state)
        assert [draw() for _ in range(3)] == expected
    finally:
        restore_rng(kept)


def test_derived_random_state_is_repeatable_and_differs_by_seed_step_and_rank():
    kept = capture_rng()
    try:
        drawn = {}
        for place in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]:
            derive_rng(*place)
            first = draw()
            assert drawn.setdefault(place, first) == first
        assert len({str(value) for value in drawn.values()}) == 4
    finally:
        restore_rng(kept)


def test_a_file_that_finds_no_room_is_told_with_its_number(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(OSError) as caught:
            write_cut(tmp_path, torch.randn(50, 3), [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
