"""Log-probabilities and entropies of tokens, from logits or from hidden states; all logits never exist in float32.

Results are token-aligned: entry t belongs to token t and comes from position t - 1; the first token of each row (or of
each `cu_seqlens` segment) has no predecessor and gets 0. Work runs in chunks of positions in float32, forwards and
backwards (`score_functions`).

Legend: B rows, S positions, V vocabulary, H hidden size, P scored tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.algorithms.arguments import require_bool, require_same_shape
from rl_core.algorithms.score_functions import ScoresFromHidden, ScoresFromLogits, VocabularyShard


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Per-token results [B, S] float32, 0 where nothing was scored."""

    log_probs: Tensor
    entropy: Tensor | None
    """Entropy of the distribution the token was drawn from, in nats; None when not asked for."""


def token_log_probs(
    logits: Tensor,
    input_ids: Tensor,
    *,
    temperature: float = 1.0,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 1024,
) -> Tensor:
    """Return log p(input_ids[t] | tokens before t) under log_softmax(logits / temperature), [B, S] float32.

    `logits` [B, S, V] of any float dtype, `input_ids` [B, S] int64; `cu_seqlens` [segments + 1] marks the segments of a
    packed row (B = 1) and no shift crosses one. At most `chunk_size` positions are held in float32 at a time.
    Raises ValueError for temperature <= 0, chunk_size < 1 or shapes that do not match.
    """
    return token_scores(
        logits, input_ids, temperature=temperature, cu_seqlens=cu_seqlens, chunk_size=chunk_size
    ).log_probs


def token_entropy(
    logits: Tensor, *, temperature: float = 1.0, cu_seqlens: Tensor | None = None, chunk_size: int = 1024
) -> Tensor:
    """Return the entropy in nats of the distribution each token was drawn from, [B, S] float32.

    Alignment and errors are those of `token_log_probs`.
    """
    any_token = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    scores = token_scores(
        logits, any_token, temperature=temperature, cu_seqlens=cu_seqlens, chunk_size=chunk_size, entropy=True
    )
    assert scores.entropy is not None
    return scores.entropy


def token_scores(
    logits: Tensor,
    input_ids: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 1024,
    entropy: bool = False,
) -> TokenScores:
    """Return `token_log_probs` and, when asked for, the entropies of the same positions from the same pass.

    `mask` [B, S] bool limits the work to those tokens (such as the trainable ones); the others get 0.
    """
    _check(temperature, chunk_size)
    require_same_shape(input_ids=input_ids, **{"logits without vocabulary": logits[..., 0]})
    targets = _targets(input_ids, mask, cu_seqlens)
    labels = input_ids.reshape(-1)[targets]
    rows = logits.reshape(-1, logits.shape[-1])
    log_probs, entropies = ScoresFromLogits.apply(rows, labels, targets - 1, temperature, chunk_size, entropy)
    return _token_scores(log_probs, entropies, targets, input_ids)


def hidden_scores(
    hidden: Tensor,
    weight: Tensor,
    input_ids: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 1024,
    entropy: bool = False,
    shard: VocabularyShard | None = None,
) -> TokenScores:
    """Return `token_scores` of the logits hidden @ weight.T, which never exist in full.

    `hidden` [B, S, H] and `weight` [V, H] (the model's output layer, no bias) of one dtype; products are made in it,
    `chunk_size` tokens of `mask` at a time, and made again in the backward pass. Gradients flow into both; the
    weight's is summed over chunks in float32. With `shard` the weight has this rank's rows of the vocabulary; results are those of the
    whole one on every rank, and collective. Raises TypeError when the dtypes differ.
    """
    _check(temperature, chunk_size)
    require_same_shape(input_ids=input_ids, **{"hidden without features": hidden[..., 0]})
    if hidden.dtype != weight.dtype:
        raise TypeError(f"hidden and weight must have one dtype, got {hidden.dtype} and {weight.dtype}; convert one")
    targets = _targets(input_ids, mask, cu_seqlens)
    labels = input_ids.reshape(-1)[targets]
    rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, targets - 1)
    log_probs, entropies = ScoresFromHidden.apply(rows, weight, labels, temperature, chunk_size, entropy, shard)
    return _token_scores(log_probs, entropies, targets, input_ids)


def hidden_values(hidden: Tensor, weight: Tensor, *, mask: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return the values hidden @ weight.T of the true tokens of `mask` [B, S], float32, 0 elsewhere.

    Aligned as `hidden_scores`: a token's value is that of what came before it. `hidden` [B, S, H], `weight` [1, H]; computed in float32.
    """
    require_same_shape(mask=mask, **{"hidden without features": hidden[..., 0]})
    targets = _targets(mask, mask, cu_seqlens)
    rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, targets - 1)
    values = torch.nn.functional.linear(rows.float(), weight.float()).squeeze(1)
    return values.new_zeros(mask.numel()).index_copy(0, targets, values).view(mask.shape)


def _check(temperature: float, chunk_size: int) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}; greedy choice has no distribution to train")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 position, got {chunk_size}")


def _targets(input_ids: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return [P] flat indices of the tokens to score: those of `mask` that have a predecessor in their segment."""
    rows, width = input_ids.shape
    if mask is None and cu_seqlens is None:
        # Known without asking the device.
        return torch.arange(rows * width, device=input_ids.device).view(rows, width)[:, 1:].reshape(-1)
    scored = torch.ones_like(input_ids, dtype=torch.bool)
    scored[:, :1] = False
    if cu_seqlens is not None:
        if rows != 1 or cu_seqlens.dim() != 1:
            shapes = f"{tuple(input_ids.shape)} and {tuple(cu_seqlens.shape)}"
            raise ValueError(
                f"cu_seqlens must be [segments + 1] beside one packed row [1, S], got input_ids and it {shapes}"
            )
        starts = torch.zeros(width + 1, dtype=torch.bool, device=input_ids.device)
        starts[cu_seqlens.long()] = True
        scored &= ~starts[:width]
    if mask is not None:
        require_bool(mask=mask)
        require_same_shape(mask=mask, input_ids=input_ids)
        scored &= mask
    return scored.reshape(-1).nonzero().squeeze(1)


def _token_scores(log_probs: Tensor, entropies: Tensor | None, targets: Tensor, input_ids: Tensor) -> TokenScores:
    """Return the [P] results put at their tokens [B, S], 0 elsewhere."""

    def placed(values: Tensor) -> Tensor:
        return values.new_zeros(input_ids.numel()).index_copy(0, targets, values).view(input_ids.shape)

    return TokenScores(placed(log_probs), None if entropies is None else placed(entropies))
