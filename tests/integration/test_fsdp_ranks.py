"""Steps and checkpoints over real ranks: neither their number nor the kind of FSDP changes a loss, gradient or weight, and a checkpoint fits them all.

One launch of two ranks runs all scenarios; the same ones with one rank run in this process.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import actor_samples
from tests.actor_samples import make_model, make_spec
from tests.integration.fsdp_harness import run_here, run_ranks, scenario
from tests.trajectory_samples import SIMULATORS, make_embodied_spec, make_policy

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
    "actor__accumulateWithoutSync": True,
    "actor__gradientCheckpointing": True,
}
CRITIC = {
    "algorithm__name": "gae",
    "algorithm__critic": {"valueClip": 0.05, "lam": 0.9},
    "algorithm__updateEpochs": 2,
    "actor__criticWarmupSteps": 2,
}
CRITIC_APART = CRITIC | {"algorithm__critic": {"separate": True}, "algorithm__rewardKlCoefficient": 0.1}
LORA = FULL | {
    "actor__gradientCheckpointing": True,
    "actor__gradientCheckpointingMode": "selective",
    "model__lora": {"rank": 3, "alpha": 12.0, "targets": ["q_proj", "v_proj", "down_proj"]},
}
LORA_HALF = LORA | {"model__dtype": "bfloat16"}
CHANGES = {
    "plain": PLAIN,
    "full": FULL,
    "per sequence": PER_SEQUENCE,
    "critic": CRITIC,
    "critic apart": CRITIC_APART,
    "lora": LORA,
    "experts": FULL,
}
TRAIN_AND_LOOK = [["train", 1], ["train", 2], ["score"], ["weights"]]
KINDS = ("fsdp1", "fsdp2")
ACT = [["train", 1], ["train", 2], ["weights"], ["seen_steps"]]
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def model(folder):
    make_model(folder / "experts", family="qwen3_moe", **actor_samples.EXPERTS)
    return make_model(folder / "model")


def look_at(name: str, folder: Path, model: Path, **changes) -> tuple[dict, list]:
    """Return the spec and the verbs of a run that is compared with others of that name in `CHANGES`."""
    spec = make_spec(folder / "experts" if name == "experts" else model, **CHANGES[name], **changes)
    if name != "experts":
        return spec, TRAIN_AND_LOOK
    saved = str(folder / f"{changes.get('actor__backend', 'one')} by-experts")
    return spec, [["train", 1], ["save", saved, 1], *TRAIN_AND_LOOK[1:]]


@pytest.fixture(scope="module")
def policy(folder):
    return make_policy(folder / "policy")


@pytest.fixture(scope="module")
def alone(folder, model):
    """What one rank saw: the references, and checkpoints the two ranks load."""
    seen = {name: run_here(name, *look_at(name, folder, model)) for name in CHANGES}
    verbs = [["train", 1], ["save", str(folder / "by-one"), 1], ["state"], ["train", 2], ["train", 3]]
    return seen | {"saved": run_here("saved", make_spec(model), verbs)}


@pytest.fixture(scope="module")
def pair(folder, model, alone, policy):
    """What each of two ranks saw, by kind of FSDP and scenario."""
    scenarios = [one for kind in KINDS for one in of_kind(kind, folder, model)]
    for kind in KINDS:
        spec = make_embodied_spec(policy, backend=kind)
        acting = scenario(f"{kind} acting", spec, ACT, world_size=2, groups=SIMULATORS)
        # Env workers that are lost, or few simulators, may leave a rank without any.
        scenarios += [acting, acting | {"name": f"{kind} acting of rank 0", "groups": [list(range(SIMULATORS)), []]}]
    renewed = make_spec(model, **FULL, actor__backend="fsdp1", algorithm__referenceUpdateSteps=1)
    verbs = [["load", str(folder / "fsdp2 by-renewed")], ["train", 2], ["weights"]]
    scenarios.append(scenario("fsdp1 renewed by the other", renewed, verbs, world_size=2))
    # What the ranks of one kind save the other loads, both ways, and saves again.
    for kind, other in (("fsdp1", "fsdp2"), ("fsdp2", "fsdp1")):
        verbs = [["load", str(folder / f"{other} by-two")], ["state"], ["save", str(folder / f"{kind} again"), 1]]
        scenarios.append(scenario(f"{kind} from the other", make_spec(model, actor__backend=kind), verbs, world_size=2))
        spec, (_, _, *rest) = look_at("experts", folder, model, actor__backend=kind)
        verbs = [["load", str(folder / f"{other} by-experts")], *rest]
        scenarios.append(scenario(f"{kind} experts from the other", spec, verbs, world_size=2))
        spec = make_spec(model, actor__backend=kind, **LORA_HALF)
        verbs = [["load", str(folder / f"{other} by-adapters")], ["state"]]
        scenarios.append(scenario(f"{kind} adapters from the other", spec, verbs, world_size=2))
    compiled = make_spec(model, actor__compile=True, runtime__deadlines={"collective": 300})
    scenarios.append(scenario("compiled", compiled, TRAIN_AND_LOOK, world_size=2))
    spec = make_spec(model)
    last = {
        "refused": [["export", "/dev/null/model"]],
        "after the refusal": [["train", 1]],
        "lost": [["die", 1], ["train", 1]],  # the last one: the process group is of no use after it
    }
    scenarios += [scenario(name, spec, verbs, world_size=2) for name, verbs in last.items()]
    return run_ranks(folder, 2, scenarios)


def of_kind(kind: str, folder: Path, model: Path) -> list[dict]:
    """Return the scenarios that both kinds go through, on two ranks."""

    def spec(**changes) -> dict:
        return make_spec(model, actor__backend=kind, **changes)

    by_two = str(folder / f"{kind} by-two")
    found = [
        scenario(f"{kind} {name}", *look_at(name, folder, model, actor__backend=kind), world_size=2) for name in CHANGES
    ]
    # A step cut short by the runner may leave a rank without groups: it computes and reduces along with the others.
    for name in ("full", "critic"):
        lopsided = scenario(f"{kind} {name} of rank 0", spec(**CHANGES[name]), TRAIN_AND_LOOK, world_size=2)
        found.append(lopsided | {"groups": [[0, 1, 2, 3], []]})
    for dtype in DTYPES:
        many = spec(model__dtype=dtype, actor__microBatchTokens=32)
        calm, left = [["train", 1], ["weights"]], [["cancel", 1, 2], ["train", 1], ["weights"]]
        found.append(scenario(f"{kind} {dtype} calm", many, calm, world_size=2, groups=8))
        found.append(scenario(f"{kind} {dtype} left", many, left, world_size=2, groups=8))
    half = spec(model__dtype="bfloat16")
    critics, by_critics = spec(**CRITIC_APART), str(folder / f"{kind} by-critics")
    saving = [["train", 1], ["save", by_critics, 1], ["train", 2], ["weights"]]
    found += [
        scenario(f"{kind} critic half", spec(model__dtype="bfloat16", **CRITIC), [["train", 1]], world_size=2),
        scenario(f"{kind} critic saved", critics, saving, world_size=2),
        scenario(f"{kind} critic resumed", critics, [["load", by_critics], ["train", 2], ["weights"]], world_size=2),
    ]
    adapters, by_adapters = spec(**LORA_HALF), str(folder / f"{kind} by-adapters")
    verbs = [["offer", True], ["train", 1], ["save", by_adapters, 1], ["state"], ["offload"], ["train", 2], ["weights"]]
    found += [
        scenario(f"{kind} adapters half", adapters, verbs, world_size=2),
        scenario(f"{kind} adapters half resumed", adapters, [["load", by_adapters], *verbs[-2:]], world_size=2),
    ]
    renewed = spec(**FULL, algorithm__referenceUpdateSteps=1)
    by_renewed, rest = str(folder / f"{kind} by-renewed"), [["train", 2], ["weights"]]
    found += [
        scenario(f"{kind} renewed", renewed, [["train", 1], ["save", by_renewed, 1], *rest], world_size=2),
        scenario(f"{kind} renewed resumed", renewed, [["load", by_renewed], *rest], world_size=2),
    ]
    found.append(scenario(f"{kind} half", half, [["train", 1], ["offload"], ["train", 2]], world_size=2))
    named = {
        "uninterrupted": [["train", 1], ["save", by_two, 1], ["state"], ["train", 2], ["train", 3], ["weights"]],
        "resumed": [["load", by_two], ["train", 2], ["train", 3], ["weights"]],
        "from one rank": [["load", str(folder / "by-one")], ["state"], ["train", 2], ["train", 3]],
        "offloaded": [["train", 1], ["offload"], ["score"], ["train", 2], ["offload"], ["train", 3], ["weights"]],
        "exported": [["export", str(folder / f"{kind} exported")]],
        "poisoned": [["poison"], ["train", 1], ["weights"]],
    }
    return found + [scenario(f"{kind} {name}", spec(), verbs, world_size=2) for name, verbs in named.items()]


NOT_SUMS = ("time/", "perf/")


def close(ours: dict, theirs: dict, *, relative: float, absolute: float) -> dict:
    """Return the metrics that differ."""
    return {
        name: (value, theirs[name])
        for name, value in ours.items()
        if not name.startswith(NOT_SUMS) and value != pytest.approx(theirs[name], rel=relative, abs=absolute)
    }


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_like_one(alone, pair, kind, name):
    first, second = (rank[f"{kind} {name}"] for rank in pair)
    assert_alike(first, alone[name], absolute=2e-5)
    assert first["counts"] == second["counts"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_that_was_renewed_is_resumed(pair, kind):
    for rank in pair:
        assert rank[f"{kind} renewed resumed"]["weights"] == rank[f"{kind} renewed"]["weights"]


def test_a_reference_that_was_renewed_is_resumed_by_the_other_kind(pair):
    theirs = pair[0]["fsdp2 renewed"]["weights"]
    for tensor, values in pair[0]["fsdp1 renewed by the other"]["weights"].items():
        assert values == pytest.approx(theirs[tensor], abs=2e-5), tensor


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_resumed_by_the_other_kind(pair, kind):
    other = next(one for one in KINDS if one != kind)
    resumed, through = pair[0][f"{kind} experts from the other"], pair[0][f"{other} experts"]
    assert_alike(resumed, through | {"metrics": through["metrics"][1:]}, absolute=2e-5)


def test_compiled_layers_train_like_others(pair, alone):
    assert_alike(pair[0]["compiled"], alone["plain"], absolute=2e-5)


@pytest.mark.parametrize("name", CHANGES)
def test_both_kinds_train_alike(pair, name):
    assert_alike(pair[0][f"fsdp1 {name}"], pair[0][f"fsdp2 {name}"], absolute=1e-5)


def assert_alike(ours: dict, theirs: dict, *, absolute: float) -> None:
    for one, two in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert close(two, one, relative=1e-5, absolute=1e-6) == {}
    assert ours["scores"][0] == pytest.approx(theirs["scores"][0], abs=1e-5)
    for tensor, values in theirs["weights"].items():
        # Adam divides by the gradient's own size, so a gradient that is zero up to rounding moves weights by rounding x lr.
        assert ours["weights"][tensor] == pytest.approx(values, abs=absolute), tensor
    assert ours["counts"] == theirs["counts"]


@pytest.fixture(scope="module")
def acting(pair, policy):
    """What trained a policy that acts in simulators saw, by kind of FSDP and which ranks had simulators."""
    one = {kind: run_here("acting", make_embodied_spec(policy, backend=kind), ACT) for kind in KINDS}
    two = {name: pair[0][name] for kind in KINDS for name in (f"{kind} acting", f"{kind} acting of rank 0")}
    return {f"{kind} alone": one[kind] for kind in KINDS} | two


def test_two_updates_of_a_policy_that_acts_give_the_same_weights_whatever_trains_it(acting):
    reference = acting["fsdp2 alone"]
    assert all(metrics["actor/grad_norm"] > 0 for metrics in reference["metrics"])
    for case, seen in acting.items():
        assert seen["weights"].keys() == reference["weights"].keys()
        for tensor, values in reference["weights"].items():
            assert seen["weights"][tensor] == pytest.approx(values, abs=1e-6), (case, tensor)
        for one, two in zip(reference["metrics"], seen["metrics"], strict=True):
            assert close(two, one, relative=1e-5, absolute=1e-6) == {}


def test_the_policy_is_told_each_trained_step(acting):
    assert {case: seen["steps"] for case, seen in acting.items()} == {case: [1, 2] for case in acting}


@pytest.mark.parametrize("name", ["full", "critic"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_groups_trains_the_others_rows_along_with_them(alone, pair, kind, name):
    for one, two in zip(alone[name]["metrics"], pair[0][f"{kind} {name} of rank 0"]["metrics"], strict=True):
        assert close(one, two, relative=1e-5, absolute=1e-6) == {}
    assert pair[1][f"{kind} {name} of rank 0"]["counts"] == alone[name]["counts"]


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_trains_nearly_the_same_loss(alone, model, pair, kind):
    expected = [metrics["actor/loss"] for metrics in alone["plain"]["metrics"]]
    verbs = [["train", 1], ["offload"], ["train", 2]]
    one = run_here("half", make_spec(model, model__dtype="bfloat16", actor__backend=kind), verbs)
    for seen in (one, pair[0][f"{kind} half"]):
        assert [metrics["actor/loss"] for metrics in seen["metrics"]] == pytest.approx(expected, abs=2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_over_frozen_weights_in_half_precision_are_resumed_by_both_kinds(pair, kind):
    other = next(one for one in KINDS if one != kind)
    for rank in pair:
        through, resumed = rank[f"{kind} adapters half"], rank[f"{kind} adapters half resumed"]
        assert close(through["metrics"][1], resumed["metrics"][0], relative=0, absolute=0) == {}
        assert resumed["weights"] == through["weights"]
    assert pair[0][f"{other} adapters from the other"]["bits"] == pair[0][f"{kind} adapters half"]["bits"]


def test_both_kinds_offer_the_same_frozen_weights_in_half_precision_and_adapters_train_alike(model, pair):
    one, two = (pair[0][f"{kind} adapters half"] for kind in KINDS)
    alone = run_here("offered", make_spec(model, **LORA_HALF), [["offer", True]])
    assert one["offered"] == two["offered"] == alone["offered"]
    for ours, theirs in zip(one["metrics"], two["metrics"], strict=True):
        assert close(ours, theirs, relative=1e-2, absolute=1e-3) == {}
    before, after = two["resident"]
    assert before < one["resident"][0] and after < before / 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_in_half_precision_learns_from_nearly_the_same_loss(alone, pair, kind):
    half, whole = pair[0][f"{kind} critic half"]["metrics"][0], alone["critic"]["metrics"][0]
    assert half["actor/value_loss"] == pytest.approx(whole["actor/value_loss"], rel=2e-2)


@pytest.mark.parametrize(("kind", "placements"), [("fsdp1", ["none"]), ("fsdp2", ["(Shard(dim=0),)"])])
def test_all_ranks_report_the_same_metrics_and_rank_zero_alone_gets_weights_and_scores(pair, kind, placements):
    first, second = (rank[f"{kind} plain"] for rank in pair)
    for one, two in zip(first["metrics"], second["metrics"], strict=True):
        assert close(one, two, relative=0, absolute=0) == {}
    assert second["weights"] == {} and second["scores"] == [None]
    assert first["placements"] == placements


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_pair_repeats_the_uninterrupted_one_bit_for_bit(pair, kind):
    for rank in pair:
        through, resumed = (rank[f"{kind} {name}"] for name in ("uninterrupted", "resumed"))
        for expected, got in zip(through["metrics"][1:], resumed["metrics"], strict=True):
            assert close(expected, got, relative=0, absolute=0) == {}
        assert resumed["counts"] == through["counts"] and resumed["weights"] == through["weights"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_pair_with_critics_repeats_the_uninterrupted_one_bit_for_bit(pair, kind):
    for rank in pair:
        saved, resumed = rank[f"{kind} critic saved"], rank[f"{kind} critic resumed"]
        assert close(saved["metrics"][1], resumed["metrics"][0], relative=0, absolute=0) == {}
        assert resumed["counts"] == saved["counts"] and resumed["weights"] == saved["weights"]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_load_the_checkpoint_of_one_and_go_on_alike(alone, pair, kind):
    seen = pair[0][f"{kind} from one rank"]
    assert seen["bits"] == alone["saved"]["bits"]
    for expected, got in zip(alone["saved"]["metrics"][1:], seen["metrics"], strict=True):
        for name in ("actor/loss", "actor/grad_norm", "actor/lr"):
            assert got[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_two_ranks_is_the_same_to_the_other_kind_and_to_one_rank(folder, model, pair, kind):
    other = next(one for one in KINDS if one != kind)
    through, there = pair[0][f"{kind} uninterrupted"], pair[0][f"{other} from the other"]
    assert there["bits"] == through["bits"] and there["counts"]["applied"] == 1
    written = []
    # One rank saves whole tensors: what it read from both folders has to be the same in every bit, the moments included.
    for number, path in enumerate((folder / f"{kind} by-two", folder / f"{other} again")):
        saved = folder / f"{kind} {number} by one"
        verbs = [["load", str(path)], ["save", str(saved), 1], ["train", 2], ["train", 3]]
        seen = run_here("from two", make_spec(model), verbs)
        written.append(tensors(saved))
        for expected, got in zip(through["metrics"][1:], seen["metrics"], strict=True):
            for name in ("actor/loss", "actor/grad_norm", "actor/lr"):
                assert got[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(written[0][name], written[1][name]) for name in written[0])
    counters = [json.loads((folder / f"{kind} {n} by one" / "actor.json").read_text()) for n in (0, 1)]
    assert counters[0] == counters[1] and set(counters[0]["optimizer_steps"].values()) == {1.0}


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return what one rank saved of model and optimizer."""
    return {
        name: tensor for part in sorted(checkpoint.rglob("*.safetensors")) for name, tensor in load_file(part).items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_offloading_between_steps_changes_nothing(pair, kind):
    for rank in pair:
        offloaded, through = rank[f"{kind} offloaded"], rank[f"{kind} uninterrupted"]
        assert offloaded["weights"] == through["weights"]
        before, after = offloaded["resident"]
        assert before > 0 and after == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_asked_at_one_rank_both_leave_the_step_before_the_same_micro_batch_and_it_can_be_done_again(pair, kind, dtype):
    for rank in pair:
        calm, left = rank[f"{kind} {dtype} calm"], rank[f"{kind} {dtype} left"]
        assert left["begun"] == 4, "three micro-batches, and an empty one to take out what FSDP holds back"
        assert (
            left["metrics"][0] is None and close(calm["metrics"][0], left["metrics"][1], relative=0, absolute=0) == {}
        )
        assert left["counts"] == calm["counts"] and left["weights"] == calm["weights"]


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_export_has_the_bits_of_the_source(folder, model, pair, kind):
    exported = folder / f"{kind} exported"
    ours, theirs = load_file(exported / "model.safetensors"), load_file(model / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]


def test_an_export_that_the_storage_refuses_ends_on_both_ranks_and_leaves_them_able_to_talk(pair):
    for rank, told in zip(pair, ("could not be written to /dev/null/model", "rank 0 could not export"), strict=True):
        assert rank["refused"]["error"].startswith("InfrastructureError") and told in rank["refused"]["error"]
        assert rank["after the refusal"]["counts"]["applied"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_both(model, pair, kind):
    for rank in pair:
        assert rank[f"{kind} poisoned"]["counts"] == {"attempted": 1, "applied": 0, "skipped": 1, "empty": 0}
        assert rank[f"{kind} poisoned"]["metrics"][0]["actor/skipped_updates"] == 1
    untouched = run_here("untouched", make_spec(model), [["weights"]])
    assert pair[0][f"{kind} poisoned"]["weights"] == untouched["weights"]


def test_a_lost_rank_is_named_to_the_other(pair):
    survivor, dead = pair
    assert "lost" not in dead
    assert survivor["lost"]["error"].startswith("InfrastructureError")
    assert "missing: rank 1" in survivor["lost"]["error"]
