"""What lets the real engine run without an accelerator, and nothing else: taken by `setup` for device "cpu" only.

SGLang imports its kernels' package when a model is built, and that package needs the CUDA driver; it imports triton everywhere. `stand_in/`
comes before both on the path of the engine's processes; on a CPU every layer takes its torch path, so that no kernel is ever started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.api.errors import RolloutConfigError

STAND_IN = Path(__file__).with_name("stand_in")

BLOCK = 32
"""On a CPU the engine pads the intermediate size to a multiple of this, and its tensors are not those that it is given."""


def require(config: Mapping[str, Any]) -> None:
    """Raise RolloutConfigError for a model (its parsed config.json) whose weights cannot be proven on a CPU."""
    size = int(config["intermediate_size"])
    if size % BLOCK:
        raise RolloutConfigError(
            f"rollout.engine sglang without a GPU needs an intermediate_size that is a multiple of {BLOCK}, got {size}; "
            "take rollout.engine hf for this model"
        )


def variables(path: str) -> dict[str, str]:
    """Return the variables for the engine's processes; `path` is the PYTHONPATH that they would have."""
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(STAND_IN), path))),
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",  # torch.compile needs a C++ compiler, which no image without CUDA has
    }


def options(*, max_batch: int, context: int) -> dict[str, Any]:
    """Return the engine's arguments: torch's own attention and sampling, KV memory for `max_batch` rows of `context` tokens."""
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "sleep_on_idle": True,  # its scheduler would spin on one of the few cores
        "max_total_tokens": (max_batch + 1) * context,
    }
