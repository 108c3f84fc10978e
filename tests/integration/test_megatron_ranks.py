"""The Megatron backend trains what FSDP2 trains: same losses, gradients, weights and files, in every layout.

FSDP2 on one rank, itself held against transformers and TRL, is the reference; one launch of ranks runs the scenarios of a layout.
"""

import contextlib
import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rl_core.actors.megatron.backend import Outputs
from rl_core.actors.rows import Columns, StepRows
from rl_core.checkpoint.files import file_digest, relative_files
from rl_core.checkpoint.store import CheckpointStore
from rl_core.checkpoint.tensors import SHARDING
from tests.actor_samples import make_model, make_record, make_spec
from tests.integration.fsdp_harness import run_here, run_ranks, scenario
from tests.integration.fsdp_rank import Rank

PLAIN: dict = {}
FULL = {
    "algorithm__optimizerStepsPerBatch": 2,
    "algorithm__updateEpochs": 2,
    "algorithm__recomputeLogProbs": True,
    "algorithm__importance": {"mode": "tis"},
    "algorithm__loss": {"klCoefficient": 0.1, "entropyCoefficient": 0.01},
}
CRITIC = {
    "algorithm__name": "gae",
    "algorithm__critic": {"valueClip": 0.05, "lam": 0.9, "gamma": 0.95},
    "actor__optimizer__valueLearningRate": 5e-2,
}
HEAD = CRITIC | {"actor__criticWarmupSteps": 1}
"""The critic alone in the first step, everything in the second."""
APART = CRITIC | {
    "algorithm__critic": {"separate": True, "lam": 0.9},
    "algorithm__recomputeLogProbs": True,
    "algorithm__rewardKlCoefficient": 0.1,
}
CHANGES = {
    "plain": PLAIN,
    "full": FULL,
    "recomputed": {"actor__gradientCheckpointing": True},
    "selective": {"actor__gradientCheckpointing": True, "actor__gradientCheckpointingMode": "selective"},
    "critic": HEAD,
    "critic apart": APART,
}
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
    "data 2": {},
    "tensor 2 sequence": {"tensor": 2, "sequence": True},  # without "sequence": among those of four ranks
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


def assert_same_tensors(ours: Path, theirs: Path) -> None:
    one, two = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in two)


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


OF_FOUR = {"tensor 2 pipeline 2": {"tensor": 2, "pipeline": 2}, "tensor 2 data 2": {"tensor": 2}}
HYBRID = ("fsdp1", "fsdp2")
EVERYWHERE = [("full", "untied"), ("critic", "untied")]
"""Tied weights are trained in each layout by the links of the chain."""
SOMEWHERE = [("recomputed", "llama"), ("selective", "qwen3")]
CASES = [("plain", "tied"), *EVERYWHERE, *SOMEWHERE, ("critic apart", "tied")]
PAIRED = [
    *((layout, case) for layout in LAYOUTS for case in EVERYWHERE),
    # Norms of queries and keys that tensor ranks share, a vocabulary that they do not divide, layers that are run again in rounds.
    *(("tensor 2 sequence", case) for case in SOMEWHERE),
    ("interleaved 2", ("recomputed", "llama")),
]
CHAIN = [*OF_FOUR, "fsdp2 of two", "fsdp1 of two", *LAYOUTS, "data 2 whole", "one", "fsdp2 of one"]
"""Each goes on from the checkpoint of the one before it, the one that was saved while that one trained on."""


def link(folder: Path, models: dict, name: str) -> tuple[dict, list]:
    """Return (spec, verbs) of a link of the chain, a policy and a critic of its own: the first trains a step, each saves and trains another,
    and saves a second time while it does."""
    at, model = CHAIN.index(name), models["tied"]
    path = str(folder / f"chain {at}")
    begin = ["load", str(folder / f"chain {at - 1} beside")] if at else ["train", 1]
    verbs = [begin, ["save", path, 1], ["save_beside", f"{path} beside", 1], ["train", 2], ["saved"]]
    if name.startswith("fsdp"):
        return fsdp(model, actor__backend=name[:5], actor__replicas=2 if "two" in name else 1, **APART), verbs
    if name == "one":
        return megatron(model, **APART), verbs
    if name == "data 2 whole":
        return of_two(model, {}, actor__optimizer__distributed=False, **APART), verbs
    parallel, replicas = (OF_FOUR[name], 4) if name in OF_FOUR else (LAYOUTS[name], 2)
    return megatron(model, actor__parallel=parallel, actor__replicas=replicas, **APART), verbs


