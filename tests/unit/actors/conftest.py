"""A tiny Qwen2 folder and the job spec that trains it."""

import json

import pytest
import torch

from rl_core.api.job import RLJobSpec

VOCAB = 24


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    return folder


@pytest.fixture
def make_spec(model_folder):
    def make(**changes):
        """Return the spec with `changes` by dotted path, such as `actor.gradClip`."""
        plain = {
            "model": {"path": str(model_folder)},
            "data": {"train": "unused.jsonl"},
            "algorithm": {"promptsPerStep": 4, "groupSize": 4, "steps": 10},
            "actor": {"optimizer": {"learningRate": 1e-2}},
            "rollout": {"sampling": {"maxNewTokens": 12}, "maxSequenceLength": 64},
        }
        for path, value in changes.items():
            block = plain
            *parents, field = path.split(".")
            for parent in parents:
                block = block.setdefault(parent, {})
            block[field] = value
        return RLJobSpec.model_validate(plain)

    return make
