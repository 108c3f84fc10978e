"""The backward recurrence under every GAE, solved for all steps at once."""

import torch
from torch import Tensor


def decayed_suffix_sums(values: Tensor, decay: Tensor) -> Tensor:
    """Return A with A_t = values_t + decay_t A_{t+1} and A = 0 after the end, along dim 1; float64 in and out.

    Doubles the span that each entry has summed until it covers the row: log2(T) vector operations instead of a loop
    over T steps. `values` and `decay` are [B, T].
    """
    sums, factors = values.clone(), decay.expand_as(values).clone()
    span = 1
    while span < values.shape[1]:
        sums[:, :-span] += factors[:, :-span] * sums[:, span:].clone()
        factors[:, :-span] *= factors[:, span:].clone()
        span *= 2
    return sums


def next_trainable(values: Tensor, mask: Tensor, after_last: Tensor) -> Tensor:
    """Return for each token the entry of `values` [B, T] at the next trainable token after it.

    A token is trainable where `mask` is true. If there is none after it, the result is `after_last` [B].
    """
    rows, width = values.shape
    index = torch.where(mask, torch.arange(width, device=values.device), width)
    following = index.flip(1).cummin(dim=1).values.flip(1)[:, 1:] if width else index
    following = torch.cat((following, index.new_full((rows, 1), width)), dim=1)[:, :width]
    return torch.cat((values, after_last.unsqueeze(1)), dim=1).gather(1, following)
