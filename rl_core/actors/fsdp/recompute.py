"""Selective activation checkpointing: which results of a decoder layer are kept for the backward pass, and which are computed again.

The rule is that of torchtitan's option "op": attention and every second matrix product are kept, everything else is computed again. Of the
seven products of a layer these are those of q, v, gate and down.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

_OPS = torch.ops
PRODUCTS = frozenset({_OPS.aten.mm.default, _OPS.aten.addmm.default})
"""Operations that are matrix products; `selective_contexts` adds that of oneDNN where torch has it."""
ATTENTION = frozenset(
    {
        _OPS.aten._scaled_dot_product_flash_attention_for_cpu.default,
        _OPS.aten._scaled_dot_product_flash_attention.default,
        _OPS.aten._scaled_dot_product_efficient_attention.default,
        _OPS.aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""Operations that are attention; `selective_contexts` adds that over packed rows."""


def selective_contexts() -> Callable[[], Any]:
    """Return the `context_fn` of torch.utils.checkpoint for a decoder layer."""
    import torch.nn.attention.varlen  # noqa: F401  registers the operation

    onednn = getattr(_OPS.mkldnn, "_linear_pointwise", None)
    products = PRODUCTS | (set() if onednn is None else {onednn.default})
    attention = ATTENTION | {_OPS.torch_attn._varlen_attn.default}

    def contexts() -> Any:
        # Forward pass and recomputation count their products separately.
        counts = {False: 0, True: 0}
        return create_selective_checkpoint_contexts(partial(_policy, counts, products, attention))

    return contexts


def _policy(
    counts: dict[bool, int],
    products: frozenset[Any],
    attention: frozenset[Any],
    context: SelectiveCheckpointContext,
    op: Any,
    *_: Any,
    **__: Any,
) -> CheckpointPolicy:
    keeps = op in attention
    if op in products:
        keeps = counts[context.is_recompute] % 2 == 0
        counts[context.is_recompute] += 1
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
