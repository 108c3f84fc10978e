"""Megatron asks for no value of a tensor in a pass: on an accelerator each such question waits for the device."""

import pytest

from tests.actor_samples import make_model, make_spec
from tests.integration.fsdp_harness import run_ranks, scenario
from tests.integration.fsdp_rank import Rank
from tests.integration.value_questions import Questions


@pytest.mark.parametrize("recomputed", [False, True])
def test_no_layer_asks_for_the_boundaries_of_rows(tmp_path, recomputed):
    spec = make_spec(make_model(tmp_path), actor__backend="megatron", actor__gradientCheckpointing=recomputed)
    rank = Rank(spec, [[0, 1, 2, 3]], 0, 1)
    with Questions() as questions:
        rank.train(1)
    assert not questions.in_passes


def test_pipeline_stages_do_not_tell_each_other_the_lengths_of_micro_batches(tmp_path):
    parallel = {"pipeline": 2}
    spec = make_spec(
        make_model(tmp_path / "model"), actor__backend="megatron", actor__replicas=2, actor__parallel=parallel
    )
    for rank in run_ranks(tmp_path, 2, [scenario("stages", spec, [["train_asking", 1]], world_size=2)]):
        seen = rank["stages"]
        assert len(set(seen["lengths"])) > 1, "the micro-batches must have different lengths"
        assert seen["asked"] == [] and seen["metrics"][0]["actor/grad_norm"] > 0
