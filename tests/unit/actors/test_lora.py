"""Adapters: gradients as of peft, frozen weights, merged weights, checkpoints, and the base as the reference policy."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl_core.actors import hf, lora
from rl_core.actors.critic import HEAD
from rl_core.actors.fsdp.manager import FSDPModelManager
from rl_core.actors.fsdp.strategy import FSDP2Strategy
from rl_core.api.errors import ConfigError, DataError
from rl_core.api.lora import LoraSpec
from rl_core.weights.manifest import is_adapter_name
from tests import actor_samples
from tests.unit.actors.actor_steps import gradients, sums, train

ADAPTERS = {"rank": 4, "alpha": 12.0}
SCALE = 3.0
CPU = torch.device("cpu")


@pytest.fixture
def make_lora(make_actor):
    """Make an actor with adapters that are not zero."""

    def make(spec=ADAPTERS, **changes):
        actor = make_actor(model__lora=spec, **changes)
        fill(actor.manager.model)
        return actor

    return make


def fill(model):
    """Give B of each adapter some values."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if lora.B in name:
                stored = getattr(parameter, "_local_tensor", parameter)
                stored.copy_(torch.randn(stored.shape, generator=generator) * 0.05)


def adapted(parameters):
    """Yield (name of the weight, W, A, B) of each layer with an adapter."""
    for name, up in parameters.items():
        if name.endswith(f".{lora.B}.weight"):
            layer = name.removesuffix(f".{lora.B}.weight")
            yield f"{layer}.weight", parameters[f"{layer}.weight"], parameters[f"{layer}.{lora.A}.weight"], up


def saved_merged(actor, folder):
    """Write the merged model of an actor; return its folder."""
    actor.export_hf(str(folder))
    return folder


def given(actor, *, needs_base):
    """Return what the publisher gets, by name."""
    source = actor.manager.publish_source(1 << 20, needs_base=needs_base)
    tensors = {
        source.entries[index].name: tensor.clone()
        for bucket in source.buckets("cpu")
        for index, tensor in zip(bucket.place.entries, bucket.tensors, strict=True)
    }
    source.finish()
    return tensors


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "olmo2", "gemma"])
def test_logits_and_gradients_are_those_of_peft(family, tmp_path):
    folder = actor_samples.make_model(tmp_path / family, family=family, tied=False)
    ours = hf.build_model(hf.read_config(folder), dtype=torch.float32)
    lora.attach_adapters(ours, LoraSpec(rank=4, alpha=12.0))
    hf.materialize(ours, CPU, {})
    hf.load_weights(ours, folder, {})
    stored = hf.named_parameters(ours)
    lora.initialize({name: [hf.LocalSlice.of_whole(tensor)] for name, tensor in stored.items()}, 5)
    fill(ours)
    ours.double()
    base = AutoModelForCausalLM.from_pretrained(folder)
    settings = LoraConfig(r=4, lora_alpha=12, target_modules=list(LoraSpec(rank=4).targets), bias="none")
    theirs = get_peft_model(base, settings).double()
    pairs = []
    for name, _, *adapter in adapted(dict(ours.named_parameters())):
        layer = theirs.base_model.model.get_submodule(name.removesuffix(".weight"))
        pairs += zip(adapter, (layer.lora_A["default"].weight, layer.lora_B["default"].weight), strict=True)
    assert len(pairs) == 28
    with torch.no_grad():
        for mine, their in pairs:
            their.copy_(mine)
    ids = torch.randint(0, 24, (3, 11), generator=torch.Generator().manual_seed(3))
    expected, got = theirs(input_ids=ids).logits, ours(ids).logits
    assert torch.allclose(got, expected, rtol=0, atol=1e-6)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    for logits in (expected, got):
        (logits.log_softmax(-1) * weight).sum().backward()
    for mine, their in pairs:
        largest = float(their.grad.abs().max())
        assert largest > 1e-3 and torch.allclose(mine.grad, their.grad, rtol=1e-6, atol=1e-6 * largest)


