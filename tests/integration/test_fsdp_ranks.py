"""I9 and I7 over real ranks: the number of ranks changes no loss, gradient or weight, and a checkpoint fits any number.

One launch of two ranks runs all scenarios; the same ones with one rank run in this process.
"""

import json
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from actor_samples import make_model, make_spec  # noqa: E402
from fsdp_harness import run_here, run_ranks, scenario  # noqa: E402

PLAIN: dict = {}
FULL = {
    "algorithm__optimizerStepsPerBatch": 2,
    "algorithm__updateEpochs": 2,
    "algorithm__recomputeLogProbs": True,
    "algorithm__importance": {"mode": "tis"},
    "algorithm__loss": {"klCoefficient": 0.1, "entropyCoefficient": 0.01},
}
PER_SEQUENCE = {
    "algorithm__name": "dr_grpo",
    "actor__balance": False,
    "actor__accumulateWithoutSync": False,
    "actor__gradientCheckpointing": True,
}
CRITIC = {
    "algorithm__name": "gae",
    "algorithm__critic": {"valueClip": 0.05, "lam": 0.9},
    "algorithm__updateEpochs": 2,
    "actor__criticWarmupSteps": 2,
}
CRITIC_APART = CRITIC | {"algorithm__critic": {"separate": True}, "algorithm__rewardKlCoefficient": 0.1}
LAYOUTS = {"plain": PLAIN, "full": FULL, "per sequence": PER_SEQUENCE, "critic": CRITIC, "critic apart": CRITIC_APART}
TRAIN_AND_LOOK = [["train", 1], ["train", 2], ["score"], ["weights"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def model(folder):
    return make_model(folder / "model")


@pytest.fixture(scope="module")
def alone(folder, model):
    """What one rank saw: the references, and checkpoints the two ranks load."""
    seen = {name: run_here(name, make_spec(model, **changes), TRAIN_AND_LOOK) for name, changes in LAYOUTS.items()}
    verbs = [["train", 1], ["save", str(folder / "by-one"), 1], ["train", 2], ["train", 3], ["weights"]]
    return seen | {"saved": run_here("saved", make_spec(model), verbs)}


@pytest.fixture(scope="module")
def pair(folder, model, alone):
    """What each of two ranks saw."""
    spec = make_spec(model)
    by_two = str(folder / "by-two")
    scenarios = [
        scenario(name, make_spec(model, **changes), TRAIN_AND_LOOK, world_size=2) for name, changes in LAYOUTS.items()
    ]
    # A step cut short by the runner may leave a rank without groups: it computes and reduces along with the others.
    for name in ("full", "critic"):
        lopsided = scenario(f"{name} of rank 0", make_spec(model, **LAYOUTS[name]), TRAIN_AND_LOOK, world_size=2)
        scenarios.append(lopsided | {"groups": [[0, 1, 2, 3], []]})
    many = {"actor__microBatchTokens": 32}
    scenarios += [
        scenario(f"{name} of many", make_spec(model, model__dtype=dtype, **many), verbs, world_size=2, groups=8)
        for dtype in ("float32", "bfloat16")
        for name, verbs in {
            f"{dtype} calm": [["train", 1], ["weights"]],
            f"{dtype} left": [["cancel", 1, 2], ["train", 1], ["weights"]],
        }.items()
    ]
    scenarios.append(scenario("half", make_spec(model, model__dtype="bfloat16"), [["train", 1]], world_size=2))
    scenarios.append(
        scenario("critic half", make_spec(model, model__dtype="bfloat16", **CRITIC), [["train", 1]], world_size=2)
    )
    by_critics, critics = str(folder / "by-critics"), make_spec(model, **CRITIC_APART)
    saving = [["train", 1], ["save", by_critics, 1], ["train", 2], ["weights"]]
    scenarios.append(scenario("critic saved", critics, saving, world_size=2))
    scenarios.append(
        scenario("critic resumed", critics, [["load", by_critics], ["train", 2], ["weights"]], world_size=2)
    )
    named = {
        "uninterrupted": [["train", 1], ["save", by_two, 1], ["train", 2], ["train", 3], ["weights"]],
        "resumed": [["load", by_two], ["train", 2], ["train", 3], ["weights"]],
        "from one rank": [["load", str(folder / "by-one")], ["train", 2], ["train", 3], ["weights"]],
        "offloaded": [["train", 1], ["offload"], ["train", 2], ["offload"], ["train", 3], ["weights"]],
        "exported": [["export", str(folder / "exported")]],
        "refused": [["export", "/dev/null/model"]],
        "after the refusal": [["train", 1]],
        "poisoned": [["poison"], ["train", 1], ["weights"]],
        "lost": [["die", 1], ["train", 1]],  # the last one: the process group is of no use after it
    }
    scenarios += [scenario(name, spec, verbs, world_size=2) for name, verbs in named.items()]
    return run_ranks(folder, 2, scenarios)


NOT_SUMS = ("time/", "perf/")


def close(ours: dict, theirs: dict, *, relative: float, absolute: float) -> dict:
    """Return the metrics that differ."""
    return {
        name: (value, theirs[name])
        for name, value in ours.items()
        if not name.startswith(NOT_SUMS) and value != pytest.approx(theirs[name], rel=relative, abs=absolute)
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_train_like_one(alone, pair, name):
    for one, two in zip(alone[name]["metrics"], pair[0][name]["metrics"], strict=True):
        assert close(one, two, relative=1e-5, absolute=1e-6) == {}
    assert pair[0][name]["scores"][0] == pytest.approx(alone[name]["scores"][0], abs=1e-5)
    for tensor, values in alone[name]["weights"].items():
        # Adam divides by the gradient's own size, so a gradient that is zero up to rounding moves weights by rounding x lr.
        assert pair[0][name]["weights"][tensor] == pytest.approx(values, abs=2e-5), tensor
    assert pair[0][name]["counts"] == pair[1][name]["counts"] == alone[name]["counts"]


@pytest.mark.parametrize("name", ["full", "critic"])
def test_a_rank_without_groups_trains_the_others_rows_along_with_them(alone, pair, name):
    for one, two in zip(alone[name]["metrics"], pair[0][f"{name} of rank 0"]["metrics"], strict=True):
        assert close(one, two, relative=1e-5, absolute=1e-6) == {}
    assert pair[1][f"{name} of rank 0"]["counts"] == alone[name]["counts"]


def test_half_precision_trains_nearly_the_same_loss(alone, pair):
    assert pair[0]["half"]["metrics"][0]["actor/loss"] == pytest.approx(
        alone["plain"]["metrics"][0]["actor/loss"], abs=2e-2
    )


def test_a_critic_in_half_precision_learns_from_nearly_the_same_loss(alone, pair):
    half, whole = pair[0]["critic half"]["metrics"][0], alone["critic"]["metrics"][0]
    assert half["actor/value_loss"] == pytest.approx(whole["actor/value_loss"], rel=2e-2)


def test_all_ranks_report_the_same_metrics_and_rank_zero_alone_gets_weights_and_scores(pair):
    first, second = pair[0]["plain"], pair[1]["plain"]
    for one, two in zip(first["metrics"], second["metrics"], strict=True):
        assert close(one, two, relative=0, absolute=0) == {}
    assert second["weights"] == {} and second["scores"] == [None]
    assert first["placements"] == ["(Shard(dim=0),)"]


def test_a_resumed_pair_repeats_the_uninterrupted_one_bit_for_bit(pair):
    for rank in pair:
        for expected, got in zip(rank["uninterrupted"]["metrics"][1:], rank["resumed"]["metrics"], strict=True):
            assert close(expected, got, relative=0, absolute=0) == {}
        assert rank["resumed"]["counts"] == rank["uninterrupted"]["counts"]
    assert pair[0]["resumed"]["weights"] == pair[0]["uninterrupted"]["weights"]


def test_a_resumed_pair_with_critics_repeats_the_uninterrupted_one_bit_for_bit(pair):
    for rank in pair:
        (resumed,) = rank["critic resumed"]["metrics"]
        assert close(rank["critic saved"]["metrics"][1], resumed, relative=0, absolute=0) == {}
        assert rank["critic resumed"]["counts"] == rank["critic saved"]["counts"]
    assert pair[0]["critic resumed"]["weights"] == pair[0]["critic saved"]["weights"]


def test_two_ranks_load_the_checkpoint_of_one_and_go_on_alike(alone, pair):
    for expected, got in zip(alone["saved"]["metrics"][1:], pair[0]["from one rank"]["metrics"], strict=True):
        for name in ("actor/loss", "actor/grad_norm", "actor/lr"):
            assert got[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name


def test_one_rank_loads_the_checkpoint_of_two_and_goes_on_alike(folder, model, pair):
    seen = run_here("from two", make_spec(model), [["load", str(folder / "by-two")], ["train", 2], ["train", 3]])
    for expected, got in zip(pair[0]["uninterrupted"]["metrics"][1:], seen["metrics"], strict=True):
        for name in ("actor/loss", "actor/grad_norm", "actor/lr"):
            assert got[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name


def test_offloading_between_steps_changes_nothing(pair):
    assert pair[0]["offloaded"]["weights"] == pair[0]["uninterrupted"]["weights"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_asked_at_one_rank_both_leave_the_step_before_the_same_micro_batch_and_it_can_be_done_again(pair, dtype):
    for rank in pair:
        calm, left = rank[f"{dtype} calm of many"], rank[f"{dtype} left of many"]
        assert left["begun"] == 4, "three micro-batches, and an empty one to take out what FSDP holds back"
        assert (
            left["metrics"][0] is None and close(calm["metrics"][0], left["metrics"][1], relative=0, absolute=0) == {}
        )
        assert left["counts"] == calm["counts"] and left["weights"] == calm["weights"]


def test_sharded_export_has_the_bits_of_the_source(folder, model, pair):
    from safetensors.torch import load_file

    ours, theirs = load_file(folder / "exported" / "model.safetensors"), load_file(model / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert json.loads((folder / "exported" / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]


def test_an_export_that_the_storage_refuses_ends_on_both_ranks_and_leaves_them_able_to_talk(pair):
    for rank, told in zip(pair, ("could not be written to /dev/null/model", "rank 0 could not export"), strict=True):
        assert rank["refused"]["error"].startswith("InfrastructureError") and told in rank["refused"]["error"]
        assert rank["after the refusal"]["counts"]["applied"] == 1


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_both(model, pair):
    for rank in pair:
        assert rank["poisoned"]["counts"] == {"attempted": 1, "applied": 0, "skipped": 1, "empty": 0}
        assert rank["poisoned"]["metrics"][0]["actor/skipped_updates"] == 1
    untouched = run_here("untouched", make_spec(model), [["weights"]])
    assert pair[0]["poisoned"]["weights"] == untouched["weights"]


def test_a_lost_rank_is_named_to_the_other(pair):
    survivor, dead = pair
    assert "lost" not in dead
    assert survivor["lost"]["error"].startswith("InfrastructureError")
    assert "missing: rank 1" in survivor["lost"]["error"]