@pytest.fixture(scope="module")
def four(folder, models):
    """What each of four ranks saw, by scenario; the first links of the chain."""
    scenarios = [
        scenario(layout, of_two(models["untied"], parallel, actor__replicas=4, **FULL), TRAIN_AND_LOOK, world_size=4)
        for layout, parallel in OF_FOUR.items()
    ]
    scenarios += [scenario(f"link {name}", *link(folder, models, name), world_size=4) for name in OF_FOUR]
    for kind in HYBRID:
        spec = fsdp(models["untied"], actor__backend=kind, actor__parallel={"replicate": 2}, actor__replicas=4, **FULL)
        verbs = [*TRAIN_AND_LOOK, ["publish", 2], ["save", str(folder / f"{kind} hybrid"), 2]]
        scenarios.append(scenario(f"{kind} hybrid", spec, verbs, world_size=4))
    (folder / "four").mkdir()
    return run_ranks(folder / "four", 4, scenarios)


@pytest.fixture(scope="module")
def pair(folder, models, four):
    """What each of two ranks saw, by scenario; the links of the chain after those of four."""
    scenarios = [
        scenario(
            f"{layout} {changes} {model}",
            of_two(models[model], LAYOUTS[layout], **CHANGES[changes]),
            TRAIN_AND_LOOK,
            world_size=2,
        )
        for layout, (changes, model) in PAIRED
    ]
    for layout, parallel in LAYOUTS.items():
        spec = of_two(models["untied"], parallel, actor__microBatchTokens=32, **CRITIC)
        saved = str(folder / f"{layout} saved")
        half = of_two(models["tied"], parallel, model__dtype="bfloat16")
        out = str(folder / f"{layout} exported")
        verbs = {
            "through": (
                spec,
                [["export", out], ["train", 1], ["save", saved, 1], ["offload"], ["train", 2], ["state"]],
            ),
            "resumed": (spec, [["load", saved], ["train", 2], ["poison"], ["train", 3], ["state"]]),
            # Stages that are in different micro-batches cannot leave together: only before the first one.
            "left": (spec, [["leave", 1, 0 if "pipeline" in parallel else 2], ["train", 1], ["train", 2], ["state"]]),
            "published": (half, [["train", 1], ["publish", 1]]),
        }
        scenarios += [scenario(f"{layout} {name}", spec, verbs, world_size=2) for name, (spec, verbs) in verbs.items()]
    whole = of_two(models["untied"], {}, actor__microBatchTokens=32, actor__optimizer__distributed=False, **CRITIC)
    scenarios.append(scenario("whole", whole, [["train", 1], ["offload"], ["train", 2], ["state"]], world_size=2))
    lopsided = scenario("of rank 0", of_two(models["untied"], {}, **FULL), TRAIN_AND_LOOK, world_size=2)
    scenarios.append(lopsided | {"groups": [[0, 1, 2, 3], []]})
    links = ("fsdp2 of two", "fsdp1 of two", *LAYOUTS, "data 2 whole")
    scenarios += [scenario(f"link {name}", *link(folder, models, name), world_size=2) for name in links]
    # The last one: the process group is of no use after it.
    lost = of_two(models["tied"], {"tensor": 2})
    scenarios.append(scenario("lost", lost, [["die", 1], ["train", 1]], world_size=2))
    return run_ranks(folder, 2, scenarios)


def sums(metrics: dict) -> dict:
    """Return the metrics that are equal on all ranks."""
    return {name: value for name, value in metrics.items() if not name.startswith(NOT_SUMS)}


