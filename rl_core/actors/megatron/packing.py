"""Packed rows for megatron-core: the parameters that are passed with them, and an attention that keeps rows apart.

megatron's own attention takes no packed rows without Transformer Engine. This one is the same as under FSDP.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rl_core.actors.attention import PackedLayout, packed_attention
from rl_core.actors.forward import PackedBatch
from rl_core.actors.megatron.library import PackedSeqParams


@dataclass
class PackedSequenceParams(PackedSeqParams):  # type: ignore[misc]
    """megatron's parameters of packed rows, and the layout of the rows.

    They do not have the rows' boundaries, which megatron would read from the device in each layer to rotate queries and keys. `PolicyModel`
    gives it the angles of all tokens.
    """

    layout: PackedLayout | None = None

    @classmethod
    def of(cls, batch: PackedBatch) -> "PackedSequenceParams":
        """Return the parameters of a packed micro-batch."""
        longest = batch.layout.max_length
        return cls(qkv_format="thd", max_seqlen_q=longest, max_seqlen_kv=longest, layout=batch.layout)


class PackedAttention(nn.Module):  # type: ignore[misc]
    """Causal attention within each packed row: the core attention of a megatron layer spec."""

    def __init__(self, config: Any, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        """Build the attention of one layer from the TransformerConfig `config`. Further arguments of megatron are ignored."""
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequenceParams | None = None,
    ) -> Tensor:
        """Return [L, A * D] of packed query [L, A, D], key and value [L, A_kv, D]."""
        if packed_seq_params is None or packed_seq_params.layout is None:
            raise ValueError(
                "PackedAttention needs packed rows with their layout, got none; pass a PackedSequenceParams"
            )
        query, key, value = (states.transpose(0, 1)[None] for states in (query, key, value))
        output, _ = packed_attention(self, query, key, value, None, packed=packed_seq_params.layout, scaling=self.scale)
        return torch.flatten(output[0], 1)
