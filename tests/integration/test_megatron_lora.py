"""Adapters under megatron-core: the gradients of the written formula, and what FSDP2 trains, saves and publishes, in every layout."""

import importlib
from pathlib import Path

import pytest
import torch
from torch.func import functional_call

from rl_core.actors.checkpoint_export import CheckpointExport
from rl_core.actors.lora import A, B
from rl_core.actors.manager import validated
from rl_core.actors.megatron.convert import SEPARATE, global_parameters
from rl_core.actors.megatron.packing import PackedSequenceParams
from rl_core.actors.rows import Columns, StepRows
from rl_core.weights.manifest import is_adapter_name
from tests.actor_samples import make_model, make_spec
from tests.integration.fsdp_harness import run_here, run_ranks, scenario
from tests.integration.fsdp_rank import Rank
from tests.integration.test_megatron_ranks import LAYOUTS, OF_FOUR, assert_trained_alike, stored

ADAPTERS = {"rank": 3, "alpha": 12.0}
SCALE = 4.0
FULL = {
    "algorithm__optimizerStepsPerBatch": 2,
    "algorithm__updateEpochs": 2,
    "algorithm__recomputeLogProbs": True,
    "algorithm__loss": {"klCoefficient": 0.1, "entropyCoefficient": 0.01},
}
CHANGES = {
    "full": FULL,
    # Of two stages one has no adapter, and layers in it have adapters of a part of their outputs.
    "some": {"model__lora": ADAPTERS | {"layers": [3], "targets": ["up_proj", "v_proj", "o_proj"]}},
    "recomputed": {"actor__gradientCheckpointing": True},
    "selective": {
        "actor__gradientCheckpointing": True,
        "actor__gradientCheckpointingMode": "selective",
        "model__lora": ADAPTERS | {"targets": ["up_proj"]},
    },
    "critic": {"algorithm__name": "gae", "algorithm__critic": {"lam": 0.9}, "actor__criticWarmupSteps": 1},
    "critic apart": {
        "algorithm__name": "gae",
        "algorithm__critic": {"separate": True, "lam": 0.9},
        "algorithm__rewardKlCoefficient": 0.1,
    },
}
TWO = LAYOUTS | {"tensor 2": {"tensor": 2}}
PAIRED = [
    *((layout, "full") for layout in TWO),
    *(("tensor 2 sequence", changes) for changes in ("recomputed", "critic", "critic apart")),
    *(("interleaved 2", changes) for changes in ("some", "selective")),
    ("pipeline 2", "some"),
    ("data 2", "some"),
]
TRAIN_AND_LOOK = [["train", 1], ["train", 2], ["score"], ["state"]]


