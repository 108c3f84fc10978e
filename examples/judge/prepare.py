"""Make a small model with random weights, and a judge that was trained to write how many vowels a text has.

    python prepare.py [--output DIR]

Takes some seconds on a CPU and downloads nothing.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM

LETTERS = "abcdefghijklmnopqrstuvwxyz "
BEGIN, END = "<score>", "</score>"
NAMES = ["<pad>", "<eos>", BEGIN, END, *LETTERS, *"0123456789"]
VOWELS = frozenset("aeiou")
STEPS, ROWS, LENGTH = 100, 32, 16


def save_tokenizer(folder: Path) -> Tokenizer:
    """Save a tokenizer with one token per character, and one for each end of a score."""
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(NAMES)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.add_tokens([BEGIN, END])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return tokenizer


def small() -> Qwen2ForCausalLM:
    """Return a model with random weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(NAMES), tie_word_embeddings=True, **sizes, **heads, **ends))


def train_judge(model, tokenizer, draw: random.Random) -> float:
    """Train to write `<score>n</score>` after a text with n vowels, at most 9; return the mean error of the last scores."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    begin, end, zero = (tokenizer.token_to_id(name) for name in (BEGIN, END, "0"))
    error = 0.0
    for _ in range(STEPS):
        length, shares = draw.randint(4, LENGTH), [draw.random() for _ in range(ROWS)]
        texts = [
            "".join(draw.choice("aeiou" if draw.random() < share else LETTERS) for _ in range(length))
            for share in shares
        ]
        counts = torch.tensor([min(9, sum(letter in VOWELS for letter in text)) for text in texts])
        tails = [[begin, zero + count, end, 1] for count in counts.tolist()]
        ids = torch.tensor([tokenizer.encode(text).ids + tail for text, tail in zip(texts, tails, strict=True)])
        logits = model(input_ids=ids).logits[:, -5:-1]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -4:].flatten()).backward()
        optimizer.step()
        error = (logits[:, 1, zero : zero + 10].argmax(-1) - counts).abs().float().mean().item()
    return error


def main() -> None:
    """Make the folders `model`, `judge` and `data`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    output = parser.parse_args().output
    policy, judge, data = (output / name for name in ("model", "judge", "data"))
    for folder in (policy, judge, data):
        folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = save_tokenizer(policy)
    save_tokenizer(judge)
    small().save_pretrained(policy)
    model = small()
    error = train_judge(model, tokenizer, random.Random(0))
    model.save_pretrained(judge)
    rows = [{"prompt": f"say {first}{second} "} for first in LETTERS[:8] for second in LETTERS[:8]]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"the judge's scores are wrong by {error:.1f} on average -> {judge}")


if __name__ == "__main__":
    main()
