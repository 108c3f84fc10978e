"""What the Megatron backend cannot do is told by name, before anything is started."""

import importlib
import json
import sys

import pytest

from rl_core.actors.guards import check, unsupported_settings
from rl_core.actors.manager import validated
from rl_core.api.errors import ConfigError
from tests.actor_samples import make_spec as make_mapping

DROPOUT = {"actor__dropout": True, "model__lora": {"dropout": 0.1}}


@pytest.fixture
def config(model_folder):
    return json.loads((model_folder / "config.json").read_text())


def test_a_job_it_can_train_is_not_refused_and_other_backends_are_not_asked(make_spec, config):
    assert list(unsupported_settings(make_spec(actor__backend="megatron"), config)) == []
    assert list(unsupported_settings(make_spec(), config | {"hidden_act": "gelu"})) == []
    assert list(unsupported_settings(make_spec(actor__backend="megatron", **DROPOUT), config)) == []


@pytest.mark.parametrize(("field", "reason"), [("context", "with Transformer Engine"), ("expert", "has experts")])
def test_what_megatron_core_cannot_share_here_is_refused_by_the_actor_itself_too(model_folder, field, reason):
    spec = make_mapping(model_folder, actor__backend="megatron", actor__replicas=2, actor__parallel={field: 2})
    with pytest.raises(ValueError, match=rf"{field} must be 1, got 2: .*{reason}"):
        validated(spec)


def of_two(**parallel):
    return {"actor__replicas": 2, "actor__parallel": parallel}


@pytest.mark.parametrize(
    ("changes", "model", "words"),
    [
        ({"actor__dropout": True}, {}, ["actor.dropout", "true"]),
        (DROPOUT, {"attention_dropout": 0.2}, ["actor.dropout", "attention_dropout 0.2", "fsdp2"]),
        (DROPOUT | {"algorithm__recomputeLogProbs": True}, {}, ["actor.dropout", "algorithm.recomputeLogProbs"]),
        ({}, {"architectures": ["MixtralForCausalLM"]}, ["architecture", "MixtralForCausalLM", "fsdp2"]),
        ({}, {"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({}, {"mlp_bias": True}, ["mlp_bias", "True"]),
        ({}, {"use_sliding_window": True}, ["use_sliding_window"]),
        ({}, {"architectures": ["LlamaForCausalLM"], "attention_bias": True}, ["attention_bias"]),
        ({}, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, ["rope_type", "dynamic", "yarn"]),
        (of_two(sequence=True), {}, ["actor.parallel.sequence", "tensor 1"]),
        (of_two(virtualPipeline=2), {}, ["actor.parallel.virtualPipeline", "pipeline above 1", "2"]),
        (of_two(pipeline=2, virtualPipeline=2), {}, ["actor.parallel.pipeline", "num_hidden_layers 2", "4"]),
        (of_two(tensor=2), {"num_key_value_heads": 1}, ["actor.parallel.tensor", "num_key_value_heads 1", "2"]),
        (of_two(tensor=2), {"intermediate_size": 49}, ["actor.parallel.tensor", "intermediate_size 49", "2"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_setting_it_has_no_equal_for_is_named(make_spec, config, changes, model, words):
    spec = make_spec(actor__backend="megatron", **changes)
    (line,) = unsupported_settings(spec, config | model)
    assert all(word in line for word in words)
    with pytest.raises(ConfigError, match=words[0]):
        check(spec, config | model)


def test_a_backend_that_is_not_installed_is_told_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    monkeypatch.delitem(sys.modules, "rl_core.actors.megatron.library", raising=False)
    with pytest.raises(
        ConfigError, match=r"megatron needs megatron-core in the image, got: .*; install it or choose fsdp2"
    ):
        importlib.import_module("rl_core.actors.megatron.library")