def spec_of(model: Path, parallel: dict | None = None, **changes) -> dict:
    """Return a job; with `parallel` of a Megatron trainer on two ranks."""
    ranks = (
        {} if parallel is None else {"actor__parallel": parallel, "actor__replicas": 2, "actor__backend": "megatron"}
    )
    # The large eps is explained in test_megatron_ranks.py.
    rates = {"actor__optimizer": {"learningRate": 1e-2, "eps": 1e-4}}
    return make_spec(model, **{"model__lora": ADAPTERS} | rates | ranks | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def model(folder):
    return make_model(folder / "model", num_hidden_layers=4)


@pytest.fixture(scope="module")
def reference(model):
    """What FSDP2 on one rank sees, by changes."""
    return {name: run_here(name, spec_of(model, **changes), TRAIN_AND_LOOK) for name, changes in CHANGES.items()}


@pytest.fixture(scope="module")
def pair(folder, model):
    """What each of two ranks saw, by scenario."""
    scenarios = [
        scenario(f"{layout} {name}", spec_of(model, TWO[layout], **CHANGES[name]), TRAIN_AND_LOOK, world_size=2)
        for layout, name in PAIRED
    ]
    whole = spec_of(model, {}, actor__optimizer={"learningRate": 1e-2, "eps": 1e-4, "distributed": False}, **FULL)
    scenarios.append(scenario("data 2 whole", whole, TRAIN_AND_LOOK, world_size=2))
    for at, (layout, parallel) in enumerate(TWO.items()):
        saved, beside = str(folder / layout), str(folder / list(TWO)[at - 1])
        spec = spec_of(model, parallel, **CHANGES["critic apart"])
        verbs = [["train", 1], ["save", saved, 1], ["offload"], ["train", 2], ["state"]]
        scenarios.append(scenario(f"{layout} through", spec, verbs, world_size=2))
        resumed = [["load", saved], ["train", 2], ["state"]]
        scenarios.append(scenario(f"{layout} resumed", spec, resumed, world_size=2))
        if at:
            moved = [["load", beside], ["save", f"{saved} moved", 1], ["offer", True], ["offer", False]]
            moved += [["export", f"{saved} exported"], ["train", 2], ["state"]]
            scenarios.append(scenario(f"{layout} moved", spec, moved, world_size=2))
    dropped = {"model__lora": ADAPTERS | {"dropout": 0.5}, "actor__dropout": True}
    for layout in ("tensor 2", "tensor 2 sequence", "pipeline 2"):
        spec = spec_of(model, TWO[layout], algorithm__recomputeLogProbs=False, **dropped)
        path = str(folder / f"{layout} dropped")
        verbs = [["train", 1], ["save", path, 1], ["train", 2], ["state"], ["copies"]]
        scenarios.append(scenario(f"{layout} dropout", spec, verbs, world_size=2))
        resumed = [["load", path], ["train", 2], ["state"]]
        scenarios.append(scenario(f"{layout} dropout resumed", spec, resumed, world_size=2))
    return run_ranks(folder, 2, scenarios)


@pytest.fixture(scope="module")
def four(folder, model):
    scenarios = [
        scenario(layout, spec_of(model, parallel, actor__replicas=4, **FULL), TRAIN_AND_LOOK, world_size=4)
        for layout, parallel in OF_FOUR.items()
    ]
    (folder / "four").mkdir()
    return run_ranks(folder / "four", 4, scenarios)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_and_gradients_are_those_of_the_written_formula(family, tmp_path):
    """In float64."""
    path = make_model(tmp_path / family, family=family, tied=False)
    rank = Rank(spec_of(path, actor__backend="megatron"), [[]], 0, 1)
    manager, backend, stage = rank.actor.manager, rank.actor.backend, rank.actor.manager.stages[0]
    module, generator = stage.module.double(), torch.Generator().manual_seed(11)
    parameters = global_parameters(module)
    with torch.no_grad():
        for name in (name for name in parameters if B in name.split(".")):
            parameters[name].copy_(torch.randn(parameters[name].shape, generator=generator) * 0.05)

    def by_name(values):
        """Return adapters, or what has their shapes, by Hugging Face name."""
        found = {}
        for name, tensor in values.items():
            found |= {key: box.tensor for key, (box,) in manager.cut.boxes(name, tensor.shape, tensor).items()}
        return found

    package = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    theirs = getattr(package, f"{family.capitalize()}ForCausalLM").from_pretrained(path).double()
    trained = {name: one for name, one in parameters.items() if one.requires_grad}
    leaves = {name: one.clone().requires_grad_() for name, one in by_name(trained).items()}
    assert all(map(is_adapter_name, leaves)) and len(leaves) == 28
    merged = {}
    for name in (name for name in leaves if A in name.split(".")):
        weight = name.replace(f".{A}", "")
        down, up = leaves[name], leaves[name.replace(A, B)]
        merged[weight] = theirs.get_parameter(weight).detach() + SCALE * up @ down
    ids = torch.randint(24, (1, 11), generator=torch.Generator().manual_seed(3))
    columns = Columns(input_ids=ids, loss_mask=torch.ones_like(ids, dtype=torch.bool))
    batch = backend._pack(StepRows(numbers=[0], lengths=[11], columns=columns))
    with manager.device_context():
        hidden = module(
            input_ids=batch.rows.input_ids,
            position_ids=batch.rows.position_ids,
            attention_mask=None,
            packed_seq_params=PackedSequenceParams.of(batch),
            tokens=ids.numel(),
            sent=ids.numel(),
        )
    got, expected = hidden[:, 0] @ module.output_weight.t(), functional_call(theirs, merged, (ids,)).logits[0]
    assert torch.allclose(got, expected, rtol=0, atol=1e-6)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    for logits in (expected, got):
        (logits.log_softmax(-1) * weight).sum().backward()
    for name, gradient in by_name({name: one.grad for name, one in trained.items()}).items():
        largest = float(leaves[name].grad.abs().max())
        assert largest > 1e-3
        assert torch.allclose(gradient, leaves[name].grad, rtol=1e-6, atol=1e-6 * largest), name


@pytest.mark.parametrize("changes", CHANGES)
def test_one_rank_trains_like_fsdp2(model, reference, changes):
    spec = spec_of(model, actor__backend="megatron", **CHANGES[changes])
    assert_trained_alike(run_here("one", spec, TRAIN_AND_LOOK), reference[changes])


@pytest.mark.parametrize(("layout", "changes"), PAIRED, ids=" ".join)
def test_two_ranks_train_like_fsdp2(reference, pair, layout, changes):
    assert_trained_alike(pair[0][f"{layout} {changes}"], reference[changes])


def test_data_ranks_that_do_not_share_the_optimizer_train_like_fsdp2(reference, pair):
    assert_trained_alike(pair[0]["data 2 whole"], reference["full"])


@pytest.mark.parametrize("layout", OF_FOUR)
def test_four_ranks_train_like_fsdp2(reference, four, layout):
    assert_trained_alike(four[0][layout], reference["full"])


@pytest.mark.parametrize("layout", TWO)
def test_resumed_ranks_repeat_the_uninterrupted_ones_bit_for_bit(pair, layout):
    for rank in pair:
        through, resumed = rank[f"{layout} through"], rank[f"{layout} resumed"]
        assert (resumed["bits"], resumed["critic"]) == (through["bits"], through["critic"])


@pytest.mark.parametrize("layout", list(TWO)[1:])
def test_a_checkpoint_of_another_layout_keeps_its_bits_and_is_published_and_exported_as_by_fsdp2(
    folder, model, pair, layout, tmp_path
):
    before = folder / list(TWO)[list(TWO).index(layout) - 1]
    kept, again = stored(before), stored(folder / f"{layout} moved")
    assert kept.keys() == again.keys() and all(torch.equal(again[name], kept[name]) for name in kept)
    assert any(name.startswith(f"{SEPARATE}.") for name in kept)
    spec = spec_of(model, **CHANGES["critic apart"])
    verbs = [["load", str(before)], ["offer", True], ["offer", False], ["train", 2]]
    theirs, ours = run_here("fsdp2", spec, verbs), pair[0][f"{layout} moved"]
    assert ours["offered"] == theirs["offered"]
    whole, adapters = ours["offered"]
    assert len(adapters) == 4 * 14 and all(map(is_adapter_name, adapters))
    assert adapters.items() < whole.items()
    assert ours["metrics"][0]["actor/grad_norm"] == pytest.approx(theirs["metrics"][0]["actor/grad_norm"], rel=1e-5)
    export = CheckpointExport(before, validated(spec))
    export.write_model(tmp_path)
    export.write_adapters(tmp_path / "adapter")
    for file in ("model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (folder / f"{layout} exported" / file).read_bytes() == (tmp_path / file).read_bytes(), file


@pytest.mark.parametrize("layout", ["tensor 2", "tensor 2 sequence", "pipeline 2"])
def test_dropout_is_repeated_by_a_resumed_run_and_keeps_the_copies_of_a_matrix_equal(reference, pair, layout):
    through, resumed = (pair[0][f"{layout} dropout{name}"] for name in ("", " resumed"))
    assert resumed["bits"] == through["bits"]
    norms = [one["metrics"][0]["actor/grad_norm"] for one in (through, reference["recomputed"])]
    assert norms[0] != pytest.approx(norms[1], rel=1e-2)
    if "tensor" in layout:
        copies = [rank[f"{layout} dropout"]["copies"] for rank in pair]
        assert copies[0] == copies[1] and len(copies[0]) == 4 * 7


@pytest.mark.parametrize("targets", [["q_proj"], ["up_proj", "down_proj"]], ids=" ".join)
def test_dropout_drops_inputs_of_the_adapters_alone(model, targets):
    spec = {"dropout": 0.5, "targets": targets} | ADAPTERS
    rank = Rank(spec_of(model, actor__backend="megatron", model__lora=spec, actor__dropout=True), [[]], 0, 1)
    manager = rank.actor.manager
    plain = Rank(spec_of(model, actor__backend="megatron"), [[]], 0, 1).actor
    ids = [1, 2, 3, 4, 5, 6]
    assert rank.actor.score(ids, 1) == plain.score(ids, 1), "B is 0"
    with torch.no_grad():
        for name, parameter in manager._parameters().items():
            if B in name.split("."):
                parameter.fill_(0.05)
    dropped = rank.actor.score(ids, 1)
    with manager._make_reference().swapped():
        assert rank.actor.score(ids, 1) == plain.score(ids, 1)
    for stage in manager.stages:
        stage.eval()
    assert rank.actor.score(ids, 1) != pytest.approx(dropped, abs=1e-3)


def test_half_precision_updates_publishes_and_saves_float32_adapters(model, folder):
    half = {"actor__backend": "megatron", "model__dtype": "bfloat16"}
    verbs = [["train", 1], ["save", str(folder / "half"), 1], ["offer", False], ["train", 2], ["state"]]
    through = run_here("through", spec_of(model, **half), verbs)
    resumed = run_here("resumed", spec_of(model, **half), [["load", str(folder / "half")], ["train", 2], ["state"]])
    assert resumed["bits"] == through["bits"]
    loaded = run_here(
        "fsdp2", spec_of(model, model__dtype="bfloat16"), [["load", str(folder / "half")], ["offer", False]]
    )
    assert loaded["offered"] == through["offered"]


def test_frozen_weights_have_no_gradients_and_no_moments(model):
    manager = Rank(spec_of(model, {}, actor__replicas=1), [[]], 0, 1).actor.manager
    trained = {name for name, one in manager._parameters().items() if one.requires_grad}
    assert trained == {name for name in manager._parameters() if is_adapter_name(name)} == set(manager._shards)
    adapters = sum(manager._parameters()[name].numel() for name in trained)
    assert adapters <= sum(buffer.numel() for buffer in manager._grad_buffers()) <= 1.1 * adapters
    assert sum(tensor.numel() for tensor in manager.moment_tensors()) == 2 * adapters
