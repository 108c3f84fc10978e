"""All imports of megatron-core. Without it, importing this module raises ConfigError.

Its modules warn at import about missing kernels (Transformer Engine, Apex); nothing here needs them.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rl_core.api.errors import ConfigError

INFERENCE_KERNELS = ("flash_mla", "flashinfer")
"""Imported by megatron where they are installed, for inference alone: slow to import, and without a CUDA driver the first one fails in
a way that megatron does not expect."""


@contextmanager
def _without_inference_kernels() -> Iterator[None]:
    """Hide these packages from imports inside the block, unless they are imported already."""
    hidden = [name for name in INFERENCE_KERNELS if name not in sys.modules]
    sys.modules |= dict.fromkeys(hidden)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


try:
    with warnings.catch_warnings(), _without_inference_kernels():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import (
            MegatronOptimizer,
            OptimizerConfig,
            get_megatron_optimizer,
            get_standard_config_overrides,
        )
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.tensor_parallel import (
            copy_to_tensor_model_parallel_region,
            gather_from_sequence_parallel_region,
            param_is_not_tensor_parallel_duplicate,
            reduce_from_tensor_model_parallel_region,
            reduce_scatter_to_sequence_parallel_region,
        )
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.module import param_is_not_shared
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
        from megatron.core.transformer.transformer_config import TransformerConfig
except ImportError as error:
    raise ConfigError(
        f"actor.backend megatron needs megatron-core in the image, got: {error}; install it or choose fsdp2"
    ) from error


def mark_as_cut(parameter: Any, dimension: int | None) -> None:
    """Set the attributes by which megatron knows along which dimension a parameter is divided.

    `dimension` None means that each rank has all of it.
    """
    parameter.tensor_model_parallel = dimension is not None
    parameter.partition_dim = -1 if dimension is None else dimension
    parameter.partition_stride = 1


__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "GPTModel",
    "MegatronOptimizer",
    "OptimizerConfig",
    "PackedSeqParams",
    "ParamKey",
    "ParamWithNamePredicate",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "clip_grad_by_total_norm_fp32",
    "copy_to_tensor_model_parallel_region",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_grad_norm_fp32",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "get_standard_config_overrides",
    "mark_as_cut",
    "model_parallel_cuda_manual_seed",
    "parallel_state",
    "param_is_not_shared",
    "param_is_not_tensor_parallel_duplicate",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
]
