"""A tiny Qwen2 folder, the job that trains it, and prompt groups; shared by unit and integration tests of the actors."""

import importlib
import json
from pathlib import Path

import numpy as np
import torch

from rl_core.api.records import Completion, PromptGroupRecord

VOCAB = 24
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
"""Settings of the family qwen3_moe for `make_model`."""


def make_model(
    folder: Path, *, tied: bool = True, dtype: torch.dtype = torch.float32, family: str = "qwen2", **settings
) -> Path:
    """Write a folder of a model of 2 layers with random weights and a tokenizer file; `settings` replace those of its configuration."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(7)
    name, package = "".join(map(str.capitalize, family.split("_"))), f"transformers.models.{family}"
    config_class = getattr(importlib.import_module(f"{package}.configuration_{family}"), f"{name}Config")
    model_class = getattr(importlib.import_module(f"{package}.modeling_{family}"), f"{name}ForCausalLM")
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    model = model_class(config_class(**sizes | settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    return folder


def make_spec(model: Path, **changes) -> dict:
    """Return the job spec as a mapping; `changes` are YAML paths with `__` for the dot."""
    spec: dict = {
        "model": {"path": str(model)},
        "data": {"train": "unused.jsonl"},
        "algorithm": {"promptsPerStep": 4, "groupSize": 4, "steps": 10},
        "actor": {"optimizer": {"learningRate": 1e-3}, "gradClip": 0.5, "microBatchTokens": 64},
        "rollout": {"sampling": {"maxNewTokens": 12}, "maxSequenceLength": 32},
        "runtime": {"deadlines": {"collective": 20}},
    }
    for path, value in changes.items():
        *parents, field = path.split("__")
        block = spec
        for parent in parents:
            block = block.setdefault(parent, {})
        block[field] = value
    return spec


def make_record(group: int, *, rows: int = 4) -> PromptGroupRecord:
    """Return a group of rows of mixed lengths, the same for the same number everywhere; some groups have a failed row."""
    rng = np.random.default_rng(group)
    prompt = [{"role": "user", "content": "", "token_ids": torch.tensor(rng.integers(0, VOCAB, 3 + group % 4))}]
    completions = []
    for index in range(rows):
        length = int(rng.integers(1, 13))
        answer = {
            "role": "assistant",
            "content": "",
            "token_ids": torch.tensor(rng.integers(0, VOCAB, length)),
            "generation_logprobs": torch.tensor(rng.normal(-3, 0.2, length), dtype=torch.float32),
        }
        failed = group % 7 == 3 and index == 0
        completions.append(
            Completion(
                message_log=[*prompt, answer],
                reward=float("nan") if failed else float(rng.integers(0, 3)),
                finish_reason="error" if failed else "stop",
            )
        )
    return PromptGroupRecord(
        prompt_idx=group,
        prompt=prompt,
        extra_env_info=None,
        metadata={},
        completions=completions,
        group_id=f"0-{group}",
        lease_token=f"token-{group}",
    )
