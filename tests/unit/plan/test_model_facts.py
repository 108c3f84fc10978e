"""Sizes of a model, read from its folder, against real models."""

import json

import pytest

from rl_core.api.errors import ConfigError
from rl_core.plan.model_facts import ModelFacts


def write(folder, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


QWEN = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
QWEN_MOE = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip


def test_a_token_goes_through_some_of_the_experts(tmp_path):
    facts = [ModelFacts.from_config(write(tmp_path / "m", **config)) for config in (QWEN_MOE, MIXTRAL, QWEN)]
    assert [(one.experts, one.experts_per_token, one.inner) for one in facts] == [
        (128, 8, 6144),
        (8, 2, 28672),
        (0, 0, 4864),
    ]


@pytest.mark.parametrize(
    ("config", "published"),
    [(QWEN, 494_032_768), (GPT2, 124_439_808), (QWEN_MOE, 30_532_122_624), (MIXTRAL, 46_702_792_704)],
    ids=["Qwen2.5-0.5B", "GPT-2", "Qwen3-30B-A3B", "Mixtral-8x7B"],
)
def test_parameters_from_the_configuration_are_within_one_percent_of_the_published(tmp_path, config, published):
    assert ModelFacts.from_config(write(tmp_path / "m", **config)).parameters == pytest.approx(published, rel=0.01)


def test_facts_of_grouped_heads_and_explicit_head_size(tmp_path):
    facts = ModelFacts.from_config(write(tmp_path / "m", **QWEN, head_dim=128))
    assert (facts.kv_heads, facts.head_dim, facts.layers, facts.max_length) == (2, 128, 24, 32768)


def test_language_part_of_a_model_that_sees_is_used(tmp_path):
    facts = ModelFacts.from_config(write(tmp_path / "m", model_type="qwen2_vl", text_config=QWEN))
    assert facts.hidden == 896


def test_stored_weights_are_counted_exactly(tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    folder = write(tmp_path / "m", **QWEN)
    save_file({"a": np.zeros((3, 5), np.float32)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": np.zeros(7, np.float16), "scale": np.float32([1])}, folder / "model-00002-of-00002.safetensors")
    assert ModelFacts.from_config(folder).parameters == 23
    assert ModelFacts.from_config(folder / "config.json").parameters == 23


@pytest.mark.parametrize("content", [None, "no json", "[]", '{"hidden_size": 4}'])
def test_unreadable_configuration_is_refused_by_name(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelFacts.from_config(tmp_path)


def test_damaged_weights_are_refused_by_name(tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    folder = write(tmp_path / "m", **QWEN)
    file = folder / "model.safetensors"
    save_file({"a": np.zeros((3, 5), np.float32)}, file)
    for content in (b"\x08\0\0\0\0\0\0\0not json", file.read_bytes()[:-1]):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"model.safetensors must be a whole safetensors file"):
            ModelFacts.from_config(folder)
