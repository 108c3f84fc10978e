"""Syncs of adapters alone to an SGLang engine beside syncs of whole versions, in turns. Prints JSON.

    OMP_NUM_THREADS=1 python benchmarks/adapter_sync.py [--runs 7]

A real publisher, receiver and engine on one host. `sync_ms` is OFFER to the last ACK, when the engine serves; `bytes` is what the rollout
needed. Whole versions have another base each time, so that all of it is sent, loaded and read back from the engine. "arithmetic" has the
size of the model of `examples/arithmetic` with adapters of rank 8; "wide" has two layers of a model of 0.5 billion parameters, rank 16.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

ARITHMETIC = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
MODELS = {"arithmetic": (ARITHMETIC, 8), "wide": (WIDE, 16)}
"""Name -> (sizes, rank of the adapters)."""


def measure(sizes: dict[str, int], rank: int, runs: int) -> dict[str, float]:
    """Return medians of adapter-only and whole syncs of a model with `sizes` and adapters of `rank`."""
    import torch

    from rl_core.rollouts.sglang import SGLangWorker
    from tests.integration import rollout_world, test_adapter_sync

    torch.set_num_threads(1)
    rollout_world.CONFIG.update(sizes)
    test_adapter_sync.LORA.update({"rank": rank, "alpha": 3.0 * rank})
    world = test_adapter_sync.LoraWorld(SGLangWorker, **test_adapter_sync.SGLANG)
    whole, adapters = [], []
    try:
        for seed in range(runs + 1):
            base = rollout_world.random_state(seed)
            given = test_adapter_sync.adapters_of(base, seed, rank)
            whole.append(world.sync(seed, base=base, adapters=given))
            adapters.append(world.sync(seed, adapters=test_adapter_sync.adapters_of(base, 1000 + seed, rank)))
    finally:
        world.close()
    assert all(report.patched for report in adapters) and not any(report.patched for report in whole)
    found = {
        f"{name} {key}": statistics.median(getattr(report, field) for report in reports[1:]) * scale
        for name, reports in (("whole", whole), ("adapter", adapters))
        for key, field, scale in (
            ("bytes", "bytes", 1),
            ("sync_ms", "sync_seconds", 1e3),
            ("pause_ms", "pause_seconds", 1e3),
        )
    }
    for key in ("bytes", "sync_ms", "pause_ms"):
        found[f"adapter / whole, {key}"] = found[f"adapter {key}"] / found[f"whole {key}"]
    return found


def main() -> None:
    """Measure the models one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    result = {"load": os.getloadavg(), "runs": runs}
    for name, (sizes, rank) in MODELS.items():
        result[name] = {key: round(value, 4) for key, value in measure(sizes, rank, runs).items()}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
