"""What a trainer does not support on its device or with its model is told by name, before anything is started."""

import json

import pytest

from rl_core.actors.guards import unsupported_settings

FLASH = {"actor__attention": "flash_attention_2", "actor__gpus": 1, "model__dtype": "bfloat16"}


@pytest.fixture
def config(model_folder):
    return json.loads((model_folder / "config.json").read_text())


def test_flash_attention_runs_on_a_gpu_in_bfloat16(make_spec, config):
    assert list(unsupported_settings(make_spec(**FLASH), config)) == []


@pytest.mark.parametrize(
    ("changes", "model", "words"),
    [
        ({"actor__gpus": 0}, {}, ["GPUs only", "actor.gpus 0"]),
        ({"model__dtype": "float32"}, {}, ["model.dtype bfloat16", "float32"]),
        ({}, {"head_dim": 12}, ["divisible by 8", "12"]),
        ({}, {"head_dim": 512}, ["at most 256", "512"]),
        ({"actor__dropout": True}, {"attention_dropout": 0.1}, ["actor.dropout", "0.1"]),
    ],
)
@pytest.mark.parametrize("backend", ["fsdp1", "fsdp2"])
def test_flash_attention_is_refused_where_it_has_no_kernel(make_spec, config, changes, model, words, backend):
    spec = make_spec(actor__backend=backend, **FLASH | changes)
    (line,) = unsupported_settings(spec, config | model)
    assert line.startswith("actor.attention flash_attention_2") and "write sdpa" in line
    assert all(word in line for word in words)


@pytest.mark.parametrize("backend", ["fsdp1", "fsdp2", "megatron"])
def test_adapters_of_layers_that_the_model_lacks_are_refused(make_spec, config, backend):
    assert config["num_hidden_layers"] == 2
    changes = {"actor__backend": backend, "model__lora": {"layers": [5, 1, 2]}}
    (line,) = unsupported_settings(make_spec(**changes), config)
    assert line == "model.lora.layers must be below 2, the number of the model's layers, got [2, 5]; remove them"
    assert list(unsupported_settings(make_spec(model__lora={"layers": [0, 1]}), config)) == []


def test_adapters_of_a_mixture_of_experts_are_refused(make_spec, config):
    experts = config | {"num_local_experts": 8}
    assert list(unsupported_settings(make_spec(), experts)) == []
    (line,) = unsupported_settings(make_spec(model__lora={"rank": 4}), experts)
    assert line.startswith("model.lora must be null for a mixture of experts") and "got 8 experts" in line
