"""Memory of a training process in each phase, computed from sizes, for each training backend. All sizes are in bytes.

tests/integration/test_trainer_memory.py compares it with what both backends allocate on a CPU. Where ranks hold different parts of the model,
the result is for the rank that needs most.
"""

from collections import Counter

from rl_core.api.job import RLJobSpec
from rl_core.plan.kept_layers import adapted_layers, kept_layers
from rl_core.plan.model_facts import ModelFacts

Parts = dict[str, int]

WIDTH = {"float32": 4, "bfloat16": 2}
MASTER_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 8
"""Per parameter: the float32 weight that is updated, a float32 gradient, two float32 moments."""
CHUNK = 1024
"""Tokens whose logits exist at a time (`algorithms.logprobs`)."""
BY_INPUTS = ("o_proj", "down_proj")
"""Layers whose inputs the tensor-parallel ranks divide; of the others they divide the outputs."""
BLOCK_BYTES = 4 * 2**20
"""float32 logits worked on at a time on a CPU (`algorithms.score_functions`)."""
ENTROPY_TOKENS = 128
"""Tokens whose entropy is computed at a time (`algorithms.score_functions`)."""


def trainer_phases(job: RLJobSpec, facts: ModelFacts, *, logits: bool = True) -> dict[str, Parts]:
    """Return phase -> part -> bytes on the device of a training process. `logits`: whether it computes any; a critic alone does not."""
    state = _megatron_state(job, facts) if job.actor.backend == "megatron" else _fsdp_state(job, facts)
    gather = _gathered(job, facts)
    copy = _publisher_copy(job, facts)
    # A third bucket is for the copies on other devices of the trainer.
    on_several_devices = copy and job.placement.mode != "disaggregated" and job.actor.gpus * job.actor.replicas > 1
    buckets = {"buckets": (3 if on_several_devices else 2) * job.weights.bucket_bytes}
    if job.model.lora is not None:  # A bucket is merged in float32, and the adapters are gathered whole.
        buckets["merged"] = job.weights.bucket_bytes * MASTER_BYTES // WIDTH[job.model.dtype]
        buckets["merged"] += 2 * MASTER_BYTES * adapter_parameters(job, facts)
    scoring, training = (_logit_bytes(job, facts, gradient=gradient) if logits else 0 for gradient in (False, True))
    # Without gradients no activations are kept: memory holds those of one layer at a time, then the logits.
    no_gradient = {"activations": max(0, _forward_bytes(job, facts) - scoring), "logits": scoring}
    if job.actor.offload.grads or job.placement.mode != "disaggregated":
        # Gradients that were released are allocated again, as zeros, for the training that follows.
        no_gradient["gradients"] = state.get("gradients") or state["optimizer"] * GRADIENT_BYTES // MOMENT_BYTES
    elif _has_reference(job) and job.actor.backend != "megatron":
        # The trained weights, while the model has those of the reference policy. Gradients that are allocated give their place to them.
        no_gradient["reference"] = state["weights"] // _models(job)
    train = {
        "gradients": state.get("gradients") or _fsdp_gradients(job, facts),
        "activations": _activation_bytes(job, facts, training),
        "logits": training,
    }
    return {
        "load": state | gather,
        "train": state | gather | train,
        "logprob": state | gather | no_gradient,
        "sync": state | gather | buckets | copy,
        "idle": state,
    }


def adapter_parameters(job: RLJobSpec, facts: ModelFacts) -> int:
    """Return the parameters of the adapters of `model.lora`, those of a separate critic left out; 0 without adapters."""
    lora = job.model.lora
    if lora is None:
        return 0
    widths = _target_widths(facts)
    per_layer = lora.rank * sum(sum(widths[target]) for target in set(lora.targets))
    return len(adapted_layers(job, facts.layers)) * per_layer


def _layer_adapters(job: RLJobSpec, facts: ModelFacts) -> int:
    """Return the parameters of the adapters of a layer that has any; 0 without adapters."""
    return adapter_parameters(job, facts) // max(1, len(adapted_layers(job, facts.layers)))