@pytest.mark.parametrize(
    ("layout", "case"), PAIRED, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_two_ranks_train_like_fsdp2(reference, pair, layout, case):
    seen = [rank[f"{layout} {' '.join(case)}"] for rank in pair]
    assert_trained_alike(seen[0], reference(*case))
    assert list(map(sums, seen[0]["metrics"])) == list(map(sums, seen[1]["metrics"])) and seen[1]["state"] == {}


def test_a_data_rank_without_groups_trains_along_with_the_other(reference, pair):
    assert_trained_alike(pair[0]["of rank 0"], reference("full", "untied"))
    assert pair[1]["of rank 0"]["counts"] == pair[0]["of rank 0"]["counts"]


def test_a_rank_that_dies_inside_a_step_is_named_to_the_one_that_shares_its_layers(pair):
    assert "lost" not in pair[1] and pair[0]["lost"]["error"].startswith("InfrastructureError")
    assert "missing: rank 1" in pair[0]["lost"]["error"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_resumed_ranks_repeat_the_uninterrupted_ones_bit_for_bit_and_a_skipped_step_changes_nothing(pair, layout):
    through, resumed = (pair[0][f"{layout} {name}"] for name in ("through", "resumed"))
    assert resumed["bits"] == through["bits"]
    assert sums(resumed["metrics"][0]) == sums(through["metrics"][1])
    assert through["counts"] == {"attempted": 2, "applied": 2, "skipped": 0, "empty": 0}
    for rank in pair:
        assert rank[f"{layout} resumed"]["counts"] == {"attempted": 3, "applied": 2, "skipped": 1, "empty": 0}
        assert rank[f"{layout} resumed"]["critic"] == rank[f"{layout} through"]["critic"]
    assert any(rank[f"{layout} through"]["critic"] for rank in pair)


def test_data_ranks_that_share_the_optimizer_have_half_the_moments_and_train_as_with_all(pair):
    shared, whole = ([rank[name] for rank in pair] for name in ("data 2 through", "whole"))
    for one, two in zip(shared[0]["metrics"], whole[0]["metrics"], strict=True):
        assert sums(one) == pytest.approx(sums(two), rel=1e-6, abs=1e-6)
    for name, values in whole[0]["state"].items():
        assert shared[0]["state"][name] == pytest.approx(values, abs=1e-6), name
    held = [seen["moment_bytes"] for seen in shared]
    assert sum(held) == whole[0]["moment_bytes"] == whole[1]["moment_bytes"] and max(held) < 0.55 * sum(held)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_export_the_bits_of_the_source_and_publish_what_they_have(folder, models, pair, layout):
    assert_same_tensors(folder / f"{layout} exported", models["untied"])
    first, second = (rank[f"{layout} published"] for rank in pair)
    assert first["reported"] and first["differ"] == [] and not second["reported"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_leave_a_step_together_and_can_do_it_again(pair, layout):
    for rank in pair:
        through, left = rank[f"{layout} through"], rank[f"{layout} left"]
        assert left["metrics"][0] is None and left["counts"] == through["counts"] and left["bits"] == through["bits"]


@pytest.mark.parametrize("layout", OF_FOUR)
def test_four_ranks_in_both_directions_train_like_fsdp2(reference, four, layout):
    assert_trained_alike(four[0][layout], reference("full", "untied"))
    assert all(rank[layout]["counts"] == four[0][layout]["counts"] for rank in four)


def test_a_checkpoint_keeps_its_bits_through_every_layout_and_backend_and_each_goes_on_alike(
    folder, models, four, pair
):
    links = {
        name: [rank[f"link {name}"] for rank in ranks]
        for ranks in (four, pair)
        for name in CHAIN
        if f"link {name}" in ranks[0]
    }
    links |= {name: [run_here(name, *link(folder, models, name))] for name in CHAIN if name not in links}
    seen = {name: ranks[0] for name, ranks in links.items()}
    assert seen.keys() == set(CHAIN) and not any("error" in one for one in seen.values())
    first, counters = stored(folder / "chain 0"), json.loads((folder / "chain 0" / "actor.json").read_text())
    expected = seen[CHAIN[0]]["metrics"][-1]
    for at, name in enumerate(CHAIN):
        again, beside = stored(folder / f"chain {at}"), folder / f"chain {at} beside"
        written = {file: digest for rank in links[name] for file, digest in rank["saved"].items()}
        assert written == digests(beside) == digests(folder / f"chain {at}"), f"{name} saved while it trained on"
        assert again.keys() == first.keys(), name
        assert [key for key, tensor in first.items() if not torch.equal(again[key], tensor)] == [], name
        found = json.loads((folder / f"chain {at}" / "actor.json").read_text())
        assert found | {"world_size": 0} == counters | {"world_size": 0}, name
        for metric in ("actor/loss", "actor/value_loss", "actor/grad_norm", "actor/lr"):
            assert seen[name]["metrics"][-1][metric] == pytest.approx(expected[metric], rel=1e-6, abs=1e-6), name


def digests(checkpoint: Path) -> dict[str, str]:
    """Return the digest of each file of a checkpoint."""
    return {name: file_digest(path) for name, path in relative_files(checkpoint)}


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a checkpoint, each element of which is in one file."""
    boxes: dict[str, list] = {}
    for file in checkpoint.glob("*/*.safetensors"):
        with safe_open(file, framework="pt") as reader:
            offsets = json.loads(reader.metadata()[SHARDING])
            for name in offsets:
                boxes.setdefault(name, []).append((offsets[name]["saved_offsets"], reader.get_tensor(name)))
    whole = {}
    for name, parts in boxes.items():
        ends = [[start + n for start, n in zip(offset, tensor.shape, strict=True)] for offset, tensor in parts]
        whole[name] = torch.full([max(axis) for axis in zip(*ends, strict=True)], torch.nan)
        for (offset, tensor), end in zip(parts, ends, strict=True):
            place = whole[name][tuple(map(slice, offset, end))]
            assert place.isnan().all(), f"{name} in more than one file"
            place.copy_(tensor)
        assert not whole[name].isnan().any(), f"{name} not whole"
    return whole


@pytest.mark.parametrize("kind", HYBRID)
def test_two_copies_over_two_ranks_each_train_publish_and_save_like_one_rank(folder, models, reference, four, kind):
    seen = [rank[f"{kind} hybrid"] for rank in four]
    assert_trained_alike(seen[0], reference("full", "untied"))
    assert all(one["counts"] == seen[0]["counts"] for one in seen)
    assert [one["reported"] for one in seen] == [True, False, False, False] and seen[0]["differ"] == []
    written = {path.name[:11] for path in (folder / f"{kind} hybrid").rglob("*.safetensors")}
    assert written == {"shard-00001", "shard-00002"}, "the second copy writes nothing"
    loaded = run_here("one", fsdp(models["untied"]), [["load", str(folder / f"{kind} hybrid")], ["state"]])
    assert loaded["bits"] == seen[0]["bits"]


@pytest.mark.parametrize(("changes", "model"), CASES, ids=lambda value: value)
def test_one_rank_trains_like_fsdp2_and_exports_the_bits_of_the_source(folder, models, reference, changes, model):
    out = folder / f"{changes} {model} exported"
    ours = run_here("one", megatron(models[model], **CHANGES[changes]), [["export", str(out)], *TRAIN_AND_LOOK])
    assert_trained_alike(ours, reference(changes, model))
    assert_same_tensors(out, models[model])


def test_half_precision_trains_nearly_the_same_loss_and_resumes_from_its_float32_weights(folder, models, reference):
    spec = megatron(models["tied"], model__dtype="bfloat16", **APART)
    verbs = [["train", 1], ["save", str(folder / "half"), 1], ["train", 2], ["state"]]
    through = run_here("through", spec, verbs)
    expected = reference("critic apart", "tied")["metrics"][0]
    for name in ("actor/policy_loss", "actor/value_loss"):
        assert through["metrics"][0][name] == pytest.approx(expected[name], abs=2e-2)
    resumed = run_here("resumed", spec, [["load", str(folder / "half")], ["train", 2], ["state"]])
    assert resumed["bits"] == through["bits"] and resumed["counts"] == through["counts"]


def test_a_save_killed_at_any_write_leaves_whole_checkpoints_only(tmp_path, models, monkeypatch):
    class Killed(BaseException):
        pass

    actor, sync, writes = Rank(megatron(models["untied"]), [[]], 0, 1).actor, os.fsync, itertools.count(1)

    def dying(descriptor):
        if next(writes) == attempt:
            raise Killed
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", dying)
    unseen = 0
    for attempt in itertools.count(1):
        writes, store = itertools.count(1), CheckpointStore(tmp_path, keep=2)
        with contextlib.suppress(Killed):
            staging = store.begin(attempt, attempt)
            actor.save_checkpoint(str(staging), attempt)
            store.publish(staging)
            break
        found = CheckpointStore(tmp_path, keep=2).checkpoints()
        for checkpoint in found:
            checkpoint.manifest.verify(checkpoint.path)
        unseen += attempt not in [checkpoint.step for checkpoint in found]
    files = [path for path in (tmp_path / f"step-{attempt:08d}").rglob("*") if path.is_file()]
    assert {file.parent.name for file in files} == {"model", "optimizer", "rng", f"step-{attempt:08d}"}
    assert unseen >= len(files), "a kill after each file"


def test_what_megatron_gets_help_with_on_a_cpu_is_known(models, monkeypatch):
    """An upgrade of megatron-core that asks for more, or for less, shows here."""
    from rl_core.actors.megatron import cpu

    monkeypatch.setattr(cpu, "helped", set())
    run_here("helped", megatron(models["tied"], **CHANGES["recomputed"]), [["train", 1], ["score"]])
    assert cpu.helped == HELPED


def test_a_float32_head_gives_the_log_probabilities_of_exact_logits(models):
    half = {"model__dtype": "bfloat16", "model__float32Head": True}
    rank = Rank(megatron(models["untied"], **half), [[]], 0, 1)
    backend, stage = rank.actor.backend, rank.actor.manager.stages[0].module
    ids = torch.randint(24, (1, 9), generator=torch.Generator().manual_seed(3))
    columns = Columns(input_ids=ids, loss_mask=torch.ones_like(ids, dtype=torch.bool))
    batch = backend._pack(StepRows(numbers=[0], lengths=[9], columns=columns))
    hidden = torch.randn(9, 1, 32, generator=torch.Generator().manual_seed(4)).bfloat16()
    found = backend._numbers(hidden, batch, stage, Outputs()).log_probs[0, 1:]
    logits = hidden[:, 0].double() @ stage.output_weight.detach()[:24].double().T
    exact = logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    assert (found - exact).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reference_that_was_renewed_is_resumed_by_megatron_and_by_fsdp(models, folder, dtype):
    changes = {"model__dtype": dtype, "algorithm__loss": {"klCoefficient": 0.1}, "algorithm__referenceUpdateSteps": 2}
    saved, found = folder / f"{dtype} renewed", []
    for make, begins in ((megatron, 1), (megatron, 4), (fsdp, 4)):
        rank = Rank(make(models["qwen3"], **changes), [[0, 1, 2, 3]], 0, 1)
        if begins > 1:
            rank.actor.load_checkpoint(str(saved))
        for step in range(begins, 4):
            rank.train(step)
        if begins == 1:
            rank.actor.save_checkpoint(str(saved), 3)
        rank.actor.load_batch([make_record(0)])
        found.append(rank.actor.compute_ref_log_probs(rank.actor.engine.prepared.collated))
    assert torch.equal(found[1], found[0])
    # The two backends round hidden states in another order.
    assert torch.allclose(found[2], found[0], atol=1e-5 if dtype == "float32" else 5e-2)


@pytest.mark.parametrize("own", [{}, {"attention_factor": 0.7}, {"mscale": 1.0, "mscale_all_dim": 0.4}], ids=str)
def test_yarn_is_that_of_transformers(tmp_path, own):
    """Beyond the length that the model was trained with, too."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    model = make_model(tmp_path / "model", family="qwen3", rope_parameters=rope | own)
    ids = torch.randint(24, (50,), generator=torch.Generator().manual_seed(3)).tolist()
    ours, theirs = (Rank(make(model), [[]], 0, 1).actor.score(ids, 1) for make in (megatron, fsdp))
    assert ours == pytest.approx(theirs, abs=1e-5)
    plain = make_model(tmp_path / "plain", family="qwen3")
    assert Rank(megatron(plain), [[]], 0, 1).actor.score(ids, 1) != pytest.approx(theirs, abs=1e-3)
