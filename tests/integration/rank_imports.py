"""What ranks import, 10 s of processor time: loaded once, by the process that they are forked from. No thread is started."""

import gc
import importlib

from rl_core.api.imports import collection_paused

MODULES = (
    "tests.integration.fsdp_rank",
    "torch._dynamo",
    "transformers.models.qwen2.modeling_qwen2",
    "rl_core.actors.fsdp.actor",
    "rl_core.actors.megatron.actor",
    "rl_core.weights.kernels",
)

with collection_paused():
    for module in MODULES:
        importlib.import_module(module)
gc.freeze()
