"""Small models with random weights and a tokenizer of one token per character, for tests of the groups."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

NAMES = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz0123456789 +=.,"]


def save_policy(folder: Path, *, seed: int = 0, names: list[str] = NAMES, **more) -> Path:
    """Save a causal language model below `folder`; return the folder."""
    torch.manual_seed(seed)
    return _save(Qwen2ForCausalLM(_config(names, tie_word_embeddings=True, **more)), folder, names)


def save_classifier(folder: Path, *, num_labels: int = 1) -> Path:
    """Save a sequence classifier below `folder`; return the folder."""
    torch.manual_seed(0)
    return _save(Qwen2ForSequenceClassification(_config(NAMES, num_labels=num_labels)), folder, NAMES)


def _config(names: list[str], **more) -> Qwen2Config:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    return Qwen2Config(vocab_size=len(names), initializer_range=0.2, **{**sizes, **heads, **ends, **more})


def _save(model: torch.nn.Module, folder: Path, names: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
