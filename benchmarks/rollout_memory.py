"""Memory and start of a rollout process, beside torch alone and beside transformers' model classes. Prints JSON.

Each line is a fresh process: `torch` imports torch; `rollout` is what a rollout process holds (worker, receiver, engine of
the lean forward with the first weights, tokenizer) after 256 samples; `transformers` imports torch and the Qwen2 classes and
builds the same model with `generate` run once. `added_megabytes` is the resident memory above `torch`, the model's own bytes
taken off. Start seconds are processor seconds until ready, medians over the repetitions.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

REPETITIONS = 3
CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 49,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}


def resident_megabytes() -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def files() -> dict[str, bytes]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz0123456789 +=.,-*/?!"]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"}).encode(),
    }


def run_torch() -> float:
    import torch

    torch.ones(64, 64) @ torch.ones(64, 64)
    return time.process_time()


def run_rollout() -> float:
    import rl_core.workers.host  # noqa: F401 - the process's main module
    from rl_core.api.job import RLJobSpec
    from rl_core.rollouts.hf.worker import HFRolloutWorker

    spec = RLJobSpec.model_validate({"model": {"path": "x"}, "data": {"train": "x"}, "rollout": {"maxBatch": 256}})
    worker = HFRolloutWorker(spec, {"max_seq_len": 128})
    worker._context.files = files()
    worker.init_worker()
    ready = time.process_time()
    import torch

    engine = worker._built().engine.loop.engine
    shapes = engine.names_and_shapes().items()
    engine.load_weights([(name, torch.ones(s) if len(s) == 1 else torch.randn(s) * 0.05) for name, s in shapes], 1)
    engine.generate([[5, 6, 7, 8]] * 256, {"max_new_tokens": 64}, range(256))
    return ready


def run_transformers() -> float:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(
        Qwen2Config(**{k: v for k, v in CONFIG.items() if k not in ("model_type", "architectures")})
    ).eval()
    ready = time.process_time()
    ids = torch.tensor([[5, 6, 7, 8]] * 256)
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=64)
    return ready


def parameter_megabytes() -> float:
    c = CONFIG
    head = c["hidden_size"] // c["num_attention_heads"]
    attention = (c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * head * (c["hidden_size"] + 1) + c[
        "hidden_size"
    ] ** 2
    layer = attention + 3 * c["hidden_size"] * c["intermediate_size"] + 2 * c["hidden_size"]
    return 4 * (c["vocab_size"] * c["hidden_size"] + c["num_hidden_layers"] * layer + c["hidden_size"]) / 2**20


def measure(kind: str) -> dict[str, float]:
    runs = []
    for _ in range(REPETITIONS):
        out = subprocess.run([sys.executable, __file__, kind], capture_output=True, text=True, check=True).stdout
        runs.append(json.loads(out.splitlines()[-1]))
    return {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}


def main() -> None:
    kinds: dict[str, Any] = {"torch": run_torch, "rollout": run_rollout, "transformers": run_transformers}
    if len(sys.argv) > 1:
        ready = kinds[sys.argv[1]]()
        print(json.dumps({"resident_megabytes": resident_megabytes(), "ready_seconds": ready}), flush=True)
        os._exit(0)
    result = {kind: measure(kind) for kind in kinds}
    base, model = result["torch"]["resident_megabytes"], parameter_megabytes()
    for kind in ("rollout", "transformers"):
        result[kind]["added_megabytes"] = round(result[kind]["resident_megabytes"] - base - model, 1)
    print(json.dumps({"repetitions": REPETITIONS, "model_megabytes": round(model, 2), **result}, indent=1))


if __name__ == "__main__":
    main()
