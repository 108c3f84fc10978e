"""Parts of gpu.py: the machine's limits, packed attention beside the CPU path, and the HF engine."""

import importlib.metadata
import math
import platform
from functools import partial

import numpy as np
import torch
from _gpu_world import World, fill, rate, sizes

PACKAGES = ("torch", "transformers", "triton", "megatron-core", "sglang", "numpy", "pyzmq", "pydantic", "nvidia-ml-py")


def machine(world: World) -> dict:
    """Return what there is, and what its memory, its link and its matrix products can do."""
    from rl_core.workers.devices import device_uuids

    found: dict = {"python": platform.python_version(), "packages": _versions()}
    if world.cuda:
        properties = torch.cuda.get_device_properties(world.device)
        found |= {
            "name": properties.name,
            "memory": properties.total_memory,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "uuids": device_uuids(("0",)),
        }
    size = 256 if world.small else 8192
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=world.device) for _ in range(2))
    found["matmul_bf16_tflops"] = round(2e-12 * size**3 / world.median(lambda: left @ right, 9, 3), 3)
    nbytes = 2**20 if world.small else 2**30
    here, also = (torch.ones(nbytes, dtype=torch.uint8, device=world.device) for _ in range(2))
    found["device_copy_gb_per_second"] = rate(2 * nbytes, world.median(lambda: also.copy_(here), 9))
    for name, pinned in (("pinned", True), ("pageable", False)):
        host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned and world.cuda)
        away, back = partial(host.copy_, here, non_blocking=True), partial(here.copy_, host, non_blocking=True)
        found[f"to_host_{name}_gb_per_second"] = rate(nbytes, world.median(away))
        found[f"to_device_{name}_gb_per_second"] = rate(nbytes, world.median(back))
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def group(world: World) -> dict:
    """Form a process group of one over the weights' code (NCCL takes no device twice), broadcast, and end it as a lost member does."""
    from rl_core.api.errors import InfrastructureError
    from rl_core.collective.group import GroupStore, TensorGroup
    from rl_core.messages.weights import GroupPlan

    store = GroupStore("127.0.0.1")
    backend = "nccl" if world.cuda else "gloo"
    plan = GroupPlan(
        name="gpu", epoch=0, generation=1, members=("one",), backend=backend, host=store.host, port=store.port
    )
    made = TensorGroup.form(plan, 0, timeout=60)
    tensor = torch.arange(1024.0, device=world.device)
    made.broadcast(tensor)
    same = torch.equal(tensor.cpu(), torch.arange(1024.0))
    made.abort("the benchmark ends it")
    try:
        made.broadcast(tensor)
        refused = False
    except InfrastructureError:
        refused = True
    return {"backend": backend, "broadcast_kept_the_tensor": same, "aborted_group_refuses": refused}


def attention(world: World) -> dict:
    """Return how far packed attention in bf16 is from the CPU path in float32, values and gradients, and what it does in a second."""
    heads, key_heads, dim, total = (4, 2, 16, 192) if world.small else (14, 2, 64, 16384)
    lengths = _lengths(total, mean=4.0 if world.small else 6.5)
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(1, one, total, dim, generator=generator).bfloat16() for one in (heads, key_heads, key_heads)]
    weight = torch.randn(1, total, heads, dim, generator=generator).bfloat16()
    found: dict = {"rows": len(lengths), "tokens": total, "longest": max(lengths)}
    for name, window in (("causal", None), ("window", 64)):
        reference = _attended([one.float() for one in states], weight.float(), lengths, window, "cpu")
        ours = _attended(states, weight, lengths, window, world.device)
        errors = [_relative(got, wanted) for got, wanted in zip(ours, reference, strict=True)]
        found[name] = dict(zip(("output", "d_query", "d_key", "d_value"), errors, strict=True))
        found[name]["within_bf16"] = max(errors) < 2e-2
    seconds = world.median(lambda: _attended(states, weight, lengths, None, world.device), 9, 2)
    operations = 14 * heads * dim * sum(length**2 / 2 for length in lengths)
    return found | {"with_copies_ms": round(1e3 * seconds, 3), "tflops": round(1e-12 * operations / seconds, 3)}


