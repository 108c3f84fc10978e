"""Attention over packed rows: each token attends only to earlier tokens of its own row.

It is registered with transformers under the name `PACKED`, so that any of its decoder models can run packed rows. The layout is passed as
the keyword `packed`, which also says by which kernel attention is computed. `flash_attention_2` is one call of variable-length flash
attention. For `sdpa` and `eager`, consecutive rows of similar length are computed together as a dense causal batch; padding on the right is
never seen by real tokens, and rows of equal length need no copy.

Legend: L packed tokens, R rows of a dense batch, W its width, A heads, D head size.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, softmax

from rl_core.actors.guards import is_flash_head_size
from rl_core.api.roles import AttentionKernel

PACKED = "rljob_packed"
PADDING_LIMIT = 1.25
"""A dense batch is closed when its size [R, W] would exceed this many times its number of tokens."""


@dataclass(frozen=True, slots=True)
class _DenseBatch:
    """Consecutive rows that form one dense batch [R, W]."""

    start: int
    tokens: int
    rows: int
    width: int
    dense: Tensor | None
    """[R * W] index into the tokens of the batch, any token at padding; None when all rows are W long."""
    real: Tensor | None
    """[tokens] index of each token in the dense batch."""


class PackedLayout:
    """The boundaries of the rows in a packed sequence [1, L]; made once per micro-batch and used by every layer.

    Not a dataclass: FSDP moves the fields of those between devices.
    """

    def __init__(self, cu_seqlens: Tensor, lengths: Sequence[int], *, kernel: AttentionKernel = "auto") -> None:
        """Describe rows of `lengths` tokens. `cu_seqlens` is int32 [rows + 1], their cumulative lengths, on the model's device.

        `kernel` computes the attention: see `actor.attention`.
        """
        self.kernel = kernel
        self.cu_seqlens = cu_seqlens
        self.lengths = tuple(int(length) for length in lengths)
        self.max_length = max(self.lengths, default=0)
        self._dense_batches: tuple[_DenseBatch, ...] | None = None

    @property
    def dense_batches(self) -> tuple[_DenseBatch, ...]:
        """The rows, divided into dense batches of consecutive rows of similar length."""
        if self._dense_batches is None:
            self._dense_batches = tuple(_dense_batches(self.lengths, self.cu_seqlens.device))
        return self._dense_batches


def _dense_batches(lengths: Sequence[int], device: torch.device) -> list[_DenseBatch]:
    batches: list[_DenseBatch] = []
    first = start = 0
    while first < len(lengths):
        last, width, tokens = first, 0, 0
        while last < len(lengths):
            new_width, new_tokens = max(width, lengths[last]), tokens + lengths[last]
            if last > first and new_width * (last + 1 - first) > PADDING_LIMIT * new_tokens:
                break
            last, width, tokens = last + 1, new_width, new_tokens
        batches.append(_dense_batch(lengths[first:last], start, width, device))
        first, start = last, start + tokens
    return batches


def _dense_batch(lengths: Sequence[int], start: int, width: int, device: torch.device) -> _DenseBatch:
    rows, tokens = len(lengths), sum(lengths)
    if tokens == rows * width:
        return _DenseBatch(start, tokens, rows, width, None, None)
    lengths_R = torch.tensor(lengths)
    real_RW = torch.arange(width) < lengths_R[:, None]
    real = real_RW.reshape(-1).nonzero().squeeze(1)
    # Padding points at its row's last token, near in memory; what is computed there is dropped.
    columns = torch.minimum(torch.arange(width)[None], lengths_R[:, None] - 1)
    dense = (columns + (lengths_R.cumsum(0) - lengths_R)[:, None]).reshape(-1)
    return _DenseBatch(start, tokens, rows, width, dense.to(device), real.to(device))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the attention output [1, L, A, D] of query [1, A, L, D], key and value [1, A_kv, L, D].

    `packed` None means that the model was called with padded rows and a mask; the SDPA attention of transformers then computes the output.
    """
    if packed is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return output, None
    window = sliding_window if sliding_window is not None and sliding_window < packed.max_length else None
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    kernel = packed.kernel
    if kernel == "auto":
        kernel = "flash_attention_2" if query.is_cuda and dropout == 0.0 and _flash_takes(query) else "sdpa"
    if kernel == "flash_attention_2":
        return _varlen(query, key, value, packed, scaling, window)[None], None
    attend = _eager if kernel == "eager" else _sdpa
    outputs = [
        _dense(dense_batch, query, key, value, partial(attend, scale=scaling, dropout=dropout, window=window))
        for dense_batch in packed.dense_batches
    ]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _flash_takes(query: Tensor) -> bool:
    """Return whether flash attention has a kernel for the type and the head size of `query`."""
    return query.dtype in (torch.bfloat16, torch.float16) and is_flash_head_size(query.shape[-1])


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedLayout, scale: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    offsets, longest = packed.cu_seqlens, packed.max_length
    grouped = query.shape[1] != key.shape[1]
    return varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        offsets,
        offsets,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **({"enable_gqa": True} if grouped and needs_enable_gqa(varlen_attn) else {}),
    )


@functools.cache
def needs_enable_gqa(varlen_attn: Callable[..., Any]) -> bool:
    """Return whether `varlen_attn` must be given `enable_gqa` when there are fewer key heads than query heads.

    The version in torch 2.11 has no such argument and needs none.
    """
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _dense(
    dense_batch: _DenseBatch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the output [tokens, A, D] of one run from the packed [L, A, D] states.

    `attend` computes it, [R, A, W, D], from a dense batch of query, key and value.
    """

    def batch(states_LAD: Tensor) -> Tensor:
        states = states_LAD.narrow(0, dense_batch.start, dense_batch.tokens)
        if dense_batch.dense is not None:
            states = states.index_select(0, dense_batch.dense)
        return states.view(dense_batch.rows, dense_batch.width, *states.shape[1:]).transpose(1, 2)

    output = attend(batch(query), batch(key), batch(value))
    output = output.transpose(1, 2).reshape(dense_batch.rows * dense_batch.width, *query.shape[1:])
    return output if dense_batch.real is None else output.index_select(0, dense_batch.real)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, dropout: float, window: int | None
) -> Tensor:
    """Return causal attention of a dense batch by torch's fused kernels."""
    mask = None if window is None else _band(query.shape[2], window, query.device)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _eager(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, dropout: float, window: int | None
) -> Tensor:
    """Return causal attention of a dense batch written out, with all probabilities [R, A, W, W]; the softmax is in float32."""
    width, groups = query.shape[2], query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~_band(width, window or width, query.device), float("-inf"))
    weights = softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.dropout(weights, dropout, train=dropout > 0) @ value


def _band(width: int, window: int, device: torch.device) -> Tensor:
    """Return [W, W] bool: true where column is at most the row and fewer than `window` before it."""
    distance = torch.arange(width, device=device)[:, None] - torch.arange(width, device=device)[None]
    return (distance >= 0) & (distance < window)


def register(attend: Callable[..., Any] = packed_attention) -> None:
    """Register `attend` as `PACKED` with transformers, with the masks of SDPA for calls on padded rows."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PACKED, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, sdpa_mask)
