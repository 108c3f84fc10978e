"""The Megatron backend trains what FSDP2 trains: same losses, gradients, weights and files, in every layout.

FSDP2 on one rank, itself held against transformers and TRL, is the reference; one launch of ranks runs the scenarios of a layout.
"""

import sys
from pathlib import Path

import pytest
import torch

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
CHANGES = {"plain": PLAIN, "full": FULL, "recomputed": {"actor__gradientCheckpointing": True}}
TRAIN_AND_LOOK = [["train", 1], ["train", 2], ["score"], ["state"]]
NOT_SUMS = ("time/", "perf/")
HELPED = {
    "distributed/param_and_grad_buffer.__init__",
    "models/common/embeddings/rotary_pos_embedding.get_emb",
    "optimizer/clip_grads.clip_grad_by_total_norm_fp32",
    "optimizer/clip_grads.get_grad_norm_fp32",
    "optimizer/optimizer.__init__",
    "pipeline_parallel/schedules.forward_backward_no_pipelining",
    "tensor_parallel/random._get_all_rng_states",
    "tensor_parallel/random._set_all_rng_states",
    "tensor_parallel/random.add",
    "tensor_parallel/random.model_parallel_cuda_manual_seed",
    "utils.local_multi_tensor_l2_norm",
}


LAYOUTS = {
    "tensor 2": {"tensor": 2},
    "data 2": {},
    "tensor 2 sequence": {"tensor": 2, "sequence": True},
    "pipeline 2": {"pipeline": 2},
    "interleaved 2": {"pipeline": 2, "virtualPipeline": 2},
}
"""Of two ranks."""


def fsdp(model: Path, **changes) -> dict:
    # With a large eps a gradient that is zero up to rounding moves no weight: weights of two backends can be compared.
    return make_spec(model, actor__optimizer={"learningRate": 1e-3, "eps": 1e-4}, **changes)


def megatron(model: Path, **changes) -> dict:
    return fsdp(model, actor__backend="megatron", **changes)


def of_two(model: Path, parallel: dict, **changes) -> dict:
    return megatron(model, **{"actor__parallel": parallel, "actor__replicas": 2} | changes)


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
        "tied": make_model(folder / "tied", num_hidden_layers=4),
        "untied": make_model(folder / "untied", tied=False, num_hidden_layers=4),
        "qwen3": make_model(folder / "qwen3", family="qwen3", tied=False, num_hidden_layers=4),
        # The ranks hold different numbers of its tokens.
        "llama": make_model(folder / "llama", family="llama", num_hidden_layers=4, vocab_size=25),
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


OF_FOUR = {"tensor 2 data 2": {"tensor": 2}, "tensor 2 pipeline 2": {"tensor": 2, "pipeline": 2}}
CASES = [("plain", "tied"), ("full", "untied"), ("recomputed", "llama"), ("plain", "qwen3")]


@pytest.fixture(scope="module")
def pair(folder, models):
    """What each of two ranks saw, by scenario."""
    scenarios = [
        scenario(f"{layout} {changes} {model}", spec, TRAIN_AND_LOOK, world_size=2)
        for layout, parallel in LAYOUTS.items()
        for changes, model in CASES
        for spec in [of_two(models[model], parallel, **CHANGES[changes])]
    ]
    for layout, parallel in LAYOUTS.items():
        spec, saved = of_two(models["untied"], parallel), str(folder / f"{layout} saved")
        many = of_two(models["untied"], parallel, actor__microBatchTokens=32)
        half = of_two(models["tied"], parallel, model__dtype="bfloat16")
        verbs = {
            "through": (spec, [["train", 1], ["save", saved, 1], ["offload"], ["train", 2], ["state"]]),
            "resumed": (spec, [["load", saved], ["train", 2], ["state"]]),
            "exported": (spec, [["export", str(folder / f"{layout} exported")]]),
            "poisoned": (spec, [["poison"], ["train", 1], ["state"]]),
            "calm": (many, [["train", 1], ["state"]]),
            # Stages that are in different micro-batches cannot leave together: only before the first one.
            "left": (many, [["leave", 1, 0 if "pipeline" in parallel else 2], ["train", 1], ["state"]]),
            "published": (half, [["train", 1], ["publish", 1]]),
        }
        scenarios += [scenario(f"{layout} {name}", spec, verbs, world_size=2) for name, (spec, verbs) in verbs.items()]
    return run_ranks(folder, 2, scenarios)


