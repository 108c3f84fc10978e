"""A family that nobody compared is compared with transformers before it is trained."""

import importlib

import pytest

from rl_core.actors import families
from rl_core.api.errors import ConfigError


def config_of(family, architecture, **settings):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, architecture).config_class(**settings).to_dict() | {"architectures": [architecture]}


@pytest.mark.parametrize(
    ("family", "architecture"),
    [("olmo3", "Olmo3ForCausalLM"), ("glm4", "Glm4ForCausalLM"), ("qwen2_moe", "Qwen2MoeForCausalLM")],
)
def test_a_family_that_computes_rows_as_usual_is_trained(family, architecture):
    families.check_family(config_of(family, architecture))


@pytest.mark.parametrize(
    ("family", "architecture", "settings", "message"),
    [
        ("granite", "GraniteForCausalLM", {"logits_scaling": 4.0}, "a small GraniteForCausalLM differs by"),
        ("gemma2", "Gemma2ForCausalLM", {}, "a small Gemma2ForCausalLM differs by"),
        ("gpt_oss", "GptOssForCausalLM", {}, "a small GptOssForCausalLM differs by"),
        ("qwen3_next", "Qwen3NextForCausalLM", {}, "attention must be one that transformers lets others compute"),
        ("gpt_neox", "GPTNeoXForCausalLM", {}, "must have a decoder `model` and an output layer `lm_head`"),
    ],
    ids=["scaled logits", "capped logits", "attention sinks", "linear attention", "names"],
)
def test_a_family_that_does_more_is_refused(family, architecture, settings, message):
    with pytest.raises(ConfigError, match=message):
        families.check_family(config_of(family, architecture, **settings))


def test_families_that_tests_compare_are_not_compared_again(monkeypatch):
    monkeypatch.delattr(families, "_difference")
    families.check_family({"model_type": "qwen3_moe"})
