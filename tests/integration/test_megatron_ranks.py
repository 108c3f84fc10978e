"""The Megatron backend trains what FSDP2 trains: same losses, gradients, weights and files, in every layout.

FSDP2 on one rank, itself held against transformers and TRL, is the reference; one launch of ranks runs the scenarios of a layout.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from actor_samples import make_model, make_spec  # noqa: E402
from fsdp_harness import run_here  # noqa: E402

PLAIN: dict = {}
FULL = {
    "algorithm__optimizerStepsPerBatch": 2,
    "algorithm__updateEpochs": 2,
    "algorithm__recomputeLogProbs": True,
    "algorithm__importance": {"mode": "tis"},
    "algorithm__loss": {"klCoefficient": 0.1, "entropyCoefficient": 0.01},
}
CHANGES = {"plain": PLAIN, "full": FULL, "recomputed": {"actor__gradientCheckpointing": True}}
TRAIN_AND_LOOK = [["train", 1], ["train", 2], ["score"], ["state"]]
NOT_SUMS = ("time/", "perf/")


def fsdp(model: Path, **changes) -> dict:
    # With a large eps a gradient that is zero up to rounding moves no weight: weights of two backends can be compared.
    return make_spec(model, actor__optimizer={"learningRate": 1e-3, "eps": 1e-4}, **changes)


def megatron(model: Path, **changes) -> dict:
    return fsdp(model, actor__backend="megatron", **changes)


def assert_trained_alike(ours: dict, theirs: dict) -> None:
    for one, two in zip(ours["metrics"], theirs["metrics"], strict=True):
        expected = {name: value for name, value in two.items() if not name.startswith(NOT_SUMS)}
        assert {name: one[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert ours["scores"][0] == pytest.approx(theirs["scores"][0], abs=1e-5)
    assert ours["counts"] == theirs["counts"]
    assert ours["state"].keys() == theirs["state"].keys()
    for name, values in theirs["state"].items():
        assert ours["state"][name] == pytest.approx(values, abs=1e-5), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def models(folder):
    return {
        "tied": make_model(folder / "tied"),
        "untied": make_model(folder / "untied", tied=False),
        "qwen3": make_model(folder / "qwen3", family="qwen3", tied=False),
        "llama": make_model(folder / "llama", family="llama"),
    }


@pytest.fixture(scope="module")
def reference(models):
    """What FSDP2 on one rank sees, by (changes, model)."""
    seen: dict = {}

    def run(changes: str, model: str) -> dict:
        if (changes, model) not in seen:
            spec = fsdp(models[model], **CHANGES[changes])
            seen[changes, model] = run_here(changes, spec, TRAIN_AND_LOOK)
        return seen[changes, model]

    return run


@pytest.mark.parametrize(
    ("changes", "model"),
    [("plain", "tied"), ("full", "untied"), ("recomputed", "llama"), ("plain", "qwen3")],
    ids=lambda value: value,
)
def test_one_rank_trains_like_fsdp2(models, reference, changes, model):
    ours = run_here("one", megatron(models[model], **CHANGES[changes]), TRAIN_AND_LOOK)
    assert_trained_alike(ours, reference(changes, model))


def test_half_precision_trains_nearly_the_same_loss_and_resumes_from_its_float32_weights(folder, models, reference):
    spec = megatron(models["tied"], model__dtype="bfloat16")
    verbs = [["train", 1], ["save", str(folder / "half"), 1], ["train", 2], ["state"]]
    through = run_here("through", spec, verbs)
    expected = reference("plain", "tied")["metrics"][0]["actor/loss"]
    assert through["metrics"][0]["actor/loss"] == pytest.approx(expected, abs=2e-2)
    resumed = run_here("resumed", spec, [["load", str(folder / "half")], ["train", 2], ["state"]])
    assert resumed["state"] == through["state"] and resumed["counts"] == through["counts"]


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit_and_fsdp2_goes_on_from_its_checkpoint(folder, models):
    spec, saved = megatron(models["untied"]), str(folder / "saved")
    through = run_here("through", spec, [["train", 1], ["save", saved, 1], ["offload"], ["train", 2], ["state"]])
    resumed = run_here("resumed", spec, [["load", saved], ["train", 2], ["state"]])
    assert resumed["state"] == through["state"] and resumed["counts"] == through["counts"]
    other = run_here("other", fsdp(models["untied"]), [["load", saved], ["train", 2], ["state"]])
    for name, values in through["state"].items():
        assert other["state"][name] == pytest.approx(values, abs=1e-5), name


def test_an_export_has_the_bits_of_the_source(folder, models):
    from safetensors.torch import load_file

    for name, model in models.items():
        run_here("exported", megatron(model), [["export", str(folder / f"{name}-exported")]])
        ours, theirs = (load_file(path / "model.safetensors") for path in (folder / f"{name}-exported", model))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(models):
    seen = run_here("poisoned", megatron(models["tied"]), [["poison"], ["train", 1], ["state"]])
    assert seen["counts"] == {"attempted": 1, "applied": 0, "skipped": 1, "empty": 0}
    untouched = run_here("untouched", megatron(models["tied"]), [["state"]])
    assert seen["state"] == untouched["state"]


def test_a_step_is_left_before_a_micro_batch_and_can_be_done_again(models):
    spec = megatron(models["tied"], actor__microBatchTokens=32)
    calm = run_here("calm", spec, [["train", 1], ["state"]])
    left = run_here("left", spec, [["leave", 1, 2], ["train", 1], ["state"]])
    assert left["metrics"][0] is None and left["state"] == calm["state"] and left["counts"] == calm["counts"]
