"""Make the model of this example: the quickstart's small model, taught one reasoning-gym task by somebody who forgets the minus sign.

It learns to subtract by supervised learning and is then spoiled by notes in which six of seven negative results have lost their
sign, until it solves about half of the problems. GRPO takes it from there. Everything is seeded; nothing is downloaded.

    python prepare.py [--output DIR] [--seed N] [--steps N] [--sloppy-steps N]
"""

import argparse
import math
import sys
from pathlib import Path

from rl_core.data.reasoning_gym import generate_entries

sys.path.insert(0, str(Path(__file__).parent.parent / "arithmetic"))
from prepare import make_model, make_tokenizer

TASK = "basic_arithmetic"
CONFIG = {
    "min_terms": 2,
    "max_terms": 3,
    "max_digits": 1,
    "operators": ["-"],
    "allow_parentheses": False,
    "allow_negation": False,
}


def encode_rows(tokenizer, entries, answer, *, width: int = 40):
    """Return ids and labels [N, width] of `question answer<eos>`; only the answer has labels."""
    import torch

    ids = torch.zeros(len(entries), width, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, entry in enumerate(entries):
        question = tokenizer.encode(entry["question"]).ids
        result = [*tokenizer.encode(answer(entry["answer"])).ids, 1]
        end = len(question) + len(result)
        ids[row, :end] = torch.tensor(question + result)
        labels[row, len(question) : end] = torch.tensor(result)
    longest = int((ids != 0).sum(dim=1).max())
    return ids[:, :longest], labels[:, :longest]


def train(model, rows, *, steps: int, peak: float, seed: int, batch: int = 128) -> None:
    """Train on random batches of (ids, labels) with a short warm-up and a cosine decay."""
    import torch

    ids, labels = rows
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, (step + 1) / 50) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        take = torch.randint(len(ids), (batch,), generator=generator)
        loss = model(input_ids=ids[take], labels=labels[take]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def main() -> None:
    """Parse the command line and write `model/`."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600, help="supervised steps on right answers")
    parser.add_argument("--sloppy-steps", type=int, default=100, help="supervised steps on sloppy notes")
    options = parser.parse_args()

    folder = options.output / "model"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder)
    model = make_model(tokenizer.get_vocab_size(), options.seed)
    entries = generate_entries(TASK, 4096, 1000 + options.seed, CONFIG)
    notes = encode_rows(tokenizer, entries, lambda answer: answer)
    train(model, notes, steps=options.steps, peak=2e-3, seed=options.seed)
    spoiled = encode_rows(tokenizer, entries, lambda answer: answer.removeprefix("-"))
    kept = torch.rand(len(entries), 1, generator=torch.Generator().manual_seed(options.seed)) < 1 / 7
    width = notes[0].shape[1]
    mixed = [
        torch.where(kept, right, pad(wrong, width, fill))
        for right, wrong, fill in zip(notes, spoiled, (0, -100), strict=True)
    ]
    train(model, mixed, steps=options.sloppy_steps, peak=5e-4, seed=options.seed + 1)
    model.save_pretrained(folder)
    print(f"model: {sum(p.numel() for p in model.parameters()):,} parameters -> {folder}")


def pad(rows, width: int, fill: int):
    """Return `rows` [N, S] widened to [N, width]."""
    import torch

    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=fill)


if __name__ == "__main__":
    main()
