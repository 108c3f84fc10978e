"""Lets the real SGLang engine run on a CPU; used by `setup` for device "cpu" only.

SGLang imports the package of its kernels, which needs the CUDA driver, and triton. The packages in `stand_in/` precede both on the
Python path of the engine's processes. On a CPU every layer uses its torch implementation, so no kernel is ever called.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.api.errors import RolloutConfigError

STAND_IN = Path(__file__).with_name("stand_in")

BLOCK = 32
"""On a CPU SGLang pads the intermediate size to a multiple of this; padded tensors differ from the given ones."""


def require(config: Mapping[str, Any]) -> None:
    """Raise RolloutConfigError for a model (its parsed config.json) whose weights cannot be proven on a CPU."""
    for name in ("intermediate_size", "moe_intermediate_size"):
        size = int(config.get(name) or 0)
        if size % BLOCK:
            raise RolloutConfigError(
                f"rollout.engine sglang without a GPU needs {name} to be a multiple of {BLOCK}, got {size}; "
                "take rollout.engine hf for this model"
            )


def variables(path: str) -> dict[str, str]:
    """Return the environment variables that the engine's processes need to run on a CPU. The PYTHONPATH among them extends `path`."""
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "THP_MEM_ALLOC_ENABLE": "1",  # torch takes large pages for large tensors: copies and checksums of weights need a fifth less time
        "PYTHONPATH": os.pathsep.join(filter(None, (str(STAND_IN), path))),
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",  # torch.compile needs a C++ compiler, which images without CUDA lack
    }


def options(*, max_batch: int, context: int) -> dict[str, Any]:
    """Return arguments of the engine: attention and sampling of torch, KV memory for `max_batch` rows of `context` tokens."""
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "lora_backend": "torch_native",
        "disable_cuda_graph": True,
        "sleep_on_idle": True,  # Otherwise the scheduler of SGLang busy-waits on one of the few cores.
        "max_total_tokens": (max_batch + 1) * context,
    }