@pytest.mark.parametrize(("changes", "model"), CASES, ids=lambda value: value)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_like_fsdp2(reference, pair, layout, changes, model):
    seen = [rank[f"{layout} {changes} {model}"] for rank in pair]
    assert_trained_alike(seen[0], reference(changes, model))
    metrics = [[{k: v for k, v in m.items() if not k.startswith(NOT_SUMS)} for m in rank["metrics"]] for rank in seen]
    assert metrics[0] == metrics[1] and seen[1]["state"] == {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_resumed_ranks_repeat_the_uninterrupted_ones_bit_for_bit(pair, layout):
    through, resumed = (pair[0][f"{layout} {name}"] for name in ("through", "resumed"))
    assert resumed["bits"] == through["bits"] and resumed["counts"] == through["counts"]
    assert resumed["metrics"][0]["actor/loss"] == through["metrics"][1]["actor/loss"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_two_ranks_fits_one(folder, models, pair, layout):
    seen = run_here(
        "one", megatron(models["untied"]), [["load", str(folder / f"{layout} saved")], ["train", 2], ["state"]]
    )
    through = pair[0][f"{layout} through"]
    for name in ("actor/loss", "actor/grad_norm", "actor/lr"):
        assert seen["metrics"][0][name] == pytest.approx(through["metrics"][1][name], rel=1e-5, abs=1e-6), name
    for name, values in through["state"].items():
        assert seen["state"][name] == pytest.approx(values, abs=1e-5), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_export_the_bits_of_the_source_and_publish_what_they_have(folder, models, pair, layout):
    from safetensors.torch import load_file

    ours, theirs = (
        load_file(folder / f"{layout} exported" / "model.safetensors"),
        load_file(models["untied"] / "model.safetensors"),
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    first, second = (rank[f"{layout} published"] for rank in pair)
    assert first["reported"] and first["differ"] == [] and not second["reported"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_skip_and_leave_a_step_together(pair, layout):
    for rank in pair:
        assert rank[f"{layout} poisoned"]["counts"] == {"attempted": 1, "applied": 0, "skipped": 1, "empty": 0}
        calm, left = rank[f"{layout} calm"], rank[f"{layout} left"]
        assert left["metrics"][0] is None and left["bits"] == calm["bits"] and left["counts"] == calm["counts"]


@pytest.fixture(scope="module")
def four(folder, models):
    """What each of four ranks saw, by layout."""
    scenarios = [
        scenario(layout, of_two(models["untied"], parallel, actor__replicas=4, **FULL), TRAIN_AND_LOOK, world_size=4)
        for layout, parallel in OF_FOUR.items()
    ]
    (folder / "four").mkdir()
    return run_ranks(folder / "four", 4, scenarios)


@pytest.mark.parametrize("layout", OF_FOUR)
def test_four_ranks_in_both_directions_train_like_fsdp2(reference, four, layout):
    assert_trained_alike(four[0][layout], reference("full", "untied"))
    assert all(rank[layout]["counts"] == four[0][layout]["counts"] for rank in four)


@pytest.mark.parametrize(("changes", "model"), CASES, ids=lambda value: value)
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
    assert resumed["bits"] == through["bits"] and resumed["counts"] == through["counts"]


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit_and_fsdp2_goes_on_from_its_checkpoint(folder, models):
    spec, saved = megatron(models["untied"]), str(folder / "saved")
    through = run_here("through", spec, [["train", 1], ["save", saved, 1], ["offload"], ["train", 2], ["state"]])
    resumed = run_here("resumed", spec, [["load", saved], ["train", 2], ["state"]])
    assert resumed["bits"] == through["bits"] and resumed["counts"] == through["counts"]
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
    assert seen["bits"] == untouched["bits"]


def test_a_step_is_left_before_a_micro_batch_and_can_be_done_again(models):
    spec = megatron(models["tied"], actor__microBatchTokens=32)
    calm = run_here("calm", spec, [["train", 1], ["state"]])
    left = run_here("left", spec, [["leave", 1, 2], ["train", 1], ["state"]])
    assert left["metrics"][0] is None and left["bits"] == calm["bits"] and left["counts"] == calm["counts"]


def test_what_megatron_gets_help_with_on_a_cpu_is_known(models, monkeypatch):
    """An upgrade of megatron-core that asks for more, or for less, shows here."""
    from rl_core.actors.megatron import cpu

    monkeypatch.setattr(cpu, "helped", set())
    run_here("helped", megatron(models["tied"], **CHANGES["recomputed"]), [["train", 1], ["score"]])
    assert cpu.helped == HELPED
