"""Samples the next tokens, with counter-based random numbers.

The random number of a token is a function of (seed of its row, position in the sequence) alone: the token at position p of a row with
seed s uses `uniforms(s, p)`. So samples do not depend on the other rows of the batch or on interruptions. A token is sampled by inverting
the cumulative distribution at its random number.

Logits are changed in the order of SGLang: presence and frequency penalties, repetition penalty, logit bias, temperature, then the cuts top-k,
top-p and min-p.

Legend: n rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_core.rollouts.sampling import SamplingParams

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return float64 in [0, 1) for every (seed, position), shapes broadcast; 53 random bits.

    The finaliser of SplitMix64 (Steele, Lea, Flood 2014) applied twice: over the seed, then over seed + position.
    """
    with np.errstate(over="ignore"):
        mixed = _mix(seeds.astype(np.uint64) + GOLDEN)
        mixed = _mix(mixed + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN)
    values: np.ndarray = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return values


def _mix(z: Any) -> Any:
    z = (z ^ (z >> np.uint64(30))) * MIX_1
    z = (z ^ (z >> np.uint64(27))) * MIX_2
    return z ^ (z >> np.uint64(31))


class _Penalties:
    """Changes the logits of rows by the tokens that each has generated, and by its logit bias."""

    def __init__(
        self, rows: Sequence[SamplingParams], ids: Sequence[Sequence[int]], vocab_size: int, device: torch.device
    ) -> None:
        self._counts = torch.zeros(len(rows), vocab_size, device=device)
        self._bias = torch.zeros(len(rows), vocab_size, device=device)
        for row, (params, generated) in enumerate(zip(rows, ids, strict=True)):
            if generated:
                tokens = torch.tensor(generated, device=device)
                self._counts[row].index_add_(0, tokens, torch.ones(len(generated), device=device))
            for token, bias in params.logit_bias:
                self._bias[row, token] = bias

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, device=device).unsqueeze(1)

        self._presence = column([row.presence_penalty for row in rows])
        self._frequency = column([row.frequency_penalty for row in rows])
        self._repetition = column([row.repetition_penalty for row in rows])

    def apply(self, logits: Tensor) -> Tensor:
        """Return the changed logits [n, V]."""
        occurs = self._counts > 0
        logits = logits - self._frequency * self._counts - self._presence * occurs
        reduced = torch.where(logits < 0, logits * self._repetition, logits / self._repetition)
        return torch.where(occurs, reduced, logits) + self._bias

    def count(self, tokens: Tensor) -> None:
        """Count the tokens [n] that the rows have got."""
        self._counts.scatter_add_(1, tokens.unsqueeze(1), torch.ones_like(self._counts[:, :1]))


class BatchSampler:
    """Samples one token for each row of a fixed batch: `tokens, logprobs = sampler(logits, uniforms)`.

    It is created when rows are added or removed, and called at every step.
    """

    def __init__(
        self, rows: Sequence[SamplingParams], ids: Sequence[Sequence[int]], *, vocab_size: int, device: torch.device
    ) -> None:
        """Prepare to sample rows with these settings on `device`, from a vocabulary of `vocab_size` tokens.

        `ids` are the tokens that each row has generated so far; they matter for rows with penalties only.
        """
        biased = any(row.penalised or row.logit_bias for row in rows)
        self._penalties = _Penalties(rows, ids, vocab_size, device) if biased else None
        greedy = [row.greedy for row in rows]
        temperatures = [1.0 if row.greedy else row.temperature for row in rows]
        self._all_greedy, self._any_greedy = all(greedy), any(greedy)
        self._greedy = torch.tensor(greedy, device=device)
        uniform = len(set(temperatures)) == 1
        self._scaled = not (uniform and temperatures[0] == 1.0)
        self._temperature: Any = temperatures[0] if uniform else torch.tensor(temperatures, device=device).unsqueeze(1)
        tops = [vocab_size if row.top_k is None else min(row.top_k, vocab_size) for row in rows]
        self._top_k = torch.tensor(tops, device=device).unsqueeze(1) if min(tops) < vocab_size else None
        nuclei = [row.top_p for row in rows]
        self._top_p = torch.tensor(nuclei, device=device).unsqueeze(1) if min(nuclei) < 1 else None
        floors = [row.min_p for row in rows]
        self._min_p = torch.tensor(floors, device=device).unsqueeze(1) if max(floors) > 0 else None

    def __call__(self, logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return (tokens [n] int64, log-probabilities [n] float32) for `logits` [n, V] float32, `noise` [n] float64.

        Log-probabilities are of softmax(logits / temperature) over the whole vocabulary, also with top-k, top-p or min-p; with penalties
        and logit bias the logits are those after them. Greedy rows use temperature 1.
        """
        if self._penalties is not None:
            logits = self._penalties.apply(logits)
        if self._scaled:
            logits = logits / self._temperature
        probabilities = logits.softmax(-1)
        if self._all_greedy:
            tokens = logits.argmax(-1)
        else:
            tokens = self._sample(self._cut(logits, probabilities), noise)
            if self._any_greedy:
                tokens = torch.where(self._greedy, logits.argmax(-1), tokens)
        if self._penalties is not None:
            self._penalties.count(tokens)
        return tokens, probabilities.gather(1, tokens.unsqueeze(1)).squeeze(1).log_()

    @staticmethod
    def _sample(weights: Tensor, noise: Tensor) -> Tensor:
        """Return the first index whose cumulative weight exceeds noise x total; an index of weight zero is never returned.

        Summed in float64: in float32 a weight below 6e-8 of the sum before it adds nothing, and its token would never be drawn.
        """
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        threshold = noise.unsqueeze(1) * cumulative[:, -1:]
        return torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)

    def _cut(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        """Return the probabilities, with those that top-k, then top-p and min-p exclude set to 0 (not renormalised)."""
        if self._min_p is not None:  # the most likely token is never excluded, so the order does not matter
            floor = self._min_p * probabilities.amax(-1, keepdim=True)
            kept = probabilities.masked_fill(probabilities < floor, 0.0)
        else:
            kept = probabilities
        if self._top_k is None and self._top_p is None:
            return kept
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        if self._top_k is not None:
            ranks = torch.arange(logits.shape[1], device=logits.device)
            ordered = ordered.masked_fill(ranks >= self._top_k, 0.0)
        if self._top_p is not None:
            mass_before = ordered.cumsum(-1) - ordered
            total = ordered.sum(-1, keepdim=True)
            # Keep the token that crosses top_p: the sum before it is still below.
            ordered = ordered.masked_fill(mass_before >= self._top_p * total, 0.0)
        restored = torch.zeros_like(probabilities).scatter_(1, order, ordered)
        return torch.where(kept > 0, restored, kept)