@pytest.mark.parametrize("backend", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_adapters_are_trained_and_only_they_have_moments(make_actor, records, backend, dtype):
    actor = make_actor(model__lora=ADAPTERS, model__dtype=dtype, actor__backend=backend)
    before = {name: tensor.clone() for name, tensor in hf.named_parameters(actor.manager.model).items()}
    for step in (1, 2):
        assert train(actor, records, step)["actor/grad_norm"] > 0
    after = hf.named_parameters(actor.manager.model)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {name for name in after if is_adapter_name(name)}
    assert len(actor.manager.optimizer.state) == len(changed) == 28


FROZEN = {
    "norms of heads": {"family": "qwen3"},
    "norms after layers": {"family": "olmo2"},
    "float32 head": {"model__float32Head": True, "actor__gradientCheckpointing": True},
    "critic": {"algorithm__name": "gae", "algorithm__critic": {"separate": True}, "actor__criticWarmupSteps": 1},
}


@pytest.mark.parametrize("changes", FROZEN.values(), ids=FROZEN)
def test_frozen_weights_in_half_precision_train_the_bits_of_frozen_weights_in_float32(
    make_lora, records, tmp_path, monkeypatch, changes
):
    changes = changes | {"model__dtype": "bfloat16"}
    if family := changes.pop("family", None):
        changes["model__path"] = str(actor_samples.make_model(tmp_path / family, family=family))
    half = make_lora(**changes)
    monkeypatch.setattr(FSDP2Strategy, "allows_several_types", False)
    monkeypatch.setattr(FSDPModelManager, "_round_frozen", lambda *_: None)
    whole = make_lora(**changes)
    types = {name: one.dtype for name, one in hf.named_parameters(half.manager.model).items()}
    trained = {name for name in types if is_adapter_name(name) or HEAD in name}
    assert {types[name] for name in trained} == {torch.float32}
    assert {types[name] for name in types.keys() - trained} == {torch.bfloat16}
    for step in (1, 2, 3):
        one, two = (sums(train(actor, records, step)) for actor in (half, whole))
        assert one == two and one["actor/grad_norm"] > 0
    ours, theirs = (hf.named_parameters(actor.manager.model) for actor in (half, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in trained)


def test_a_float32_folder_is_published_and_exported_alike_by_both_kinds_in_half_precision(make_lora, tmp_path):
    exported, offered = [], []
    for backend in ("fsdp1", "fsdp2"):
        actor = make_lora(model__dtype="bfloat16", actor__backend=backend)
        exported.append(load_file(saved_merged(actor, tmp_path / backend) / "model.safetensors"))
        offered.append(given(actor, needs_base=True))
    for one, two in (exported, offered):
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_the_gradient_of_a_step_is_that_of_the_merged_weights_through_the_product(
    make_lora, make_actor, records, tmp_path
):
    actor = make_lora()
    merged = make_actor(model__path=str(saved_merged(actor, tmp_path / "merged")))
    (expected_metrics, whole), (metrics, parts) = gradients(merged, records), gradients(actor, records)
    assert metrics["actor/loss"] == pytest.approx(expected_metrics["actor/loss"], abs=1e-6)
    for name, _, down, up in adapted(dict(actor.manager.model.named_parameters())):
        layer, gradient = name.removesuffix(".weight"), whole[name]
        for part, expected in ((lora.A, SCALE * up.T @ gradient), (lora.B, SCALE * gradient @ down.T)):
            assert torch.allclose(parts[f"{layer}.{part}.weight"], expected, atol=1e-6), (layer, part)


def test_adapters_start_as_nothing_and_alike_for_a_seed(make_actor, model_folder):
    one, same, other = (
        make_actor(model__lora=ADAPTERS, algorithm__seed=seed).manager.get_model_state_dict(True, False)
        for seed in (1, 1, 2)
    )
    base = load_file(model_folder / "model.safetensors")
    merged = make_actor(model__lora=ADAPTERS).manager.get_model_state_dict(True, True)
    assert all(torch.equal(merged[name], tensor) for name, tensor in base.items())
    name = f"model.layers.1.mlp.down_proj.{lora.A}.weight"
    first, second, third = (getattr(state[name], "_local_tensor", state[name]) for state in (one, same, other))
    assert torch.equal(first, second) and not torch.equal(first, third)
    assert first.abs().max() <= 48**-0.5 and first.std() == pytest.approx(48**-0.5 / 3**0.5, rel=0.2)


def test_peft_reads_the_export_and_merges_it_to_the_very_weights_of_the_merged_export(
    make_lora, model_folder, records, tmp_path
):
    actor = make_lora()
    train(actor, records)
    folder = saved_merged(actor, tmp_path / "merged")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), folder / "adapter")
    ids = torch.randint(0, 24, (3, 11))
    with torch.no_grad():
        expected = actor.manager.model(ids).logits
        assert torch.allclose(theirs(input_ids=ids).logits, expected, atol=1e-5)
        assert torch.allclose(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, expected, atol=1e-5)
    weights = theirs.merge_and_unload().state_dict()
    merged = load_file(folder / "model.safetensors")
    assert merged and all(torch.equal(tensor, weights[name]) for name, tensor in merged.items())


