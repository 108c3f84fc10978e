"""The autograd function of `logprobs`: softmax statistics of P rows of V logits, computed for a block of rows at a time.

Only a row's largest logit, normaliser and entropy are kept for the backward pass, which makes the row's softmax again.
No float32 tensor larger than a block exists. With g the gradient at the log-probability of label y, e the one at the
entropy H, and p the softmax of a row x, the row's gradient is g (onehot(y) - p) - e p (log p + H). With several labels the first term is
summed over them.

Legend: P scored positions, C labels of a position, V vocabulary, H hidden size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CPU_BLOCK_ELEMENTS = 1 << 20
"""Floats of a block on a CPU: 4 MiB stay in the cache over the passes of a softmax, which is 2-3 times faster."""
_ENTROPY_ROWS = 128
"""Rows whose entropy is made at a time: the exponentials beside the logits are no second block of the chunk's size."""
_LOWEST_LOG_PROB = -1e4
"""exp of it is 0 in float32, and 0 times it is 0, unlike with -inf."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyShard:
    """The tokens whose rows of the output weight this rank has. Each rank of the group has equally many rows."""

    start: int
    """First token."""
    tokens: int
    """Rows that are tokens; padding comes after them."""
    largest: Callable[[Tensor], Any]
    """Replaces a tensor by the element-wise maximum over the group; collective."""
    total: Callable[[Tensor], Any]
    """Replaces a tensor by its sum over the group; collective."""

    def place(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return (row of each label in this shard, whether the label is in it); the row of a label of another shard is 0."""
        rows = labels - self.start
        is_local = (rows >= 0) & (rows < self.tokens)
        return rows.where(is_local, 0), is_local

    def hide_padding(self, block: Tensor) -> None:
        """Set the padding columns of the float32 logits [n, rows] so that they get probability 0, in place."""
        block[:, self.tokens :] = float("-inf")


class ScoresFromHidden(torch.autograd.Function):  # type: ignore[misc]
    """(log_probs [P, C], entropies [P] or None) of `labels` [P, C] under the logits `hidden` [P, H] @ `weight` [V, H].T."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        chunk_size: int,
        entropy: bool,
        shard: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Project and score chunk by chunk; with `shard` the weight is a part of the vocabulary, and all ranks score the same rows."""
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk_size, ctx.shard = temperature, chunk_size, shard
        scores = _Scores(labels, entropy, shard)
        with torch.autocast(hidden.device.type, enabled=False):  # as in the backward pass
            for chunk in _slices(len(labels), chunk_size):
                logits = hidden[chunk] @ weight.T
                for part in _slices(len(logits), _block_rows(logits, chunk_size)):
                    scores.fill(_inner(chunk, part), _scaled(logits[part], temperature))
                del logits  # before the next chunk's are made: two would be held
        ctx.save_for_backward(hidden, weight, *scores.saved())
        return scores.log_probs, scores.entropies

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, log_prob_grads: Tensor | None, entropy_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of `hidden` and `weight`, in their dtype."""
        hidden, weight, *saved = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        if log_prob_grads is None and entropy_grads is None:
            return (None,) * 7
        hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        row_gradient = _RowGradient(tuple(saved), log_prob_grads, entropy_grads, ctx.temperature, ctx.shard)
        for chunk in _slices(len(hidden), ctx.chunk_size):
            logits = hidden[chunk] @ weight.T
            for part in _slices(len(logits), _block_rows(logits, ctx.chunk_size)):
                logits[part] = row_gradient(_inner(chunk, part), _scaled(logits[part], ctx.temperature))
            if hidden_gradient is not None:
                torch.mm(logits, weight, out=hidden_gradient[chunk])
            if weight_gradient is not None:
                _add_product(weight_gradient, logits.T, hidden[chunk])
            del logits  # before the next chunk's are made: two would be held
        if ctx.shard is not None and hidden_gradient is not None:
            ctx.shard.total(hidden_gradient)
        return hidden_gradient, _cast(weight_gradient, weight.dtype), None, None, None, None, None


class _Scores:
    """Results of P rows, filled block by block."""

    def __init__(self, labels: Tensor, entropy: bool, shard: VocabularyShard | None = None) -> None:
        self.labels, self.shard = labels, shard
        self.log_probs = torch.empty(labels.shape, dtype=torch.float32, device=labels.device)
        self.peaks, self.totals = self.log_probs.new_empty(len(labels)), self.log_probs.new_empty(len(labels))
        self.entropies = torch.empty_like(self.totals) if entropy else None

    def fill(self, part: slice, block: Tensor) -> None:
        """Score float32 `block` [n, V], which is overwritten."""
        labels = self.labels[part]
        if self.shard is not None:
            self.shard.hide_padding(block)
            labels, is_local = self.shard.place(labels)
        peak = block.amax(dim=1, keepdim=True)
        if self.shard is not None:
            self.shard.largest(peak)
        label_logits = block.gather(1, labels) - peak
        block.sub_(peak)
        weighted = block.new_zeros(len(block))
        if self.entropies is None:
            total = block.exp_().sum(dim=1)
        else:
            totals, sums = zip(*map(_normaliser_and_weighted_sum, block.split(_ENTROPY_ROWS)), strict=True)
            total, weighted = torch.cat(totals), torch.cat(sums)
        if self.shard is not None:
            partials = torch.cat([label_logits.where(is_local, 0.0), total[:, None], weighted[:, None]], dim=1)
            self.shard.total(partials)
            label_logits, total, weighted = partials[:, :-2], partials[:, -2], partials[:, -1]
        self.peaks[part], self.totals[part] = peak.squeeze(1), total
        self.log_probs[part] = label_logits - total.log().unsqueeze(1)
        if self.entropies is not None:
            self.entropies[part] = total.log() - weighted / total

    def saved(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return what the backward pass needs."""
        return self.labels, self.peaks, self.totals, self.entropies


