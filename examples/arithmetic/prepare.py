"""Make the quickstart's model and data: a Qwen2-architecture model of about 1M parameters that can add, but badly.

The model learns two-digit addition by supervised learning and is then spoiled by the notes of somebody who forgets to carry the
ten, until it solves about half of the validation prompts. GRPO takes it from there. Everything is seeded; nothing is downloaded.

    python prepare.py [--output DIR] [--seed N] [--steps N] [--sloppy-steps N]
"""

import argparse
import json
import math
import random
from pathlib import Path

CHARACTERS = "0123456789+=abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;?!'\"()-*/\n%$#&<>[]{}_^~`@|\\"


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


def make_model(vocabulary: int, seed: int):
    """Return a randomly initialised Qwen2 of about 1M parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
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
    """Return the sum of somebody who forgets to carry the ten."""
    return a + b - 10 if a % 10 + b % 10 >= 10 else a + b


def encode_rows(tokenizer, pairs, answer):
    """Return [N, 10] token ids of `a+b=answer<eos>`, padded with 0."""
    import torch

    rows = [[*tokenizer.encode(f"{a}+{b}={answer(a, b)}").ids, 1] for a, b in pairs]
    return torch.tensor([row + [0] * (10 - len(row)) for row in rows])


def warm_start(
    model, tokenizer, pairs, *, steps: int, sloppy_steps: int, seed: int, batch: int = 256, peak: float = 2e-3
) -> None:
    """Teach addition for `steps`, then spoil it for `sloppy_steps` with notes that forget the carry three times in four."""
    import torch

    notes = {False: encode_rows(tokenizer, pairs, right), True: encode_rows(tokenizer, pairs, sloppy)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for phase_steps, phase_peak, spoiled in ((steps, peak, 0.0), (sloppy_steps, peak / 4, 0.75)):
        for step in range(phase_steps):
            decay = 0.1 + 0.45 * (1 + math.cos(math.pi * step / phase_steps))
            for group in optimizer.param_groups:
                group["lr"] = phase_peak * min(1.0, (step + 1) / 50) * decay
            take = torch.randint(len(pairs), (batch,), generator=generator)
            bad = torch.rand(batch, 1, generator=generator) < spoiled
            ids = torch.where(bad, notes[True][take], notes[False][take])
            labels = ids.masked_fill(ids == 0, -100)
            labels[:, :6] = -100
            loss = model(input_ids=ids, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    model.eval()


def greedy_accuracy(model, tokenizer, pairs) -> float:
    """Return the share of `pairs` answered right by greedy decoding."""
    import torch

    prompts = torch.tensor([tokenizer.encode(f"{a}+{b}=").ids for a, b in pairs])
    with torch.no_grad():
        output = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=5, do_sample=False)
    texts = [tokenizer.decode(row[prompts.shape[1] :].tolist()) for row in output]
    return sum(text.strip() == str(a + b) for text, (a, b) in zip(texts, pairs, strict=True)) / len(pairs)


def write_prompts(path: Path, pairs) -> None:
    """Write one JSON object per problem."""
    path.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in pairs))


def main() -> None:
    """Parse the command line and write `model/` and `data/`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000, help="supervised steps on right sums")
    parser.add_argument("--sloppy-steps", type=int, default=100, help="supervised steps on sloppy notes")
    options = parser.parse_args()

    model_folder, data_folder = options.output / "model", options.output / "data"
    for folder in (model_folder, data_folder):
        folder.mkdir(parents=True, exist_ok=True)
    train, validation = split_problems(options.seed, 200)
    write_prompts(data_folder / "train.jsonl", train)
    write_prompts(data_folder / "validation.jsonl", validation)
    tokenizer = make_tokenizer(model_folder)
    model = make_model(tokenizer.get_vocab_size(), options.seed)
    warm_start(model, tokenizer, train, steps=options.steps, sloppy_steps=options.sloppy_steps, seed=options.seed)
    model.save_pretrained(model_folder)
    accuracy = greedy_accuracy(model, tokenizer, validation)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"model: {parameters:,} parameters, validation accuracy {accuracy:.3f} -> {model_folder}")


if __name__ == "__main__":
    main()
