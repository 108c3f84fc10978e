"""Parts of gpu.py: an optimizer step of each trainer on a 0.5B model in bf16, and its memory's way to the host and back."""

import statistics
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from _gpu_world import World, rate, sizes


def trainer(world: World, backend: str) -> dict:
    """Return tokens/s, MFU, peak memory beside its estimate, and GB/s of offload and onload beside copies as large."""
    rows, prompt, response, micro = (8, 8, 24, 256) if world.small else (64, 128, 896, 16384)
    actor = _actor(world, backend, rows=rows, response=response, length=prompt + response, micro=micro)
    records = _records(rows, prompt, response, sizes(world)["vocab_size"])

    def step() -> None:
        actor.load_batch(records)
        actor.compute_advantages_and_returns()
        actor.run_training()

    if world.cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = world.median(step, 2 if world.small else 5, 2)
    tokens = rows * (prompt + response)
    operations = tokens * _operations_per_token(sizes(world), prompt + response)
    found = {
        "parameters": _parameters(sizes(world)),
        "tokens_per_step": tokens,
        "step_seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds),
        "tflops": round(1e-12 * operations / seconds, 3),
        "mfu": round(operations / seconds / world.peak, 4) if world.peak else None,
    }
    return found | _memory(world, actor) | _waits(world, step, micro_batches=-(-tokens // micro)) | _moves(world, actor)


def _actor(world: World, backend: str, *, rows: int, response: int, length: int, micro: int):
    from rl_core.api.job import RLJobSpec

    spec = RLJobSpec.model_validate(
        {
            "model": {"path": str(world.model), "dtype": "bfloat16"},
            "data": {"train": "unused.jsonl"},
            "algorithm": {"promptsPerStep": rows // 8, "groupSize": 8, "steps": 100},
            "actor": {
                "backend": backend,
                "gpus": int(world.cuda),
                "optimizer": {"learningRate": 1e-6},
                "microBatchTokens": micro,
            },
            "rollout": {"sampling": {"maxNewTokens": response}, "maxSequenceLength": length},
        }
    )
    if backend == "megatron":
        from rl_core.actors.megatron.actor import MegatronActor as Actor
    else:
        from rl_core.actors.fsdp.actor import FSDPActor as Actor
    actor = Actor(spec)
    actor.init_worker()
    return actor


def _records(rows: int, prompt_tokens: int, response_tokens: int, vocabulary: int) -> list:
    from rl_core.api.records import Completion, PromptGroupRecord

    rng = np.random.default_rng(0)

    def message(role: str, length: int) -> dict:
        made = {"role": role, "content": "", "token_ids": torch.tensor(rng.integers(0, vocabulary, length))}
        if role == "assistant":
            made["generation_logprobs"] = torch.full((length,), -float(np.log(vocabulary)))
        return made

    records = []
    for group in range(rows // 8):
        prompt = [message("user", prompt_tokens)]
        logs = [[*prompt, message("assistant", response_tokens)] for _ in range(8)]
        completions = [Completion(message_log=log, reward=float(rng.random())) for log in logs]
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


def _parameters(raw: dict) -> int:
    hidden, layers, inner = raw["hidden_size"], raw["num_hidden_layers"], raw["intermediate_size"]
    keys = hidden // raw["num_attention_heads"] * raw["num_key_value_heads"]
    layer = 2 * hidden * (hidden + keys) + hidden + 2 * keys + 3 * hidden * inner + 2 * hidden
    return int(raw["vocab_size"] * hidden + layers * layer + hidden)


def _operations_per_token(raw: dict, length: int) -> float:
    """Return 6 per parameter (the tied embedding is the head's matrix) and those of causal attention; what is computed twice counts once."""
    return 6 * _parameters(raw) + 6 * raw["num_hidden_layers"] * raw["hidden_size"] * length


def _memory(world: World, actor) -> dict:
    from rl_core.plan.capacity import ModelFacts, estimate

    if not world.cuda:
        return {}
    peak = torch.cuda.max_memory_allocated()
    expected = estimate(actor.cfg, ModelFacts.from_config(actor.cfg.model.path)).peak("actor")
    return {
        "peak_allocated": peak,
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "allocator": torch.cuda.memory._snapshot()["allocator_settings"],
        "estimated_with_context_and_margin": expected,
        "estimate_over_peak": round(expected / peak, 3),
    }


def _waits(world: World, step: Callable[[], None], *, micro_batches: int) -> dict:
    """Return how often a step waits for the device, by torch's own count, and where most."""
    if not world.cuda:
        return {}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [one for one in seen if "synchronizing CUDA operation" in str(one.message)]
    places = Counter(f"{Path(one.filename).name}:{one.lineno}" for one in waits)
    return {"micro_batches": micro_batches, "device_waits": len(waits), "waits_at": dict(places.most_common(8))}


def _moves(world: World, actor) -> dict:
    """Return the rates of `occupy`, the first of which pays for the host's pages, beside plain copies of as many bytes of the same sizes."""
    from rl_core.weights.offload import distinct_storages

    tensors = distinct_storages([*actor.manager.weight_tensors(), *actor.manager.moment_tensors()])
    nbytes = [tensor.untyped_storage().nbytes() for tensor in tensors]
    total, before = sum(nbytes), world.held()
    taken: dict[str, list[float]] = {"offload": [], "onload": [], "copies_away": [], "copies_back": []}
    left, away = 0, {}
    for _ in range(4):
        taken["offload"].append(world.seconds(lambda: actor.occupy([])))
        left, away = sum(tensor.untyped_storage().nbytes() for tensor in tensors), world.held()
        taken["onload"].append(world.seconds(lambda: actor.occupy(["weights", "optimizer"])))
    here = [torch.zeros(size, dtype=torch.uint8, device=world.device) for size in nbytes]
    there = [torch.zeros(size, dtype=torch.uint8, pin_memory=world.cuda) for size in nbytes]
    for name, sources, targets in (("copies_away", here, there), ("copies_back", there, here)):
        taken[name] = [world.seconds(partial(_copy, sources, targets)) for _ in range(4)]
    medians = {name: statistics.median(values[1:]) for name, values in taken.items()}
    ours, plain = medians["offload"] + medians["onload"], medians["copies_away"] + medians["copies_back"]
    return {
        "offload": {
            "bytes": total,
            "left_bytes": left,
            "first_offload_gb_per_second": rate(total, taken["offload"][0]),
            **{f"{name}_gb_per_second": rate(total, value) for name, value in medians.items()},
            "ours_over_copies": round(plain / ours, 3),
            "before": before,
            "away": away,
        }
    }


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