def test_the_exported_adapter_has_the_names_and_settings_of_peft_and_makes_the_merged_weights(
    make_lora, model_folder, tmp_path
):
    actor = make_lora(ADAPTERS | {"layers": [1], "targets": ["up_proj", "q_proj"]})
    merged = load_file(saved_merged(actor, tmp_path / "merged") / "model.safetensors")
    config = json.loads((tmp_path / "merged/adapter/adapter_config.json").read_text())
    expected = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(model_folder),
        "r": 4,
        "lora_alpha": 12.0,
        "target_modules": ["q_proj", "up_proj"],
        "layers_to_transform": [1],
    }
    assert config.items() >= expected.items()
    base, tensors = (
        load_file(model_folder / "model.safetensors"),
        load_file(tmp_path / "merged/adapter/adapter_model.safetensors"),
    )
    assert len(tensors) == 4
    for layer in ("model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"):
        down, up = (tensors[f"base_model.model.{layer}.lora_{part}.weight"] for part in "AB")
        name = f"{layer}.weight"
        assert up.any() and torch.allclose(merged[name], base[name] + SCALE * up @ down, atol=1e-6)


def test_the_reference_policy_is_the_model_without_adapters_and_costs_no_copy(make_lora, make_actor, records):
    kl = {"klCoefficient": 0.1}
    actor, base = make_lora(algorithm__loss=kl), make_actor()
    actor.load_batch(records)
    actor.compute_log_probs()
    batch = actor.engine.prepared.collated
    with_adapters, reference = actor.compute_log_probs(batch), actor.compute_ref_log_probs(batch)
    assert torch.equal(reference, base.compute_log_probs(batch))
    assert not torch.allclose(reference, with_adapters, atol=1e-3)
    assert torch.equal(actor.compute_log_probs(batch), with_adapters)
    assert isinstance(actor.manager._reference, lora.DisabledAdapters)


def test_a_checkpoint_has_adapters_only_and_the_run_continues_with_the_same_bits(make_actor, records, tmp_path):
    actor = make_actor(model__lora=ADAPTERS)
    train(actor, records)
    actor.save_checkpoint(str(tmp_path / "saved"), 1)
    (shard,) = (tmp_path / "saved/model").glob("*.safetensors")
    assert all(is_adapter_name(name) for name in load_file(shard)) and len(load_file(shard)) == 28
    resumed = make_actor(model__lora=ADAPTERS)
    resumed.load_checkpoint(str(tmp_path / "saved"))
    for one in (actor, resumed):
        train(one, records, 2)
    ours, theirs = (one.manager.get_model_state_dict(True, True) for one in (actor, resumed))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_of_other_adapters_or_of_another_base_is_refused_by_name(
    make_actor, model_folder, records, tmp_path
):
    actor, saved, whole = make_actor(model__lora=ADAPTERS), str(tmp_path / "saved"), str(tmp_path / "whole")
    actor.save_checkpoint(saved, 1)
    make_actor().save_checkpoint(whole, 1)
    train(actor, records)
    other = saved_merged(actor, shutil.copytree(model_folder, tmp_path / "other"))
    refused = [
        ({"model__lora": ADAPTERS | {"rank": 5}}, saved, "other values of rank"),
        ({"model__lora": ADAPTERS | {"alpha": 8.0}}, saved, r"other values of alpha: \[12\.0\]"),
        ({"model__lora": ADAPTERS | {"targets": ["q_proj"]}}, saved, "other values of targets"),
        (
            {"model__lora": ADAPTERS, "model__path": str(other)},
            saved,
            "on which the checkpoint's adapters were trained",
        ),
        ({"model__lora": ADAPTERS}, whole, "must hold adapters only .* got all weights"),
        ({}, saved, "must hold all weights .* got adapters only"),
    ]
    for changes, path, message in refused:
        with pytest.raises(DataError, match=message):
            make_actor(**changes).load_checkpoint(path)