def _normaliser_and_weighted_sum(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sum of exp(x) [n], sum of x exp(x) [n]) of float32 `rows` [n, V], none above 0; they are changed. Holds as much again."""
    weights = rows.clamp_(min=_LOWEST_LOG_PROB).exp()
    total = weights.sum(dim=1)
    return total, weights.mul_(rows).sum(dim=1)


class _RowGradient:
    """The gradient at a block of scaled logits, given the gradients at the scores of all P rows."""

    def __init__(
        self,
        saved: tuple[Tensor, Tensor, Tensor, Tensor | None],
        log_prob_grads: Tensor | None,
        entropy_grads: Tensor | None,
        temperature: float,
        shard: VocabularyShard | None = None,
    ) -> None:
        self.labels, self.peaks, self.totals, self.entropies = saved
        self.shard = shard
        grads = torch.zeros_like(self.labels, dtype=torch.float32) if log_prob_grads is None else log_prob_grads
        self.log_prob_grads = grads / temperature
        self.entropy_grads = None if entropy_grads is None else entropy_grads / temperature

    def __call__(self, part: slice, block: Tensor) -> Tensor:
        """Return the gradient at the unscaled logits in the place of float32 `block` [n, V]."""
        label_grads, total = self.log_prob_grads[part], self.totals[part].unsqueeze(1)
        labels, local_grads, row_grad = self.labels[part], label_grads, label_grads.sum(dim=1, keepdim=True)
        if self.shard is not None:
            self.shard.hide_padding(block)
            labels, is_local = self.shard.place(labels)
            local_grads = label_grads.where(is_local, 0.0)
        shifted = block.sub_(self.peaks[part].unsqueeze(1))
        # The division by `total`, which turns exp into the softmax, rides on the per-row factors.
        if self.entropy_grads is None or self.entropies is None:
            gradient = shifted.exp_().mul_(-row_grad / total)
        else:
            entropy_grad, entropy = self.entropy_grads[part].unsqueeze(1), self.entropies[part].unsqueeze(1)
            weights = shifted.clamp_(min=_LOWEST_LOG_PROB).exp()
            factor = shifted.add_(entropy - total.log()).mul_(-entropy_grad / total).sub_(row_grad / total)
            gradient = factor.mul_(weights)
        return gradient.scatter_add_(1, labels, local_grads)


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _inner(chunk: slice, part: slice) -> slice:
    return slice(chunk.start + part.start, chunk.start + part.stop)


def _block_rows(logits: Tensor, chunk_size: int) -> int:
    """Return how many rows are worked on at a time: `chunk_size`, on a CPU no more than fit the cache."""
    if logits.device.type != "cpu":
        return chunk_size
    vocabulary: int = logits.shape[-1]
    return min(chunk_size, max(1, _CPU_BLOCK_ELEMENTS // vocabulary))


def _scaled(block: Tensor, temperature: float) -> Tensor:
    """Return a `block` of our own as float32 logits / temperature; a float32 block is changed in place."""
    block = block.float()
    return block if temperature == 1.0 else block.div_(temperature)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
