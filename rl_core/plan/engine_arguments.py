"""Checks what a job asks of SGLang, above all `rollout.engineArgs`, the arguments that it passes on, without importing SGLang.

`sglang_arguments.json` has the names, types and choices of the arguments of the SGLang version that the images contain. It is generated from
SGLang's source (`tests/lint/sglang_arguments.py`).
"""

from __future__ import annotations

import difflib
import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.api.backends import MOST_ENGINE_PROCESSES
from rl_core.api.errors import ConfigError

if TYPE_CHECKING:
    from rl_core.api.job import RLJobSpec

FILE = Path(__file__).with_name("sglang_arguments.json")
WEIGHTS = "the engine gets its weights by weight sync only; remove it"
PROCESSES = "rljob starts the engine's processes and chooses their addresses; remove it"
ONE_ENGINE = "the ranks of an engine share each layer, in one pod; use rollout.gpus for a larger engine and rollout.replicas for more engines"
ADAPTERS = "the engine's adapter is that of spec.model.lora, one at a time; remove it"
SAMPLING = "every row has the sampling settings of the job; use rollout.sampling"
RESERVED: Mapping[str, str] = {
    "model_path": "use spec.model.path",
    "tokenizer_path": "the tokenizer is that of spec.model.path; remove it",
    "skip_tokenizer_init": "the engine finds stop strings with its tokenizer; remove it",
    "json_model_override_args": "trainer and engine must run the same model; change config.json of spec.model.path",
    "trust_remote_code": (
        "neither the trainer nor the engine runs code from the folder of a model; remove it and use a model that docs/trainers.md lists"
    ),
    "is_embedding": "rollouts generate; remove it",
    "dtype": "use spec.model.dtype",
    "enable_fp32_lm_head": "use spec.model.float32Head, which trainer and engine share",
    "quantization": "the engine must serve the weights that are trained, and their checksums are compared; remove it",
    "context_length": "use rollout.maxSequenceLength",
    "max_running_requests": "use rollout.maxBatch",
    "random_seed": "use algorithm.seed",
    "grammar_backend": "no completion is constrained by a grammar; remove it",
    "skip_server_warmup": "the engine has no weights when it starts; remove it",
    "enable_memory_saver": "use placement.mode colocated, which sets it",
    "incremental_streaming_output": "the worker reads whole outputs; remove it",
    "custom_sigquit_handler": "a function cannot be given in a job; remove it",
    "disaggregation_mode": "an engine prefills and decodes; remove it",
    "weight_version": "each weight sync sets it; remove it",
    **dict.fromkeys(("sampling_defaults", "preferred_sampling_params"), SAMPLING),
    **dict.fromkeys(("pp_size", "nnodes", "node_rank"), ONE_ENGINE),
    "enable_dp_attention": "use attn_dp_size; dp_size is the number of engines of a pod",
    **dict.fromkeys(("device", "base_gpu_id", "gpu_id_step", "use_ray"), PROCESSES),
    **dict.fromkeys(("host", "port", "nccl_port", "dist_init_addr", "tokenizer_worker_num"), PROCESSES),
    **dict.fromkeys(("enable_lora", "lora_paths", "max_lora_rank", "lora_target_modules"), ADAPTERS),
    **dict.fromkeys(("max_loras_per_batch", "max_loaded_loras", "enable_lora_overlap_loading"), ADAPTERS),
    **dict.fromkeys(("load_format", "custom_weight_loader", "revision", "download_dir", "model_checksum"), WEIGHTS),
    **dict.fromkeys(("enable_weights_cpu_backup", "startup_weight_load_mode", "weight_cache_mode"), WEIGHTS),
    **dict.fromkeys(("checkpoint_engine_wait_weights_before_ready", "modelopt_quant", "quantize_and_serve"), WEIGHTS),
}
"""Argument -> why a job may not pass it, and what to do instead."""
OF_VLLM = {
    "gpu_memory_utilization": "mem_fraction_static",
    "tensor_parallel_size": "tp_size",
    "data_parallel_size": "dp_size",
    "max_model_len": "context_length",
    "max_num_seqs": "max_running_requests",
    "enforce_eager": "disable_cuda_graph",
}
"""Arguments of vLLM under the names of SGLang."""
POD_ARGUMENTS = ("tp_size", "dp_size")
"""Arguments that divide the accelerators of a pod: into `dp_size` engines of `tp_size` accelerators. Each engine is a rollout of its own, so
that SGLang's controller of data-parallel replicas, whose weights cannot be updated from tensors, is not used."""
RANK_DIVISORS = (("attn_dp_size", "attn_cp_size"), ("ep_size", "moe_dp_size"))
"""Arguments that divide the ranks of an engine, for attention and for layers of experts.

Their product must divide `tp_size`. The quotient is the tensor-parallel size of those layers.
"""
KEPT_CACHE = ("disable_overlap_schedule",)
"""Arguments that `weights.onUpdate: keep_kv` sets to true."""
TYPES: Mapping[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def check_engine_arguments(spec: RLJobSpec) -> None:
    """Check `rollout.engineArgs`, and that the penalties of `rollout.sampling` suit the engine. The engine hf accepts no arguments.

    Raises ConfigError with every argument that rljob sets itself, that SGLang does not have, or whose value it does not accept. If there is
    none, with the sizes that do not divide the accelerators of a pod or, after that, the ranks of an engine.
    """
    if spec.rollout.engine_args and spec.rollout.engine != "sglang":
        raise ConfigError(
            f"rollout.engineArgs are arguments of SGLang, got engine {spec.rollout.engine}; choose sglang or remove them"
        )
    if spec.rollout.engine == "sglang" and spec.rollout.sampling.penalised:
        raise ConfigError(
            "presencePenalty, frequencyPenalty and repetitionPenalty of rollout.sampling need engine hf, got sglang, which penalises each token "
            "one step late and the last token of the prompt too; choose hf or remove them"
        )
    problems = [
        f"rollout.engineArgs.{name} {problem}"
        for name, value in spec.rollout.engine_args.items()
        if (problem := _problem(name, value, kept=spec.weights.on_update == "keep_kv"))
    ]
    if problems or (problems := list(_sizes(spec)) or list(_divisions(spec))):
        raise ConfigError("\n".join(problems))


def _sizes(spec: RLJobSpec) -> Iterator[str]:
    """Yield what is wrong with the sizes of the engines of a pod. Their types are right."""
    rollout, field = spec.rollout, "rollout.engineArgs."
    engine_sizes = {name: rollout.engine_args[name] for name in POD_ARGUMENTS if name in rollout.engine_args}
    invalid = {name: size for name, size in engine_sizes.items() if not 1 <= size <= MOST_ENGINE_PROCESSES}
    for name, size in invalid.items():
        yield f"{field}{name} must be 1 to {MOST_ENGINE_PROCESSES}, got {size}; correct it"
    if not engine_sizes or invalid:
        return
    ranks, engines = engine_sizes.get("tp_size", 1), engine_sizes.get("dp_size", 1)
    if not rollout.gpus:
        if ranks > 1:
            yield f"{field}tp_size must be 1 with rollout.gpus 0, as an engine on CPU is one process, got {ranks}; set dp_size for more engines"
    elif len(engine_sizes) == 2 and ranks * engines != rollout.gpus:
        yield f"{field}tp_size x dp_size must be rollout.gpus {rollout.gpus}, got {ranks} x {engines}; change one, or remove dp_size"
    elif rollout.gpus % (ranks * engines):
        (name,) = engine_sizes if len(engine_sizes) == 1 else ("tp_size",)
        yield f"{field}{name} must divide rollout.gpus {rollout.gpus}, got {engine_sizes[name]}; change one of them"
    elif rollout.parallel.tensor not in (None, rollout.tensor_parallel):
        yield f"{field}tp_size must be rollout.parallel.tensor {rollout.parallel.tensor}, got {rollout.tensor_parallel}; remove rollout.parallel"


def _divisions(spec: RLJobSpec) -> Iterator[str]:
    """Yield a message for each entry of RANK_DIVISORS whose product does not divide the ranks of an engine, or with a size below 1.

    Types and the sizes of engines must have been checked before.
    """
    ranks, arguments = spec.rollout.tensor_parallel, spec.rollout.engine_args
    for names in RANK_DIVISORS:
        sizes = {name: arguments[name] for name in names if name in arguments}
        product, values = " x ".join(sizes), " x ".join(map(str, sizes.values()))
        if any(size < 1 for size in sizes.values()):
            yield f"rollout.engineArgs.{product} must be at least 1, got {values}; correct it"
        elif ranks % math.prod(sizes.values()):
            yield (
                f"rollout.engineArgs.{product} must divide the ranks of an engine (tp_size), {ranks}, got {values}; "
                "change it, or the number of ranks by rollout.gpus"
            )


def _problem(name: str, value: Any, *, kept: bool) -> str | None:
    version, arguments = _arguments()
    if name in RESERVED:
        return f"is not for a job to set, got {value!r}: {RESERVED[name]}"
    if name not in arguments:
        matches = [OF_VLLM[name]] if name in OF_VLLM else difflib.get_close_matches(name, arguments, n=1)
        hint = RESERVED.get(matches[0], f"write {matches[0]}") if matches else "remove it"
        return f"must be an argument of SGLang {version}, which has none of that name; {hint}"
    if not any(_fits(value, kind) for kind in arguments[name]):
        choices = [kind["is"] for kind in arguments[name] if not isinstance(kind, str)]
        kinds = [kind for kind in arguments[name] if isinstance(kind, str)]
        kinds += [f"one of {', '.join(map(repr, choices))}"] if choices else []
        matches = difflib.get_close_matches(value, map(str, choices), n=1) if isinstance(value, str) else []
        return f"must be {' or '.join(kinds)}, got {value!r}; {f'write {matches[0]}' if matches else 'correct it'}"
    if name == "mem_fraction_static" and value is not None and not 0 < value < 1:
        return f"must be above 0 and below 1, as a share of the memory of an accelerator, got {value!r}; correct it"
    if kept and name in KEPT_CACHE and value is False:
        return "must not be false with weights.onUpdate keep_kv, got False; remove it"
    return None


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a JSON value is of a kind: the name of a JSON type, or {"is": the value itself}."""
    if not isinstance(kind, str):
        return type(value) is type(kind["is"]) and bool(value == kind["is"])
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, TYPES.get(kind, ()))


@functools.cache
def _arguments() -> tuple[str, dict[str, list[Any]]]:
    """Return the version of SGLang, and name -> kinds of its arguments."""
    content = json.loads(FILE.read_text())
    return content["version"], content["arguments"]