def test_layers_and_targets_select_the_adapters(make_actor):
    actor = make_actor(model__lora={"rank": 2, "layers": [1], "targets": ["k_proj", "up_proj"]})
    names = {name.rpartition(".lora_")[0] for name in dict(actor.manager.model.named_parameters()) if "lora_" in name}
    assert names == {"model.layers.1.self_attn.k_proj", "model.layers.1.mlp.up_proj"}
    with pytest.raises(ConfigError, match=r"model\.lora\.layers must be below 2, .*got \[2, 5\]"):
        make_actor(model__lora={"rank": 2, "layers": [0, 2, 5]})


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
def test_a_critic_trains_its_head_and_adapters_of_its_own(make_actor, records, separate):
    actor = make_actor(
        model__lora=ADAPTERS,
        algorithm__name="gae",
        algorithm__critic={"separate": separate},
        actor__criticWarmupSteps=1,
    )
    before = {name: tensor.clone() for name, tensor in hf.named_parameters(actor.manager.model).items()}
    for step in (1, 2, 3):
        train(actor, records, step)
    after = hf.named_parameters(actor.manager.model)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {name for name in after if is_adapter_name(name) or HEAD in name}
    assert len(changed) == 28 * (1 + separate) + 1
    assert not any("lora" in name or HEAD in name for name in actor.manager.get_model_state_dict(True, True))


def test_dropout_of_adapters_is_applied_in_training_and_needs_the_trainers_switch(make_actor, make_spec, records):
    spec = ADAPTERS | {"dropout": 0.5}
    actor = make_actor(model__lora=spec, actor__dropout=True, algorithm__recomputeLogProbs=False)
    fill(actor.manager.model)
    ids = torch.randint(0, 24, (1, 9))
    with torch.no_grad():
        assert not torch.equal(*(actor.manager.model(ids).logits for _ in range(2)))
        with lora.DisabledAdapters(actor.manager.model).swapped():
            assert torch.equal(*(actor.manager.model(ids).logits for _ in range(2)))
    with pytest.raises(ValueError, match=r"model\.lora\.dropout needs actor\.dropout true, got 0\.5"):
        make_spec(model__lora=spec)


@pytest.mark.parametrize("trains_a", [True, False])
def test_a_float32_layer_keeps_its_input_and_its_weights_alone_for_the_backward_pass(trains_a):
    layer = torch.nn.Sequential()
    layer.add_module("layers", torch.nn.ModuleList([torch.nn.ModuleDict({"q_proj": torch.nn.Linear(6, 8)})]))
    lora.attach_adapters(layer, LoraSpec(rank=2, targets=["q_proj"]))
    adapted_layer = layer.layers[0]["q_proj"]
    for parameter in (adapted_layer.weight, adapted_layer.bias):
        parameter.requires_grad_(False)
    adapted_layer.lora_A.requires_grad_(trains_a)
    inputs, kept = torch.randn(5, 6, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.data_ptr()), lambda nothing: nothing
    ):
        adapted_layer(inputs)
    given = [inputs, adapted_layer.weight, adapted_layer.lora_A.weight, adapted_layer.lora_B.weight]
    assert set(kept) == {tensor.data_ptr() for tensor in given}
    adapted_layer(inputs).sum().backward()
    assert (adapted_layer.lora_A.weight.grad is None) is not trains_a
    assert adapted_layer.lora_B.weight.grad is not None and adapted_layer.weight.grad is None


def test_the_publisher_gets_base_and_adapters_first_and_adapters_only_afterwards(make_lora, model_folder):
    actor = make_lora()
    whole, adapters = (given(actor, needs_base=needs_base) for needs_base in (True, False))
    base = load_file(model_folder / "model.safetensors")
    assert set(whole) == set(base) | set(adapters) and len(adapters) == 28
    assert all(torch.equal(whole[name], tensor) for name, tensor in {**base, **adapters}.items())
