"""The packed forward pass: rows of a micro-batch end to end in one sequence, scored at the tokens that train.

Legend: B rows of the micro-batch, T width of the longest, L packed tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from rl_core.actors.attention import PackedLayout
from rl_core.algorithms.logprobs import hidden_scores
from rl_core.batching.packing import PackedRows, pack_rows, pack_values, unpack_rows

SCORE = "score_packed"
"""Name of the method that `attach_scoring` adds to a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """The model's input for one micro-batch, on the model's device."""

    rows: PackedRows
    layout: PackedLayout
    mask: Tensor
    """[1, L] bool: tokens to score."""
    width: int
    """T of the unpacked results."""

    @classmethod
    def of(
        cls, input_ids: Tensor, lengths: Sequence[int], mask: Tensor, device: torch.device, *, multiple: int = 1
    ) -> "PackedBatch":
        """Pack all rows of `input_ids` [B, S] (CPU), each padded to `multiple`; `mask` [B, S] bool marks the tokens to score."""
        packed = pack_rows(input_ids, lengths, multiple=multiple)
        scored = pack_values(mask, packed)
        segments = packed.padded_lengths.tolist()
        if device.type != "cpu":
            moved = {
                name: getattr(packed, name).to(device)
                for name in ("input_ids", "position_ids", "cu_seqlens", "lengths", "padded_lengths", "source")
            }
            packed = PackedRows(
                **moved,
                max_seqlen=packed.max_seqlen,
                rows=packed.rows,
                shape=packed.shape,
            )
            scored = scored.to(device)
        layout = PackedLayout(packed.cu_seqlens, segments)
        return cls(rows=packed, layout=layout, mask=scored, width=input_ids.shape[1])


def attach_scoring(model: nn.Module) -> None:
    """Give a causal LM the method `score_packed`, which wrappers can treat as a second forward."""
    setattr(model, SCORE, MethodType(_score_packed, model))


def score(
    model: nn.Module, batch: PackedBatch, *, temperature: float, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probabilities of the masked tokens, [B, T] float32, 0 elsewhere; and their entropies when asked for."""
    log_probs, entropies = getattr(model, SCORE)(
        batch.rows.input_ids,
        batch.rows.position_ids,
        batch.mask,
        batch.rows.cu_seqlens,
        packed=batch.layout,
        temperature=temperature,
        entropy=entropy,
    )
    unpacked = unpack_rows(log_probs, batch.rows, width=batch.width)
    return unpacked, None if entropies is None else unpack_rows(entropies, batch.rows, width=batch.width)


def _score_packed(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    packed: PackedLayout,
    temperature: float,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return (log-probabilities [1, L], entropies [1, L] or None).

    A tuple of tensors that are no views: FSDP hangs its hooks on them.
    """
    hidden = model.model(
        input_ids=input_ids,
        position_ids=position_ids,
        # A 4-D mask is passed on as it is: no mask is built, and packed attention needs none.
        attention_mask=input_ids.new_empty(1, 1, 0, 0),
        use_cache=False,
        packed=packed,
    ).last_hidden_state
    scores = hidden_scores(
        hidden,
        model.lm_head.weight,
        input_ids,
        temperature=temperature,
        mask=mask,
        cu_seqlens=cu_seqlens,
        entropy=entropy,
    )
    return scores.log_probs.clone(), None if scores.entropy is None else scores.entropy.clone()
