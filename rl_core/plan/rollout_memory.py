"""Memory of a rollout process in each phase, computed from sizes, for each engine. All sizes are in bytes.

The engine hf allocates its KV cache for `rollout.maxBatch` sequences of the longest length, as SGLang does on a CPU. On a GPU SGLang gives
the share `mem_fraction_static` of the device to weights and KV pool. Sequences for which the pool has no room wait in its queue, so a
single one of the longest length must fit.
"""

from rl_core.api.job import RLJobSpec
from rl_core.plan.model_facts import ModelFacts
from rl_core.plan.trainer_memory import MASTER_BYTES, WIDTH, Parts

LOGIT_BYTES = 8
"""Bytes per token and vocabulary entry: a float32 logit and its gradient."""
STATIC_FRACTION = 0.83
"""About the `mem_fraction_static` that SGLang chooses on devices of 24 to 80 GiB."""


def rollout_phases(job: RLJobSpec, facts: ModelFacts, *, context: int, margin: float) -> dict[str, Parts]:
    """Return phase -> part -> bytes on the device of a rollout process.

    `context` bytes and the share `margin` of the sum are counted beside the parts by the caller. They are in the share of the device that
    SGLang leaves free.
    """
    weights, longest = {"weights": _weights(job, facts)}, _longest(job, facts)
    allocated = job.rollout.engine_args.get("max_total_tokens") or job.rollout.max_batch * longest
    tokens = longest if has_pool(job) else allocated
    cache = {"kv_cache": tokens * _token_bytes(job, facts)}
    head = facts.hidden * MASTER_BYTES if job.model.float32_head and WIDTH[job.model.dtype] != MASTER_BYTES else 0
    logits = {"logits": -(-facts.vocab // _ranks(job)) * (job.rollout.max_batch * LOGIT_BYTES + head)}
    if has_pool(job):
        static = weights["weights"] + cache["kv_cache"]
        total = int((static + context) / static_fraction(job) / (1 + margin))
        logits["engine"] = max(0, total - context - static - logits["logits"])
    return {
        "load": weights,
        "generate": weights | cache | logits,
        "sync": weights | cache | {"buckets": 2 * job.weights.bucket_bytes},
        "idle": weights | cache,
    }


def has_pool(job: RLJobSpec) -> bool:
    """Return whether the engine sizes its KV cache by the memory of the device and queues sequences that do not fit."""
    return job.rollout.engine == "sglang" and job.rollout.gpus > 0


def static_fraction(job: RLJobSpec) -> float:
    """Return the share of the device that SGLang gives to weights and KV pool."""
    return float(job.rollout.engine_args.get("mem_fraction_static") or STATIC_FRACTION)


def sequences_in_pool(job: RLJobSpec, facts: ModelFacts, device_memory: int, *, beside: int) -> int:
    """Return how many sequences of the longest length the KV pool of SGLang holds at a time on a device of `device_memory` bytes.

    `beside` are the bytes that are on the device besides weights and pool: contexts of processes.
    """
    pool_bytes = int(device_memory * static_fraction(job)) - _weights(job, facts) - beside
    tokens = max(0, pool_bytes) // _token_bytes(job, facts)
    tokens = min(tokens, job.rollout.engine_args.get("max_total_tokens") or tokens)
    return tokens // _longest(job, facts)


def _ranks(job: RLJobSpec) -> int:
    return job.rollout.tensor_parallel


def _longest(job: RLJobSpec, facts: ModelFacts) -> int:
    return job.rollout.max_sequence_length or facts.max_length


def _weights(job: RLJobSpec, facts: ModelFacts) -> int:
    return -(-facts.parameters // _ranks(job)) * WIDTH[job.model.dtype]


def _token_bytes(job: RLJobSpec, facts: ModelFacts) -> int:
    """Return the keys and values of a token on one accelerator; SGLang replicates heads where there are fewer than accelerators."""
    return 2 * facts.layers * -(-facts.kv_heads // _ranks(job)) * facts.head_dim * WIDTH[job.model.dtype]
