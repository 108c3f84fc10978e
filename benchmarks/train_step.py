"""One optimizer step of the actor at a million parameters, beside others' and the time its matrix products alone need. Prints JSON.

Ours are `fsdp2`, `megatron` (TP 1) and `lora` (`fsdp2`, adapters of rank 16 on every linear layer): `load_batch` +
`compute_advantages_and_returns` + `run_training`, records in, weights changed, rows packed. The peers (`_step_peers`) take the same rows
padded: `trl` is what TRL's trainer does with a batch, `padded` the usual loop of torch, `megatron_loop` megatron-core's GPTModel, schedule
and optimizer as they come. `lognormal` has completions as a reasoning model has them; in `even` all are equally long, so that packing gains
nothing. `limit_ms` is 6 x parameters x tokens operations at the speed of a large product with `torch.matmul` (MKL) and with oneDNN. The
sides take turns, one thread; medians of wall and of processor time, which a loaded machine changes less.

    python benchmarks/train_step.py [lognormal] [even] [--repetitions 9]
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from _step_peers import PEERS, Row, Step

VOCABULARY, GROUPS, GROUP_SIZE, PROMPT, LONGEST = 24, 4, 8, 8, 440
SETUPS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "lognormal": lambda rng, count: rng.lognormal(np.log(64), 0.8, count).clip(1, LONGEST).astype(int),
    "even": lambda rng, count: np.full(count, 88),
}
"""Name -> lengths of the completions."""
ACTORS = {
    "fsdp2": ("fsdp2", None),
    "lora": ("fsdp2", {"rank": 16}),
    "megatron": ("megatron", None),
}
"""Name -> backend and `model.lora`."""
CLASSES = {"fsdp2": "rl_core.actors.fsdp.actor:FSDPActor", "megatron": "rl_core.actors.megatron.actor:MegatronActor"}


def make_folder(hidden: int, layers: int, vocabulary: int, intermediate: int, folder: Path) -> Path:
    from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def make_rows(setup: str) -> list[Row]:
    rng = np.random.default_rng(0)
    lengths = SETUPS[setup](rng, GROUPS * GROUP_SIZE)
    prompts = [torch.tensor(rng.integers(3, VOCABULARY, PROMPT)) for _ in range(GROUPS)]
    return [
        Row(prompts[number // GROUP_SIZE], torch.tensor(rng.integers(3, VOCABULARY, length)))
        for number, length in enumerate(lengths)
    ]


def make_records(rows: list[Row]) -> list:
    from rl_core.api.records import Completion, PromptGroupRecord

    def completion(number: int, row: Row) -> Completion:
        answer = {
            "role": "assistant",
            "content": "",
            "token_ids": row.answer,
            "generation_logprobs": torch.full((len(row.answer),), -3.0),
        }
        return Completion(message_log=[prompt(row), answer], reward=float(number % 3))

    def prompt(row: Row) -> dict:
        return {"role": "user", "content": "", "token_ids": row.prompt}

    return [
        PromptGroupRecord(
            prompt_idx=group,
            prompt=[prompt(members[0])],
            extra_env_info=None,
            metadata={},
            completions=[completion(number, row) for number, row in enumerate(members)],
            group_id=f"0-{group}",
        )
        for group in range(GROUPS)
        if (members := rows[group * GROUP_SIZE : (group + 1) * GROUP_SIZE])
    ]


def our_step(actor_name: str, folder: Path, records: list) -> Step:
    from importlib import import_module

    backend, lora = ACTORS[actor_name]
    module, _, name = CLASSES[backend].partition(":")
    actor = getattr(import_module(module), name)(
        {
            "model": {"path": str(folder), "lora": lora},
            "data": {"train": "unused.jsonl"},
            "algorithm": {"promptsPerStep": GROUPS, "groupSize": GROUP_SIZE},
            "actor": {"backend": backend, "optimizer": {"learningRate": 1e-6}},
        }
    )
    actor.init_worker()

    def step() -> None:
        actor.load_batch(records)
        actor.compute_advantages_and_returns()
        actor.run_training()

    return step


def operations_per_second() -> dict[str, float]:
    left, right = torch.randn(2048, 2048), torch.randn(2048, 2048)
    kinds = {"matmul": lambda: left @ right}
    if torch.backends.mkldnn.is_available():
        kinds["onednn"] = lambda: torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return {name: 2 * 2048**3 / min(timed(call)[0] for _ in range(5)) for name, call in kinds.items()}


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return (wall, processor) seconds."""
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - processor


def measure(setup: str, repetitions: int, folder: Path) -> dict[str, object]:
    rows = make_rows(setup)
    records = make_records(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # TRL before there are process groups, megatron's loop after megatron's actor has made them.
        steps = {name: PEERS[name](folder, rows) for name in ("trl", "padded")}
        steps |= {name: our_step(name, folder, records) for name in ACTORS}
        steps["megatron_loop"] = PEERS["megatron_loop"](folder, rows)
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for repetition in range(repetitions + 2):
            for name, step in steps.items():
                found = timed(step)
                if repetition >= 2:  # the first ones compile and allocate
                    taken[name].append(found)
    tokens = sum(len(row.prompt) + len(row.answer) for row in rows)
    wall = {name: statistics.median(seconds for seconds, _ in found) for name, found in taken.items()}
    processor = {name: statistics.median(seconds for _, seconds in found) for name, found in taken.items()}
    parameters = sum(tensor.numel() for tensor in _tensors(folder))
    return {
        "parameters": parameters,
        "rows": len(rows),
        "tokens": tokens,
        "padded_tokens": len(rows) * max(len(row.prompt) + len(row.answer) for row in rows),
        "ms": {name: round(seconds * 1e3, 1) for name, seconds in wall.items()},
        "cpu_ms": {name: round(seconds * 1e3, 1) for name, seconds in processor.items()},
        "limit_ms": {
            name: round(6e3 * parameters * tokens / rate, 1) for name, rate in operations_per_second().items()
        },
        "tokens_per_second": {name: round(tokens / seconds) for name, seconds in wall.items()},
        "fsdp2_over_trl": round(wall["trl"] / wall["fsdp2"], 3),
        "fsdp2_over_padded": round(wall["padded"] / wall["fsdp2"], 3),
        "megatron_over_its_loop": round(wall["megatron_loop"] / wall["megatron"], 3),
        "lora_over_full": round(processor["lora"] / processor["fsdp2"], 3),
    }


def _tensors(folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("setups", nargs="*", choices=[*SETUPS, []])
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_folder(128, 4, VOCABULARY, 512, Path(scratch))
        found = {setup: measure(setup, options.repetitions, folder) for setup in options.setups or SETUPS}
    about = {
        "torch": torch.__version__,
        "threads": 1,
        "repetitions": options.repetitions,
        "load": os.getloadavg()[0],
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "targets": {"fsdp2_over_trl": 1.5, "megatron_over_its_loop": 0.95, "lora_over_full": 0.8},
    }
    print(json.dumps(about | found, indent=1))


if __name__ == "__main__":
    main()
