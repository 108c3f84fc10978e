"""How the engine is started for a job: its arguments, its environment variables and the model folder that it reads."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.plan.engine_arguments import POD_ARGUMENTS
from rl_core.rollouts.sglang import cpu
from rl_core.transports.tokens import Token
from rl_core.weights.adapters import sends_adapters

if TYPE_CHECKING:
    from rl_core.api.job import RLJobSpec
    from rl_core.api.lora import LoraSpec

PREFIX, LOCK = "rljob-engine-", "lock"
"""Prefix of the engines' folders, and name of the file in each that its worker keeps locked."""
ADAPTER_SLOTS = 2
"""Adapters that an engine holds at most: the one that it serves, and one that is loaded and not served yet."""
CONTEXT_MARGIN = 8
"""Tokens that SGLang keeps free at the end of its context."""


class ModelFolder:
    """A temporary folder with the model's configuration and tokenizer. It has no weights: these come by weight sync."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Write `files` into a new folder; also removes the folders of workers that were killed."""
        _remove_orphans()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._token = Token(self.path.name.removeprefix(PREFIX))
        self._lock = (self.path / LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for name, data in files.items():
            (self.path / name).write_bytes(data)

    @property
    def owner(self) -> str:
        """Name of the engine in shared memory, see `transports.tokens`."""
        return self._token.owner

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
        self._token.close()


def _remove_orphans() -> None:
    """Remove this user's folders that no living worker has locked: a killed worker cannot remove its own."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        try:
            with lock.open("wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # The worker of the file is alive, or belongs to another user.
            continue
        shutil.rmtree(lock.parent, ignore_errors=True)


def options(spec: RLJobSpec, folder: Path, device: str, max_seq_len: int) -> dict[str, Any]:
    """Return the arguments of `sglang.Engine`. `rollout.engineArgs` replaces defaults, but not the arguments that the worker itself must set."""
    context = max_seq_len + CONTEXT_MARGIN
    common: dict[str, Any] = {
        "model_path": str(folder),
        "load_format": "dummy",
        "dtype": spec.model.dtype,
        "context_length": context,
        "max_running_requests": spec.rollout.max_batch,
        "random_seed": spec.algorithm.seed,
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "enable_fp32_lm_head": spec.model.float32_head,
    }
    engine_args = {name: value for name, value in spec.rollout.engine_args.items() if name not in POD_ARGUMENTS}
    defaults: dict[str, Any] = {"log_level": "warning"} | engine_args
    if sends_adapters(spec) and spec.model.lora is not None:
        common |= _adapter_options(spec.model.lora)
    elif spec.weights.on_update == "keep_kv":
        # A step that overlaps an update would be labelled with the new version.
        common |= {"disable_overlap_schedule": True}
    if device == "cpu":
        return cpu.options(max_batch=spec.rollout.max_batch, context=context) | defaults | common
    if spec.model.dtype == "float32":
        # The attention that SGLang chooses by itself on a GPU does not compute in float32.
        defaults = {"attention_backend": "triton"} | defaults
    device_index = int(device.partition(":")[2] or 0)
    if spec.placement.mode != "disaggregated":
        # With a copy in host memory: the trainer gets the device for a checkpoint too, after which no weights are sent. Adapters and
        # patches also need the weights that they change.
        common |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        # The memory of the CUDA graphs that SGLang makes for prefill by default cannot be released, so that it refuses to start with both.
        defaults = {"cuda_graph_backend_prefill": "disabled"} | defaults
    return defaults | common | {"device": "cuda", "base_gpu_id": device_index, "tp_size": spec.rollout.tensor_parallel}


def _adapter_options(lora: LoraSpec) -> dict[str, Any]:
    """Return the arguments with which the engine takes adapters. Its prefix cache is one per adapter."""
    return {
        "enable_lora": True,
        "max_lora_rank": lora.rank,
        "lora_target_modules": lora.targets,
        "max_loras_per_batch": ADAPTER_SLOTS,
        "max_loaded_loras": ADAPTER_SLOTS,
    }


def variables(
    folder: Path, device: str, environ: Mapping[str, str] = os.environ, *, shares_device: bool = False
) -> dict[str, str]:
    """Return the variables of the engine's processes. `shares_device`: whether the engine gives the memory of its device up at times."""
    env = {
        **environ,
        "TMPDIR": str(folder),
        "HF_HUB_OFFLINE": "1",
        # Without dumps the death of a scheduler is reported at once, not after a minute.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # CONTEXT_MARGIN may exceed the model's positions
        # With `enable_memory_saver`, the buffers of CUDA graphs can be released too. Without, it would only make all-reduces slower.
        **({"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"} if shares_device else {}),
    }
    return env | (cpu.variables(environ.get("PYTHONPATH", "")) if device == "cpu" else {})
