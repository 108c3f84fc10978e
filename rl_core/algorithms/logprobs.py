"""Log-probabilities, entropies and values of tokens, computed from hidden states without storing all logits.

Results are aligned with tokens: entry t belongs to token t and is computed from position t - 1. The first token of each row, or of
each segment of a packed row, has no predecessor and gets 0. `score_functions` has the forward and backward passes.

Legend: B rows, S positions, V tokens of the vocabulary, H hidden size, K candidates of a position, P scored tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.algorithms.arguments import require_bool, require_same_shape
from rl_core.algorithms.score_functions import ScoresFromHidden, VocabularyShard


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Per-token results [B, S] float32, 0 where nothing was scored."""

    log_probs: Tensor
    entropy: Tensor | None
    """Entropy of the distribution the token was drawn from, in nats; None when not asked for."""
    candidates: Tensor | None = None
    """[B, S, K] log-probabilities of the candidates in the place of the token; None without candidates."""


def hidden_scores(
    hidden: Tensor,
    weight: Tensor,
    input_ids: Tensor,
    *,
    temperature: float = 1.0,
    targets: Tensor | None = None,
    chunk_size: int = 1024,
    entropy: bool = False,
    candidates: Tensor | None = None,
    shard: VocabularyShard | None = None,
) -> TokenScores:
    """Return log p(input_ids[t] | tokens before t) under softmax(hidden @ weight.T / temperature), and the entropies if requested.

    `hidden` [B, S, H] and `weight` [V, H] (the model's output layer, without bias) must have one dtype; `input_ids` is [B, S] int64.
    `targets` [P] int64 are the tokens to score, as `scored_tokens` returns them (None: all but the first of each row). The logits are
    computed in the dtype of `hidden` for `chunk_size` tokens at a time and computed again in the backward pass, so that they never exist
    in full. Gradients flow into `hidden` and `weight`; the weight's is summed over chunks in float32.
    `candidates` [B, S, K] int64 are further tokens to score in the place of each token.
    With `shard`, `weight` has this rank's rows of the vocabulary, the call is collective over the tensor-parallel ranks, and each gets
    the results of the whole vocabulary.
    Raises TypeError when the dtypes differ, ValueError for temperature <= 0, chunk_size < 1 or shapes that do not match.
    """
    _check(temperature, chunk_size)
    require_same_shape(input_ids=input_ids, **{"hidden without features": hidden[..., 0]})
    if hidden.dtype != weight.dtype:
        raise TypeError(f"hidden and weight must have one dtype, got {hidden.dtype} and {weight.dtype}; convert one")
    if targets is None:
        places = torch.arange(input_ids.numel(), device=input_ids.device).view(input_ids.shape)
        targets = places[:, 1:].reshape(-1)
    labels = input_ids.reshape(-1, 1)[targets]
    if candidates is not None:
        require_same_shape(input_ids=input_ids, **{"candidates without their last dimension": candidates[..., 0]})
        labels = torch.cat([labels, candidates.reshape(-1, candidates.shape[-1])[targets]], dim=1)
    rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, targets - 1)
    log_probs, entropies = ScoresFromHidden.apply(rows, weight, labels, temperature, chunk_size, entropy, shard)

    def placed(values: Tensor) -> Tensor:
        """Return the results [P, ...] put at their tokens, [B, S, ...]; 0 elsewhere."""
        shape = (*input_ids.shape, *values.shape[1:])
        return values.new_zeros(input_ids.numel(), *values.shape[1:]).index_copy(0, targets, values).view(shape)

    return TokenScores(
        placed(log_probs[:, 0]),
        None if entropies is None else placed(entropies),
        None if candidates is None else placed(log_probs[:, 1:]),
    )


def hidden_values(hidden: Tensor, weight: Tensor, *, targets: Tensor) -> Tensor:
    """Return the values hidden @ weight.T of the tokens `targets` of `scored_tokens`, [B, S] float32, 0 elsewhere.

    Aligned as `hidden_scores`: a token's value is that of what came before it. `hidden` [B, S, H], `weight` [1, H]; computed in float32.
    """
    shape, rows = hidden.shape[:-1], hidden.reshape(-1, hidden.shape[-1]).index_select(0, targets - 1)
    values = torch.nn.functional.linear(rows.float(), weight.float()).squeeze(1)
    return values.new_zeros(shape.numel()).index_copy(0, targets, values).view(shape)


def scored_tokens(mask: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return the flat indices [P] int64 of the tokens of `mask` [B, S] bool that have a predecessor in their row or segment.

    `cu_seqlens` int [segments + 1] marks the segments of a packed row (B = 1). Their number P depends on the values of `mask`: on an
    accelerator the call would wait for the device. Raises TypeError for a mask that is not bool, ValueError for several rows with segments.
    """
    require_bool(mask=mask)
    scored = mask.clone()
    scored[:, :1] = False
    if cu_seqlens is not None:
        if len(mask) != 1 or cu_seqlens.dim() != 1:
            shapes = f"{tuple(mask.shape)} and {tuple(cu_seqlens.shape)}"
            raise ValueError(
                f"cu_seqlens must be [segments + 1] beside one packed row [1, S], got mask and it {shapes}"
            )
        starts = cu_seqlens.long()
        scored[0, starts[starts < mask.shape[1]]] = False
    return scored.reshape(-1).nonzero().squeeze(1)


def _check(temperature: float, chunk_size: int) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}; greedy choice has no distribution to train")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 position, got {chunk_size}")
