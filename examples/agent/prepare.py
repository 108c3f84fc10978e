"""Make the agent example's model and data: a small model that can call a calculator, but mostly guesses.

The model learns conversations about products of two-digit numbers, in which somebody now and then calls the calculator and else guesses a
number from 1000 to 1999. GRPO finds that calling pays. Everything is seeded and nothing is downloaded. `prepared.json` is written last; where
it is there already, a second run does nothing.

    python prepare.py [--output DIR] [--seed N]

A file of its own: it needs torch, transformers and tokenizers, and writes below `--output` only.
"""

import argparse
import json
import os
import random
import shutil
import tempfile
from pathlib import Path

OPEN, CLOSE = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
"""The beginning and the end of a call, one token each."""
USER, ASSISTANT, TOOL, END = "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"
WORDS = ["<pad>", END, USER, ASSISTANT, TOOL]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|end|>'
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STEPS, BATCH, LENGTH = 500, 64, 64
GUESSES, GUESSES_AGAIN = 0.7, 0.6
"""Share of the conversations that begin with a guess, and share of the replies to `wrong` that are another guess."""
VALIDATION_PROBLEMS = 100
PARTS, MARKER = ("model", "data"), "prepared.json"


def make_tokenizer(folder: Path):
    """Save a tokenizer with one token per character, role mark and half of a tool call; return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = [*WORDS, *dict.fromkeys("0123456789*wrong errorabcdefhijklmpqstuvxyz-.")]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(WORDS)
    tokenizer.add_tokens([OPEN, CLOSE])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
        "model_max_length": 256,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return tokenizer


def conversation(a: int, b: int, chance: random.Random) -> list[tuple[str, bool]]:
    """Return a conversation as (text, whether it is the assistant's): some guesses, then the calculator and its result."""
    parts = [(f"{USER}{a}*{b}{END}{ASSISTANT}", False)]
    guesses = 0 if chance.random() >= GUESSES else 1 if chance.random() >= GUESSES_AGAIN else 2
    for _ in range(guesses):
        parts += [(f"{chance.randint(1000, 1999)}{END}", True), (f"{USER}wrong{END}{ASSISTANT}", False)]
    product = a * b
    return [
        *parts,
        (f"{OPEN}{a}*{b}{CLOSE}{END}", True),
        (f"{TOOL}{product}{END}{ASSISTANT}", False),
        (f"{product}{END}", True),
    ]


def encode(tokenizer, parts) -> tuple[list[int], list[int]]:
    """Return ids and labels [LENGTH]; labels are -100 where the assistant does not speak."""
    ids, labels = [], []
    for text, spoken in parts:
        part = tokenizer.encode(text, add_special_tokens=False).ids
        ids += part
        labels += part if spoken else [-100] * len(part)
    padding = LENGTH - len(ids)
    return ids + [0] * padding, labels + [-100] * padding


def teach(model, tokenizer, pairs, *, seed: int) -> float:
    """Teach conversations about `pairs`; return the last loss."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS, pct_start=0.1)
    chance = random.Random(seed)
    for _ in range(STEPS):
        rows = [encode(tokenizer, conversation(*chance.choice(pairs), chance)) for _ in range(BATCH)]
        ids, labels = (torch.tensor(column) for column in zip(*rows, strict=True))
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
    return loss.item()


def make(folder: Path, *, seed: int) -> dict:
    """Write `model/` and `data/` below `folder`; return what was made."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model_folder, data_folder = (folder / part for part in PARTS)
    model_folder.mkdir()
    data_folder.mkdir()
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    for name, taken in (("validation", pairs[:VALIDATION_PROBLEMS]), ("train", pairs[VALIDATION_PROBLEMS:])):
        rows = [{"prompt": [{"role": "user", "content": f"{a}*{b}"}], "answer": str(a * b)} for a, b in taken]
        (data_folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer(model_folder)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            eos_token_id=1,
            pad_token_id=0,
            bos_token_id=None,
        )
    )
    loss = teach(model, tokenizer, pairs[VALIDATION_PROBLEMS:], seed=seed)
    model.save_pretrained(model_folder)
    for path in model_folder.iterdir():
        path.chmod(0o644)  # safetensors writes 0600: a pod may run under another user than its init container
    return {"parameters": sum(p.numel() for p in model.parameters()), "loss": round(loss, 3)}


def prepare(output: Path, *, seed: int) -> dict:
    """Make model and data below `output`, unless they are there already; return what is there. They are made aside and moved into place."""
    output.mkdir(parents=True, exist_ok=True)
    marker = output / MARKER
    if (
        marker.exists()
        and json.loads(marker.read_text())["seed"] == seed
        and all((output / part).exists() for part in PARTS)
    ):
        return json.loads(marker.read_text())
    with tempfile.TemporaryDirectory(dir=output, prefix=".prepare-") as name:
        report = {"seed": seed, **make(Path(name), seed=seed)}
        marker.unlink(missing_ok=True)
        for part in PARTS:
            shutil.rmtree(output / part, ignore_errors=True)
            (Path(name) / part).replace(output / part)
        marker.write_text(json.dumps(report, indent=1) + "\n")
    return report


def main() -> None:
    """Parse the command line and make what it asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder for model/ and data/")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "2")  # more threads slow a model of this size down
    found = prepare(options.output, seed=options.seed)
    print(f"model: {found['parameters']:,} parameters, loss {found['loss']:.3f} -> {options.output / 'model'}")


if __name__ == "__main__":
    main()
