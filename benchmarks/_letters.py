"""The task of trl_side_by_side and recovery: a random model learns to write the letter a."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

PROMPTS = 512
PROMPT_LENGTH = 8
VOCABULARY = 49
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;+-=?!"
REWARD_FILE = '''"""The reward of both sides."""


def letter_a(prompts, completions, **columns):
    return [text.count("a") / max(len(text), 1) for text in completions]
'''


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How large model and batch are."""

    hidden: int
    intermediate: int
    layers: int
    prompts_per_step: int
    group_size: int
    max_new_tokens: int
    learning_rate: float

    @property
    def rows(self) -> int:
        """Return the completions of a step."""
        return self.prompts_per_step * self.group_size


SIZES = {
    "recipe": Size(
        hidden=64, intermediate=128, layers=2, prompts_per_step=4, group_size=8, max_new_tokens=32, learning_rate=1e-3
    ),
    "nothing": Size(
        hidden=16, intermediate=16, layers=1, prompts_per_step=4, group_size=2, max_new_tokens=2, learning_rate=1e-3
    ),
    "million": Size(
        hidden=128, intermediate=512, layers=4, prompts_per_step=16, group_size=8, max_new_tokens=64, learning_rate=3e-4
    ),
}
"""recipe: 77,312 parameters, as the recipe says; nothing: a model whose compute is none; million: 1.0 million, 8 times the tokens a step."""


def make_task(folder: Path, seed: int, size: Size = SIZES["recipe"]) -> None:
    """Write model/, data/train.jsonl and reward.py for `seed` below `folder`."""
    import random

    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "data").mkdir(exist_ok=True)
    _make_tokenizer(folder / "model")
    _make_model(folder / "model", size, seed)
    draw = random.Random(seed)
    prompts = ["".join(draw.choices("bcdefghijklmnopqrstuvwxyz", k=PROMPT_LENGTH)) for _ in range(PROMPTS)]
    lines = [json.dumps({"prompt": prompt, "answer": "a"}) + "\n" for prompt in prompts]
    (folder / "data" / "train.jsonl").write_text("".join(lines))
    (folder / "reward.py").write_text(REWARD_FILE)


def _make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<pad>", "<eos>", "<unk>", *ALPHABET]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(names[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _make_model(folder: Path, size: Size, seed: int) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max(2 * size.max_new_tokens, 64),
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def job_document(folder: Path, *, seed: int, steps: int, rollouts: int, size: Size = SIZES["recipe"], **spec) -> dict:
    """Return the job of the task in `folder`; `spec` replaces further blocks."""
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "letters"},
        "spec": {
            "model": {"path": str(folder / "model")},
            "data": {"train": str(folder / "data" / "train.jsonl")},
            "algorithm": {
                "promptsPerStep": size.prompts_per_step,
                "groupSize": size.group_size,
                "steps": steps,
                "seed": seed,
                "loss": {"clipLow": 0.2, "clipHigh": 0.2},
            },
            "actor": {"optimizer": {"learningRate": size.learning_rate, "weightDecay": 0.0}, "gradClip": 1.0},
            "rollout": {
                "replicas": rollouts,
                "sampling": {"maxNewTokens": size.max_new_tokens},
                "maxSequenceLength": PROMPT_LENGTH + size.max_new_tokens + 1,
            },
            "env": {"type": "reward", "reward": "reward:letter_a"},
            "checkpoint": {"everySteps": None},
        }
        | spec,
    }


def one_thread() -> dict[str, str]:
    """Return the environment of a process that computes on one thread and asks no model hub."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return os.environ | threads | {"HF_HUB_OFFLINE": "1"}
