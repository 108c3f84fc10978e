"""One optimizer step of the actor, beside the usual padded loop and the time its matrix products alone need. Prints JSON.

`ours_ms` is `load_batch` + `compute_advantages_and_returns` + `run_training` (records in, weights changed). `padded_ms` is the
peer: the same model from transformers on right-padded rows with SDPA, all logits, the same clipped loss, clipping and fused
AdamW. `limit_ms` is 6 x parameters x tokens operations at the speed this machine reaches on a large product with
`torch.matmul` (MKL) and with oneDNN. Runs are interleaved, one thread, medians and minima over the repetitions; `_cpu_ms` is
processor time, which a loaded machine changes less.
"""

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

REPETITIONS = 12
SETUPS = {
    # name: hidden, layers, vocabulary, intermediate, groups, rows per group, prompt, response tokens
    "trl_recipe_32x40": (64, 2, 49, 128, 4, 8, 8, 32),
    "one_million_256x24": (128, 4, 24, 512, 32, 8, 8, 16),
    "mixed_lengths_64": (128, 4, 24, 512, 8, 8, 8, 240),
}


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


def make_records(
    vocabulary: int, groups: int, rows: int, prompt_tokens: int, response_tokens: int, *, mixed: bool
) -> list:
    from rl_core.api.records import Completion, PromptGroupRecord

    rng = np.random.default_rng(0)

    def message(role: str, length: int) -> dict:
        made = {"role": role, "content": "", "token_ids": torch.tensor(rng.integers(0, vocabulary, length))}
        if role == "assistant":
            made["generation_logprobs"] = torch.full((length,), -float(np.log(vocabulary)))
        return made

    records = []
    for group in range(groups):
        prompt = [message("user", prompt_tokens)]
        lengths = rng.integers(response_tokens // 8, response_tokens + 1, rows) if mixed else [response_tokens] * rows
        completions = [
            Completion(message_log=[*prompt, message("assistant", int(n))], reward=float(rng.random())) for n in lengths
        ]
        records.append(
            PromptGroupRecord(
                prompt_idx=group,
                prompt=prompt,
                extra_env_info=None,
                metadata={},
                completions=completions,
                group_id=f"0-{group}",
            )
        )
    return records


def our_step(folder: Path, records: list) -> Callable[[], None]:
    from rl_core.actors.fsdp.actor import FSDPActor

    groups, rows = len(records), len(records[0].completions)
    actor = FSDPActor(
        {
            "model": {"path": str(folder)},
            "data": {"train": "unused.jsonl"},
            "algorithm": {"promptsPerStep": groups, "groupSize": rows},
            "actor": {"optimizer": {"learningRate": 1e-6}},
        }
    )
    actor.init_worker()

    def step() -> None:
        actor.load_batch(records)
        actor.compute_advantages_and_returns()
        actor.run_training()

    return step


def padded_step(folder: Path, records: list) -> Callable[[], None]:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    logs = [completion.message_log for record in records for completion in record.completions]
    width = max(sum(len(message["token_ids"]) for message in log) for log in logs)
    ids, mask = torch.zeros(len(logs), width, dtype=torch.int64), torch.zeros(len(logs), width, dtype=torch.bool)
    attention = torch.zeros(len(logs), width, dtype=torch.int64)
    for row, (prompt, answer) in enumerate(logs):
        start, end = len(prompt["token_ids"]), len(prompt["token_ids"]) + len(answer["token_ids"])
        ids[row, :end] = torch.cat((prompt["token_ids"], answer["token_ids"]))
        mask[row, start:end] = attention[row, :end] = True
    old = torch.full(mask.shape, -3.0)[:, 1:]
    advantages = torch.randn(len(logs), 1)

    def step() -> None:
        logits = model(ids, attention_mask=attention).logits[:, :-1]
        log_probs = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = (log_probs - old).exp()
        losses = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        (losses * mask[:, 1:]).sum().div(mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def operations_per_second() -> dict[str, float]:
    left, right = torch.randn(2048, 2048), torch.randn(2048, 2048)
    kinds = {"matmul": lambda: left @ right}
    if torch.backends.mkldnn.is_available():
        kinds["onednn"] = lambda: torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return {name: 2 * 2048**3 / min(timed(call) for _ in range(5)) for name, call in kinds.items()}


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(setup: tuple[int, ...], name: str) -> dict[str, object]:
    hidden, layers, vocabulary, intermediate, groups, rows, prompt_tokens, response_tokens = setup
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_folder(hidden, layers, vocabulary, intermediate, Path(scratch))
        records = make_records(vocabulary, groups, rows, prompt_tokens, response_tokens, mixed="mixed" in name)
        steps = {"ours": our_step(folder, records), "padded": padded_step(folder, records)}
        parameters = sum(t.numel() for t in _tensors(folder))
    for step in steps.values():
        step()
        step()
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    processor: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(REPETITIONS):
        for kind, step in steps.items():
            started = time.process_time()
            seconds[kind].append(timed(step))
            processor[kind].append(time.process_time() - started)
    tokens = sum(
        sum(len(message["token_ids"]) for message in completion.message_log)
        for record in records
        for completion in record.completions
    )
    rates = operations_per_second()
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    return {
        "parameters": parameters,
        "rows": groups * rows,
        "tokens": tokens,
        **{f"{kind}_ms": round(value * 1e3, 2) for kind, value in medians.items()},
        **{f"{kind}_min_ms": round(min(values) * 1e3, 2) for kind, values in seconds.items()},
        **{f"{kind}_cpu_ms": round(statistics.median(values) * 1e3, 2) for kind, values in processor.items()},
        **{f"limit_{kind}_ms": round(6e3 * parameters * tokens / rate, 2) for kind, rate in rates.items()},
        "ours_over_padded": round(medians["ours"] / medians["padded"], 3),
        "ours_tokens_per_second": round(tokens / medians["ours"]),
    }


def _tensors(folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").values())


def main() -> None:
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or list(SETUPS)
    report = {name: measure(SETUPS[name], name) for name in chosen}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        json.dumps(
            {"torch": torch.__version__, "threads": 1, "load": os.getloadavg()[0], "peak_rss_mb": peak} | report,
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
