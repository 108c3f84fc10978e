"""Make a small model with random weights, and a reward model that was trained on preferences: of two texts the one with more vowels.

    python prepare.py [--output DIR]

Takes some seconds on a CPU and downloads nothing.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

LETTERS = "abcdefghijklmnopqrstuvwxyz "
NAMES = ["<pad>", "<eos>", *LETTERS]
VOWELS = frozenset("aeiou")
STEPS, PAIRS, LENGTH = 80, 64, 16


def save_tokenizer(folder: Path) -> Tokenizer:
    """Save a tokenizer with one token per character."""
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(NAMES)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return tokenizer


def small(**more) -> Qwen2Config:
    """Return the configuration of both models."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    return Qwen2Config(vocab_size=len(NAMES), **sizes, **heads, **ends, **more)


def train_reward_model(model, tokenizer, draw: random.Random) -> float:
    """Train on pairs by the Bradley-Terry loss; return the share of pairs that the model orders rightly at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    right = 0.0
    for _ in range(STEPS):
        texts = ["".join(draw.choices(LETTERS, k=LENGTH)) for _ in range(2 * PAIRS)]
        vowels = torch.tensor([sum(letter in VOWELS for letter in text) for text in texts]).view(PAIRS, 2)
        scores = model(input_ids=torch.tensor([tokenizer.encode(text).ids for text in texts])).logits.view(PAIRS, 2)
        margin = (scores[:, 0] - scores[:, 1]) * (vowels[:, 0] - vowels[:, 1]).sign()
        differ = vowels[:, 0] != vowels[:, 1]
        optimizer.zero_grad()
        (-torch.nn.functional.logsigmoid(margin[differ]).mean()).backward()
        optimizer.step()
        right = (margin[differ] > 0).float().mean().item()
    return right


def main() -> None:
    """Make the folders `model`, `reward-model` and `data`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    output = parser.parse_args().output
    policy, reward, data = (output / name for name in ("model", "reward-model", "data"))
    for folder in (policy, reward, data):
        folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(2)
    tokenizer = save_tokenizer(policy)
    save_tokenizer(reward)
    Qwen2ForCausalLM(small(tie_word_embeddings=True)).save_pretrained(policy)
    classifier = Qwen2ForSequenceClassification(small(num_labels=1))
    right = train_reward_model(classifier, tokenizer, random.Random(0))
    classifier.save_pretrained(reward)
    rows = [{"prompt": f"say {first}{second} "} for first in LETTERS[:8] for second in LETTERS[:8]]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"the reward model orders {right:.0%} of pairs rightly -> {reward}")


if __name__ == "__main__":
    main()
