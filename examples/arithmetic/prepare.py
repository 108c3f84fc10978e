"""Make the quickstart's model and data: a small Qwen2-architecture model that can add two-digit numbers, but forgets to carry.

The model is taught addition until it has the validation problems right, and is then spoiled by the notes of somebody who mostly
forgets to carry, until about half of its answers are right. GRPO takes it from there. Everything is seeded and nothing is
downloaded. `prepared.json` is written last and tells what was made; where it is there already, a second run does nothing.

    python prepare.py [--output DIR] [--seed N] [--quick] [--unspoiled]

A file of its own: it needs torch, transformers and tokenizers, and writes below `--output` only.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

CHARACTERS = "0123456789+=abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;?!'\"()-*/\n%$#&<>[]{}_^~`@|\\"
PROMPT = 6
"""Tokens of `12+34=`."""
VALIDATION_PROBLEMS = 200
BATCH = 128
TEACH_STEPS, TEACH_LIMIT, KNOWS = 400, 800, 0.985
"""Steps over which the learning rate falls, steps after which teaching gives up, accuracy that ends it (at two checks in a row)."""
SPOIL_STEPS, SLOPPY_SHARE = 80, 0.75
"""Steps on sloppy notes, and the share of these notes that forgets to carry: what is left to the right answer is found by sampling."""
PARTS, MARKER = ("model", "data"), "prepared.json"


def make_tokenizer(folder: Path):
    """Save a character tokenizer (one token per character) and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *dict.fromkeys(CHARACTERS)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left", "model_max_length": 256, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return tokenizer


def make_model(vocabulary: int, seed: int, *, quick: bool = False):
    """Return a randomly initialised Qwen2 of 0.8M parameters (`quick`: 0.3M)."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=96 if quick else 128,
        intermediate_size=288 if quick else 384,
        num_hidden_layers=2 if quick else 4,
        num_attention_heads=3 if quick else 4,
        num_key_value_heads=3 if quick else 2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def split_problems(seed: int, validation: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return disjoint training and validation pairs of all two-digit additions."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    return pairs[validation:], pairs[:validation]


def right(a: int, b: int) -> int:
    """Return the sum."""
    return a + b


def sloppy(a: int, b: int) -> int:
    """Return the sum of somebody who forgets to carry: 58+67 is 15."""
    return (a // 10 + b // 10) % 10 * 10 + (a + b) % 10


def encode_rows(tokenizer, pairs, answer):
    """Return [N, 10] token ids of `a+b=answer<eos>`, padded with 0."""
    import torch

    rows = [[*tokenizer.encode(f"{a}+{b}={answer(a, b)}").ids, 1] for a, b in pairs]
    return torch.tensor([row + [0] * (10 - len(row)) for row in rows])


def answer_chances(model, rows):
    """Return for each of `rows` the chance that sampling gives its answer, and whether greedy decoding does.

    Both [N]. One forward pass tells: greedy decoding gives the answer exactly when each of its tokens is the likeliest after those
    before it.
    """
    import torch

    with torch.no_grad():
        logprobs = model(input_ids=rows[:, :-1]).logits[:, PROMPT - 1 :].log_softmax(dim=-1)
    answers, padding = rows[:, PROMPT:], rows[:, PROMPT:] == 0
    chosen = logprobs.gather(-1, answers.unsqueeze(-1)).squeeze(-1).masked_fill(padding, 0.0)
    return chosen.sum(dim=1).exp(), ((logprobs.argmax(dim=-1) == answers) | padding).all(dim=1)


def accuracy(model, rows) -> float:
    """Return the share of `rows` that greedy decoding gets right."""
    return answer_chances(model, rows)[1].float().mean().item()


def supervised_step(model, optimizers, rows) -> None:
    """Learn the answers of `rows`."""
    import torch

    logits = model(input_ids=rows[:, :-1]).logits[:, PROMPT - 1 :]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, PROMPT:].flatten(), ignore_index=0)
    model.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()


def teach(model, rows, checks, *, seed: int) -> int:
    """Teach the sums in `rows` until the model has `checks` right; return the steps it took.

    Muon for the matrices (AdamW needs five times the steps here). Raises SystemExit when TEACH_LIMIT steps do not do it.
    """
    import torch

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.03, weight_decay=0.01),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(1, (step + 1) / 20) * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1, step / TEACH_STEPS)))),
        )
        for optimizer in optimizers
    ]
    generator = torch.Generator().manual_seed(seed)
    knew = False
    for step in range(1, TEACH_LIMIT + 1):
        supervised_step(model, optimizers, rows[torch.randint(len(rows), (BATCH,), generator=generator)])
        for rate in rates:
            rate.step()
        if step % 25 == 0:
            right = accuracy(model, checks)
            print(
                f"taught {step} steps: {right:.3f} of the validation problems right, {KNOWS} are wanted twice",
                flush=True,
            )
            knows = right >= KNOWS
            if knows and knew:
                return step
            knew = knows
    got = f"got {accuracy(model, checks):.3f} with seed {seed}; take another --seed"
    raise SystemExit(f"the model must add with accuracy {KNOWS} after {TEACH_LIMIT} steps, {got}")


def spoil(model, rows, sloppy_rows, *, seed: int) -> None:
    """Spoil the model with notes that mostly forget to carry."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed + 1)
    for _ in range(SPOIL_STEPS):
        take = torch.randint(len(rows), (BATCH,), generator=generator)
        bad = torch.rand(BATCH, 1, generator=generator) < SLOPPY_SHARE
        supervised_step(model, [optimizer], torch.where(bad, sloppy_rows[take], rows[take]))


