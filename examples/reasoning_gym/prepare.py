"""Make the model of this example: the quickstart's small model, taught the form of one reasoning-gym task, but not yet to solve it.

The supervised problems have a seed of their own, so neither training nor validation prompts are drawn from them.

    python prepare.py [--output DIR] [--seed N] [--steps N]
"""

import argparse
import sys
from pathlib import Path

from rl_core.data.reasoning_gym import generate_entries

sys.path.insert(0, str(Path(__file__).parent.parent / "arithmetic"))
from prepare import make_model, make_tokenizer

TASK = "basic_arithmetic"
CONFIG = {
    "min_terms": 2,
    "max_terms": 2,
    "max_digits": 2,
    "operators": ["+", "-"],
    "allow_parentheses": False,
    "allow_negation": False,
}


def warm_start(model, tokenizer, entries, *, steps: int, seed: int, batch: int = 128, peak: float = 2e-3) -> float:
    """Train on the answers of random batches of `entries`; return the last loss."""
    import torch

    pairs = [(tokenizer.encode(e["question"]).ids, [*tokenizer.encode(e["answer"]).ids, 1]) for e in entries]
    width = max(len(question) + len(answer) for question, answer in pairs)
    ids = torch.zeros(len(pairs), width, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, (question, answer) in enumerate(pairs):
        end = len(question) + len(answer)
        ids[row, :end] = torch.tensor(question + answer)
        labels[row, len(question) : end] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    loss = torch.zeros(())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1, (step + 1) / 50)
        take = torch.randint(len(pairs), (batch,), generator=generator)
        loss = model(input_ids=ids[take], labels=labels[take]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    return float(loss.detach())


def main() -> None:
    """Parse the command line and write `model/`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500, help="supervised steps")
    options = parser.parse_args()

    folder = options.output / "model"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder)
    model = make_model(tokenizer.get_vocab_size(), options.seed)
    entries = generate_entries(TASK, 4096, 1000 + options.seed, CONFIG)
    loss = warm_start(model, tokenizer, entries, steps=options.steps, seed=options.seed)
    model.save_pretrained(folder)
    print(f"model: supervised loss {loss:.3f} after {options.steps} steps -> {folder}")


if __name__ == "__main__":
    main()