def _target_widths(facts: ModelFacts) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of each linear layer that may have an adapter."""
    hidden, inner, queries, keys = (
        facts.hidden,
        facts.inner,
        facts.heads * facts.head_dim,
        facts.kv_heads * facts.head_dim,
    )
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def trainer_host(job: RLJobSpec, facts: ModelFacts) -> int:
    """Return the additional bytes in host memory of a training process.

    They are the version of the weights that rank 0 keeps for rollouts that join later, the shards of a reference policy, and the copy from
    which an asynchronous checkpoint is written.
    """
    state = _megatron_state(job, facts) if job.actor.backend == "megatron" else _fsdp_state(job, facts)
    total = facts.parameters * WIDTH[job.model.dtype]
    if _has_reference(job):
        total += state["weights"] // _models(job) * WIDTH[job.model.dtype] // _stored_width(job)
    return total + checkpoint_copy(job, facts)


def checkpoint_copy(job: RLJobSpec, facts: ModelFacts) -> int:
    """Return the bytes of the copy in host memory from which an asynchronous checkpoint is written; 0 without such checkpoints."""
    if not job.checkpoint.asynchronous:
        return 0
    state = _megatron_state(job, facts) if job.actor.backend == "megatron" else _fsdp_state(job, facts)
    copied = state["optimizer"] * (MASTER_BYTES + MOMENT_BYTES) // MOMENT_BYTES
    if job.algorithm.needs_reference and job.algorithm.reference_update_steps is not None:
        copied += state["weights"] // _models(job) * MASTER_BYTES // _stored_width(job)
    return copied


def _has_reference(job: RLJobSpec) -> bool:
    """Return whether a trainer keeps the weights of a reference policy; with adapters it is the model without them."""
    return job.algorithm.needs_reference and job.model.lora is None


def _stored_width(job: RLJobSpec) -> int:
    """Return the bytes of a trained weight that the model stores; FSDP casts float32 ones for each pass."""
    return WIDTH[job.model.dtype] if job.actor.backend == "megatron" else MASTER_BYTES


def _models(job: RLJobSpec) -> int:
    """Return the number of trained models: 2 with a separate critic, else 1."""
    critic = job.algorithm.critic_of_actor
    return 2 if critic is not None and critic.separate else 1


def _fsdp_state(job: RLJobSpec, facts: ModelFacts) -> Parts:
    """Return the shard of weights and moments with FSDP; what is trained is float32 whatever type it computes in.

    With adapters only these are trained. FSDP1 stores frozen weights in float32 too, because a unit has one type.
    """
    adapters = adapter_parameters(job, facts)
    trained, frozen = (adapters, facts.parameters) if adapters else (facts.parameters, 0)
    trained, frozen = (_models(job) * -(-parameters // _copy_size(job)) for parameters in (trained, frozen))
    frozen_width = WIDTH[job.model.dtype] if job.actor.backend == "fsdp2" else MASTER_BYTES
    return {"weights": trained * MASTER_BYTES + frozen * frozen_width, "optimizer": trained * MOMENT_BYTES}


def _copy_size(job: RLJobSpec) -> int:
    """Return the number of processes over which FSDP shards one replica of the model."""
    return job.actor.world_size // job.actor.parallel.replicate


def _megatron_state(job: RLJobSpec, facts: ModelFacts) -> Parts:
    """Return weights, gradients, moments and float32 copies of a pipeline stage; the last two are sharded with a distributed optimizer.

    With adapters all but the weights are of these only.
    """
    stage, adapters, width = _stage_parameters(job, facts), _stage_adapters(job, facts), WIDTH[job.model.dtype]
    trained = _models(job) * (adapters or stage)
    updated = -(-trained // (job.actor.data_parallel if job.actor.optimizer.distributed else 1))
    weights = _models(job) * (stage + adapters) * width
    state = {"weights": weights, "gradients": trained * GRADIENT_BYTES, "optimizer": updated * MOMENT_BYTES}
    return state if width == MASTER_BYTES else state | {"master": updated * MASTER_BYTES}


def _stage_parameters(job: RLJobSpec, facts: ModelFacts) -> int:
    """Return the number of parameters of a tensor-parallel rank in the first pipeline stage."""
    parallel, embedding = job.actor.parallel, facts.vocab * facts.hidden
    if parallel.pipeline == 1:
        return -(-facts.parameters // parallel.tensor)
    return (facts.layers // parallel.pipeline * facts.layer + embedding) // parallel.tensor


def _stage_adapters(job: RLJobSpec, facts: ModelFacts) -> int:
    """Return the parameters of the adapters of a tensor-parallel rank in the pipeline stage that has most; 0 without adapters."""
    lora, parallel = job.model.lora, job.actor.parallel
    if lora is None:
        return 0
    layers_per_stage = facts.layers // parallel.pipeline
    stages = Counter(layer // layers_per_stage for layer in adapted_layers(job, facts.layers))
    widths = _target_widths(facts)
    parts = [
        widths[target][0] // (parallel.tensor if target in BY_INPUTS else 1)
        + widths[target][1] // (1 if target in BY_INPUTS else parallel.tensor)
        for target in set(lora.targets)
    ]
    return max(stages.values()) * lora.rank * sum(parts)


def _wrapped(job: RLJobSpec) -> bool:
    """Return whether the model is wrapped in FSDP; one process in float32 uses a plain model."""
    return job.actor.backend != "megatron" and (job.actor.world_size > 1 or job.model.dtype != "float32")


def _gathered(job: RLJobSpec, facts: ModelFacts) -> Parts:
    """Return the unsharded parameters during a pass: those outside the layers, the current layer and the prefetched one."""
    if not _wrapped(job):
        return {}
    other_parameters = facts.parameters - facts.layers * facts.layer
    layer = facts.layer + _layer_adapters(job, facts)
    return {"gather": (other_parameters + 2 * layer) * WIDTH[job.model.dtype]}


def _publisher_copy(job: RLJobSpec, facts: ModelFacts) -> Parts:
    """Return the copy of a version on a trainer's device.

    Receivers map it (CUDA IPC; each rank whose device has an engine), or a process group gets it (NCCL; rank 0).
    """
    transport = job.weights.transport
    point_to_point = transport in ("zmq", "gloo") or (
        transport == "auto" and (job.weights.syncer == "patch" or job.model.lora is not None)
    )
    return {} if point_to_point or not job.actor.gpus else {"publisher_copy": facts.parameters * WIDTH[job.model.dtype]}


def _fsdp_gradients(job: RLJobSpec, facts: ModelFacts) -> int:
    per_model, adapters = _models(job) * GRADIENT_BYTES, adapter_parameters(job, facts)
    if not adapters:
        parameters, unit = facts.parameters, facts.parameters - (facts.layers - 1) * facts.layer
    elif job.actor.backend == "fsdp1" and _wrapped(job):
        # The flat parameter of a layer has one gradient, of what is frozen too.
        unit = facts.layer + _layer_adapters(job, facts)
        parameters = len(adapted_layers(job, facts.layers)) * unit
    else:
        parameters, unit = adapters, _layer_adapters(job, facts)
    share = -(-parameters // _copy_size(job)) * per_model
    if not _wrapped(job):
        return share
    if _step_tokens(job, facts) > job.actor.micro_batch_tokens and job.actor.accumulate_without_sync:
        # Whole: ranks reduce with the last of several micro-batches alone.
        return parameters * per_model
    return share + unit * per_model


def _activation_bytes(job: RLJobSpec, facts: ModelFacts, logits: int) -> int:
    """Return the activations that the backward passes of all micro-batches in flight need beside the bytes of `logits`."""
    lora, parallel = job.model.lora, job.actor.parallel
    # The largest gradients of a layer exist when the logits are gone: those of the feed-forward part's two inputs and of the residuals.
    residuals = facts.hidden * max(1, facts.experts_per_token)
    gradients = WIDTH[job.model.dtype] * 2 * (facts.inner // parallel.tensor + residuals)
    if lora is not None and job.actor.backend == "megatron" and job.model.dtype != "float32":
        gradients += MASTER_BYTES * 3 * facts.hidden  # its norms in half precision are computed in float32
    gradients *= _tokens(job, facts)
    targets = None if lora is None else frozenset(lora.targets)
    trained, recomputed = _kept_bytes(job, facts, targets)
    frozen, _ = _kept_bytes(job, facts, frozenset())
    lowest = trained
    if targets is not None and not job.actor.gradient_checkpointing:
        lowest = _lowest_layer_bytes(job, facts, targets)
    kept = max(
        counts.trained * trained + counts.frozen * frozen + counts.lowest * lowest
        for counts in kept_layers(job, facts.layers)
    )
    # Before there are logits, a layer that keeps nothing works too. Nor is a layer computed again while there are any.
    return max(int(_models(job) * kept) + max(0, recomputed + gradients - logits), _forward_bytes(job, facts) - logits)


def _kept_bytes(job: RLJobSpec, facts: ModelFacts, targets: frozenset[str] | None) -> tuple[int, int]:
    """Return the bytes that a decoder layer keeps of one micro-batch until its backward pass, and those that it computes again then."""
    layer = _layer_bytes(job, facts, targets)
    if not job.actor.gradient_checkpointing:
        return layer, 0
    parallel = job.actor.parallel
    inputs = _tokens(job, facts) * facts.hidden * WIDTH[job.model.dtype]
    inputs //= parallel.tensor if parallel.sequence else 1
    if job.actor.gradient_checkpointing_mode == "full":
        return inputs, layer
    recomputed = _recomputed_bytes(job, facts, layer, targets)
    return layer - recomputed + (0 if job.actor.backend == "megatron" else inputs), recomputed


def _recomputed_bytes(job: RLJobSpec, facts: ModelFacts, layer: int, targets: frozenset[str] | None) -> int:
    """Return how many of the `layer` bytes that a decoder layer keeps are computed again with selective checkpointing."""
    width, parallel = WIDTH[job.model.dtype], job.actor.parallel
    if job.actor.backend == "megatron":
        return _tokens(job, facts) * width * _inner_kept(targets) * facts.inner // parallel.tensor
    queries, keys = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    outputs = {"q": queries, "k": keys, "v": keys, "o": facts.hidden}
    outputs |= {"gate": facts.inner, "up": facts.inner, "down": facts.hidden}
    rank = 0 if job.model.lora is None or _merges(job) else job.model.lora.rank
    products: list[int] = []
    for name, size in outputs.items():
        products += [size, rank, size] if rank and targets and f"{name}_proj" in targets else [size]
    # Of the products every second one is kept, and attention with its normalisers.
    return layer - _tokens(job, facts) * (width * (sum(products[::2]) + queries) + 4 * facts.heads)


def _forward_bytes(job: RLJobSpec, facts: ModelFacts) -> int:
    """Return the most that a decoder layer holds of one micro-batch in a forward pass without gradient."""
    queries, keys = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    # Gate and up projection and their product, beside the sum with an adapter's output, or in megatron's fused projection, gate itself.
    products = 4 if job.model.lora is not None or job.actor.backend == "megatron" else 3
    attention = 3 * queries + 2 * keys
    if job.actor.attention == "eager":  # scores and probabilities of each head
        attention += 2 * facts.heads * (job.rollout.max_sequence_length or facts.max_length)
    widest = max(products * facts.inner, attention) // job.actor.parallel.tensor
    # Embeddings, residuals, the normalised input and rotary angles are held all the time.
    return _tokens(job, facts) * WIDTH[job.model.dtype] * (4 * facts.hidden + 2 * facts.head_dim + widest)


def _layer_bytes(job: RLJobSpec, facts: ModelFacts, targets: frozenset[str] | None) -> int:
    """Return the activations that the gradients of a decoder layer need of one micro-batch.

    `targets` are its linear layers with adapters; None if all weights are trained.
    """
    width, parallel = WIDTH[job.model.dtype], job.actor.parallel
    queries, keys = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    adapted = targets or frozenset()
    scaled = bool(adapted & {"q_proj", "k_proj", "v_proj"}) + bool(adapted & {"gate_proj", "up_proj"})
    hidden_of_adapters = 0 if job.model.lora is None or _merges(job) else width * job.model.lora.rank * len(adapted)
    if job.actor.backend == "megatron":
        # The fused query, key and value live on with the value, rotated ones beside them; norms in half precision are made in float32.
        norms = facts.hidden * (28 if width == MASTER_BYTES else 22)
        if targets is not None:
            norms = facts.hidden * ((16 if width == MASTER_BYTES else 13) + scaled * width)
        shared = width * (3 * queries + 3 * keys + _inner_kept(targets) * facts.inner)
        shared += hidden_of_adapters * parallel.tensor
    elif targets is None:
        # Each of the two norms keeps its input in float32, the normalised input and the scaled one.
        norms = 2 * facts.hidden * (MASTER_BYTES + 2 * width)
        shared = width * (2 * queries + 2 * keys + 4 * facts.inner)
    else:  # Activations that only the gradients of frozen weights would need are not kept.
        norms = facts.hidden * (2 * MASTER_BYTES + scaled * width)
        shared = width * (2 * queries + 2 * keys + (3 + ("down_proj" in targets)) * facts.inner) + hidden_of_adapters
    # Each norm of a head keeps its input in float32, and the normalised input for the gradient of its weight.
    if facts.head_norms:
        shared += (queries + keys) * (MASTER_BYTES + (width if targets is None else 0))
    shared += 4 * facts.heads  # The normalisers of the attention.
    # For each token: its copies for its experts, their results, and the probabilities of all experts.
    shared += 2 * facts.experts_per_token * facts.hidden * width + 3 * facts.experts * MASTER_BYTES
    # Eager attention keeps the probabilities, in float32 and in the width of the product, and keys and values for each head.
    if job.actor.attention == "eager":
        longest = job.rollout.max_sequence_length or facts.max_length
        shared += facts.heads * longest * (MASTER_BYTES + (width if width != MASTER_BYTES else 0)) + 2 * queries * width
    return _tokens(job, facts) * (norms // (parallel.tensor if parallel.sequence else 1) + shared // parallel.tensor)


def _lowest_layer_bytes(job: RLJobSpec, facts: ModelFacts, targets: frozenset[str]) -> int:
    """Return the activations of the lowest layer with adapters: what its linear layers `targets` and the gradients down to them need."""
    if targets & {"q_proj", "k_proj", "v_proj"}:
        return _layer_bytes(job, facts, targets)
    width, parallel = WIDTH[job.model.dtype], job.actor.parallel
    inner = facts.inner // parallel.tensor
    kept_width = 0 if job.model.lora is None or _merges(job) else width * job.model.lora.rank * len(targets)
    if "o_proj" in targets:
        kept_width += width * facts.heads * facts.head_dim // parallel.tensor
    if targets == {"down_proj"}:
        return _tokens(job, facts) * (kept_width + width * inner)
    per_inner = _inner_kept(targets) if job.actor.backend == "megatron" else 3 + ("down_proj" in targets)
    return _tokens(job, facts) * (kept_width + facts.hidden * (MASTER_BYTES + width) + width * per_inner * inner)


def _inner_kept(targets: frozenset[str] | None) -> int:
    """Return how many numbers for each one inside a feed-forward part megatron keeps; the product is kept for the gradient of what follows."""
    return 5 if targets is None or "down_proj" in targets else 4


def _merges(job: RLJobSpec) -> bool:
    """Return whether layers compute with merged weights, so that nothing of the adapters is kept for the backward pass."""
    lora = job.model.lora
    return lora is not None and job.actor.backend != "megatron" and job.model.dtype == "float32" and not lora.dropout


def _logit_bytes(job: RLJobSpec, facts: ModelFacts, *, gradient: bool) -> int:
    """Return the memory for the logits of a chunk of tokens: logits, float32 blocks and, with `gradient`, the gradient of the output weight."""
    stored, vocabulary = WIDTH[job.model.dtype], -(-facts.vocab // job.actor.parallel.tensor)
    width = MASTER_BYTES if job.model.float32_head else stored
    tokens = min(_tokens(job, facts), CHUNK)
    chunk = tokens * vocabulary
    block = 4 * chunk if job.actor.gpus else min(BLOCK_BYTES, 4 * chunk)
    converting = block if width != MASTER_BYTES else 0  # float32 logits are scored in place
    # The head's weight and the hidden states in float32.
    converted = (vocabulary + _tokens(job, facts)) * facts.hidden * MASTER_BYTES if width != stored else 0
    total = chunk * width + converting + converted
    if not gradient:
        return total
    weight = vocabulary * facts.hidden * (GRADIENT_BYTES + (stored if stored != MASTER_BYTES else 0))
    backward = (block if job.algorithm.loss.entropy_coefficient else 0) + (weight if job.model.lora is None else 0)
    # The entropy is a metric, and computed whether the loss has it or not.
    return total + max(backward, MASTER_BYTES * min(tokens, ENTROPY_TOKENS) * vocabulary)


def _tokens(job: RLJobSpec, facts: ModelFacts) -> int:
    """Return the tokens of a full micro-batch: the budget, or all rows of an optimizer step where they are fewer."""
    return min(job.actor.micro_batch_tokens, _step_tokens(job, facts))


def _step_tokens(job: RLJobSpec, facts: ModelFacts) -> int:
    """Return the most tokens of an optimizer step on a data rank."""
    rows = job.algorithm.prompts_per_step * job.algorithm.group_size // job.actor.data_parallel
    longest = job.rollout.max_sequence_length or facts.max_length
    return max(rows // job.algorithm.optimizer_steps_per_batch, 1) * longest