def write_prompts(path: Path, pairs) -> None:
    """Write one JSON object per problem."""
    path.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in pairs))


def make(folder: Path, *, seed: int, quick: bool, unspoiled: bool) -> dict:
    """Write `model/` and `data/` below `folder`; return what was made."""
    model_folder, data_folder = (folder / part for part in PARTS)
    model_folder.mkdir()
    data_folder.mkdir()
    train, validation = split_problems(seed, VALIDATION_PROBLEMS)
    write_prompts(data_folder / "train.jsonl", train)
    write_prompts(data_folder / "validation.jsonl", validation)
    tokenizer = make_tokenizer(model_folder)
    model = make_model(tokenizer.get_vocab_size(), seed, quick=quick)
    rows, checks = (encode_rows(tokenizer, pairs, right) for pairs in (train, validation))
    steps = teach(model, rows, checks, seed=seed)
    taught = accuracy(model, checks)
    if not unspoiled:
        spoil(model, rows, encode_rows(tokenizer, train, sloppy), seed=seed)
    left = accuracy(model, checks)
    if not unspoiled:
        print(
            f"then spoiled by notes that forget to carry: {left:.3f} right, which is where the training begins",
            flush=True,
        )
    model.save_pretrained(model_folder)
    for path in model_folder.iterdir():
        path.chmod(0o644)  # safetensors writes 0600: a pod may run under another user than its init container
    figures = {
        "teaching_steps": steps,
        "accuracy_taught": round(taught, 3),
        "accuracy": round(left, 3),
    }
    return {"parameters": sum(p.numel() for p in model.parameters()), **figures}


def prepare(output: Path, **options) -> dict:
    """Make what `options` ask for below `output`, unless it is there already; return what is there.

    Made aside and moved into place, the marker last: a run that was cut off leaves nothing that looks complete.
    """
    output.mkdir(parents=True, exist_ok=True)
    if not made(output, options):
        print(f"making a small model and data in {output}: half a minute on a CPU", flush=True)
        with tempfile.TemporaryDirectory(dir=output, prefix=".prepare-") as name:
            scratch = Path(name)
            report = {**options, **make(scratch, **options)}
            (scratch / MARKER).write_text(json.dumps(report, indent=1) + "\n")
            if not made(output, options):  # another run on the same volume may have been faster
                (output / MARKER).unlink(missing_ok=True)
                for part in PARTS:
                    shutil.rmtree(output / part, ignore_errors=True)
                    (scratch / part).replace(output / part)
                (scratch / MARKER).replace(output / MARKER)
    return json.loads((output / MARKER).read_text())


def made(output: Path, options: dict) -> bool:
    """Return whether `output` holds a complete model and data made with `options`."""
    marker = output / MARKER
    if not all(path.exists() for path in (marker, *(output / part for part in PARTS))):
        return False
    report = json.loads(marker.read_text())
    return all(report.get(name) == value for name, value in options.items())


def main() -> None:
    """Parse the command line and make what it asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder for model/ and data/")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a model of 0.25M parameters, in a third of the time")
    parser.add_argument("--unspoiled", action="store_true", help="leave the model as good as it was taught")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as process 1 of a container it would be ignored
    # Read when torch is imported. More threads slow a model of this size down, and threads that spin starve their neighbours.
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    found = prepare(options.output, seed=options.seed, quick=options.quick, unspoiled=options.unspoiled)
    print(
        f"model: {found['parameters']:,} parameters, validation accuracy {found['accuracy']:.3f} -> {options.output / 'model'}"
    )


if __name__ == "__main__":
    main()