def _lengths(total: int, *, mean: float) -> list[int]:
    drawn, rng = [], np.random.default_rng(0)
    while sum(drawn) < total:
        drawn.append(min(max(1, int(rng.lognormal(mean, 0.6))), total - sum(drawn)))
    return drawn


def _attended(states, weight, lengths, window, device) -> list[torch.Tensor]:
    """Return [output, gradients of query, key and value], on the CPU in float32."""
    from rl_core.actors.attention import PackedLayout, packed_attention

    query, key, value = (one.to(device).requires_grad_() for one in states)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    output, _ = packed_attention(
        None, query, key, value, None, packed=PackedLayout(offsets, lengths), scaling=0.1, sliding_window=window
    )
    gradients = torch.autograd.grad((output * weight.to(device)).sum(), (query, key, value))
    return [one.detach().float().cpu() for one in (output, *gradients)]


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    error = float((got - wanted).norm() / wanted.norm())
    return round(error, 6) if math.isfinite(error) else math.inf


def generation(world: World) -> dict:
    """Return the HF engine's tokens/s, its greedy tokens beside those of the CPU, and the memory that it gives up asleep."""
    return {"parity": _parity(world), **_generated(world)}


def _engine(world: World, raw: dict, device: str, dtype: torch.dtype, *, rows: int, tokens: int):
    from rl_core.rollouts.hf import HFEngine
    from rl_core.rollouts.hf.config import DecoderConfig
    from rl_core.rollouts.hf.weights import DecoderWeights

    class Tokenizer:
        eos_token_id = None

    weights = DecoderWeights(DecoderConfig.from_dict(raw), dtype=dtype, device=device)
    fill(weights, device)
    return HFEngine(weights, Tokenizer(), max_batch=rows, max_seq_len=tokens)


def _parity(world: World) -> dict:
    """Return the share of equal greedy tokens of one small model in float32 here and on the CPU, over prompts of unequal lengths."""
    raw, prompts = (
        sizes(World("cpu", True, world.folder)),
        [[3 + (7 * row + at) % 60 for at in range(4 + row)] for row in range(8)],
    )
    sampling = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
    rows = []
    for device in (world.device, "cpu"):
        engine = _engine(world, raw, device, torch.float32, rows=8, tokens=64)
        rows.append(engine.generate(prompts, sampling, seeds=range(8)))
    pairs = [pair for ours, theirs in zip(*rows, strict=True) for pair in zip(ours.ids, theirs.ids, strict=True)]
    apart = max(
        abs(one - other) for ours, theirs in zip(*rows, strict=True) for one, other in zip(ours.logprobs, theirs.logprobs, strict=True)
    )  # fmt: skip
    return {"equal_tokens": sum(one == other for one, other in pairs) / len(pairs), "logprobs_apart": apart}


def _generated(world: World) -> dict:
    from rl_core.rollouts.hf.loop import EngineLoop
    from rl_core.rollouts.hf.residency import HFResidency

    rows, prompt, new = (8, 8, 16) if world.small else (256, 128, 128)
    raw = sizes(world)
    engine = _engine(world, raw, world.device, torch.bfloat16, rows=rows, tokens=prompt + new)
    prompts = [[3 + (7 * row + 3 * at) % 60 for at in range(prompt)] for row in range(rows)]
    sampling = {"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True}
    seconds = world.median(lambda: engine.generate(prompts, sampling, seeds=range(rows)), 3)
    residency = HFResidency(EngineLoop(engine))
    awake = world.held()
    sleep = world.seconds(lambda: residency.offload(["weights", "kv_cache"]))
    asleep = world.held()
    wake = world.seconds(lambda: residency.onload(["weights", "kv_cache"]))
    again = world.seconds(lambda: residency.offload(["weights"]))
    residency.onload(["weights"])
    nbytes = sum(one.nbytes for one in engine.stored_weights())
    return {
        "rows": rows,
        "tokens_per_second": round(rows * new / seconds),
        "weights_bytes": nbytes,
        "sleep_seconds": round(sleep, 4),
        "sleep_again_seconds": round(again, 4),
        "wake_seconds": round(wake, 4),
        "awake": awake,
        "asleep": asleep,
    }
