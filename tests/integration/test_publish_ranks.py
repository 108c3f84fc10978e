"""A version gathered from several ranks, one collective per bucket: rank 0 gets the bits of `full_tensor`, the others nothing."""

import pytest

from tests.actor_samples import make_model, make_spec
from tests.integration.fsdp_harness import run_ranks, scenario

SHAPES = {
    "a": [5, 3],
    "one": [1, 7],
    "vector": [7],
    "three": [3, 2, 5],
    "large": [40, 33],
    "four": [4, 4],
    "none": [2, 0],
}
"""Cut over 4 ranks: rows 2+2+1+0, 1+0+0+0, 2+2+2+1, 1+1+1+0, 10 each, 1 each; the last has no elements."""
KINDS = [("fsdp1", "float32"), ("fsdp1", "bfloat16"), ("fsdp2", "float32"), ("fsdp2", "bfloat16")]
EVERYTHING = [*SHAPES, "whole.buffer"]


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda ranks: f"{ranks} ranks")
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    model = make_model(folder / "model")
    scenarios = [
        scenario(
            f"{dtype} {size} {publish}",
            make_spec(model),
            [["gather", SHAPES, dtype, size, publish]],
            world_size=request.param,
        )
        for dtype in ("float32", "bfloat16")
        for size, publish in ((64, True), (2048, True), (1 << 20, True), (64, False))
    ]
    verbs = [["publish", 1], ["train", 0], ["publish", 2]]
    for kind, dtype in KINDS:
        spec = make_spec(model, actor__backend=kind, model__dtype=dtype, weights={"bucketBytes": 4096})
        scenarios.append(scenario(f"publish {kind} {dtype}", spec, verbs, world_size=request.param))
    return run_ranks(folder, request.param, scenarios)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [64, 2048, 1 << 20])
def test_rank_0_gets_the_bits_of_every_tensor_however_its_rows_are_cut(ranks, dtype, bucket_bytes):
    first, *others = [seen[f"{dtype} {bucket_bytes} True"] for seen in ranks]
    assert sorted(first["given"]) == sorted(EVERYTHING) and first["differ"] == []
    assert all(seen["given"] == [] for seen in others)


def test_ranks_without_rows_are_among_them(ranks):
    rows = [seen["float32 64 True"]["rows"] for seen in ranks]
    assert sum(one["a"] for one in rows) == 5 and sum(one["one"] for one in rows) == 1
    assert len(ranks) < 4 or rows[3]["a"] == 0


def test_a_publisher_that_stops_in_the_middle_leaves_no_rank_waiting(ranks):
    assert [len(seen["float32 64 False"]["given"]) for seen in ranks] == [1] + [0] * (len(ranks) - 1)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_a_published_model_has_the_bytes_of_the_trained_one(ranks, kind, dtype):
    first, *others = [seen[f"publish {kind} {dtype}"] for seen in ranks]
    assert first["reported"] and first["differ"] == [] and not any(seen["reported"] for seen in others)
