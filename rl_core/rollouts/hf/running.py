"""`Rows`: the state of the running rows as arrays: tokens, log-probabilities, random numbers, limits.

Row i here is row i of the decoder's cache. Rows are appended at the end. The last rows take the places of removed ones, and the engine
repeats these moves in the decoder's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_core.rollouts.hf.sampling import uniforms
from rl_core.rollouts.rows import GenerationOutput
from rl_core.rollouts.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One row in the HF engine: a `rows.Row` with its limits resolved."""

    ticket: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    limit: int
    """Largest number of new tokens, at least 1."""
    limit_reason: str
    """Finish reason when the limit is reached."""
    stop_set: int
    """Index of the row's stop ids in `StopIds`."""
    batch: int | None = None
    """Rows with the same number run as a batch of their own; None = in any batch."""
    begun: GenerationOutput | None = None
    """What the row had generated when it was interrupted. None for a new row."""
    queued: float = 0.0
    """Time of its submission, monotonic seconds."""

    @property
    def context(self) -> tuple[int, ...]:
        """Return all tokens of the row so far: prompt and generated ones."""
        return self.prompt if self.begun is None else (*self.prompt, *self.begun.ids)


LARGEST_UNIFORM = np.nextafter(np.float32(1), np.float32(0))
"""Largest float32 below 1, the upper bound of the random numbers with which tokens are sampled.

Float64 numbers just below 1 would be rounded to 1, for which the last token of the vocabulary is sampled even if its probability is 0.
"""


class Rows:
    """The running rows of one engine."""

    def __init__(self, max_batch: int) -> None:
        self.requests: list[Request] = []
        self._max_batch = max_batch
        self._width = 0
        self._num_with_strings = 0
        self._count = np.zeros(max_batch, dtype=np.int64)
        self._limit = np.zeros(max_batch, dtype=np.int64)
        self._prompt = np.zeros(max_batch, dtype=np.int64)
        self.stop_sets = np.zeros(max_batch, dtype=np.int64)
        self._index = np.arange(max_batch)
        self._tokens = np.zeros((max_batch, 0), dtype=np.int64)
        self._logprobs = np.zeros((max_batch, 0), dtype=np.float64)
        self._noise = np.zeros((max_batch, 0), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, requests: Sequence[Request]) -> None:
        """Append rows and compute the random numbers of all tokens that they may get."""
        width = max(request.limit for request in requests)
        if width > self._width:
            self._widen(width)
        first, end = len(self), len(self) + len(requests)
        self.requests += requests
        self._num_with_strings += sum(bool(request.params.stop_strings) for request in requests)
        self._count[first:end] = 0
        for row, request in enumerate(requests, first):
            if request.begun is not None:
                count = self._count[row] = len(request.begun.ids)
                self._tokens[row, :count], self._logprobs[row, :count] = request.begun.ids, request.begun.logprobs
        self._limit[first:end] = [request.limit for request in requests]
        self._prompt[first:end] = [len(request.prompt) for request in requests]
        self.stop_sets[first:end] = [request.stop_set for request in requests]
        seeds = np.array([request.seed for request in requests], dtype=np.uint64)
        positions = self._prompt[first:end, None] + np.arange(width)[None, :]
        self._noise[first:end, :width] = np.minimum(uniforms(seeds[:, None], positions), LARGEST_UNIFORM)

    def num_tokens(self) -> int:
        """Return the tokens of all rows, including prompts. May be called from any thread; a row that just ended may be counted."""
        count = len(self)
        return int(self._prompt[:count].sum() + self._count[:count].sum())

    @property
    def with_strings(self) -> bool:
        """Whether any row has stop strings."""
        return self._num_with_strings > 0

    def uniforms(self, first: int) -> np.ndarray:
        """Return a uniform random float32 in [0, 1) for the next token of each row from row `first` on."""
        part = slice(first, len(self))
        noise: np.ndarray = self._noise[self._index[part], self._count[part]]
        return noise

    def record(self, first: int, tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Append one token per row from `first` on; return for each of these rows whether it is at its limit."""
        part = slice(first, len(self))
        cells = (self._index[part], self._count[part])
        self._tokens[cells] = tokens
        self._logprobs[cells] = logprobs
        self._count[part] += 1
        full: np.ndarray = self._count[part] >= self._limit[part]
        return full

    def ids(self, row: int, start: int = 0) -> list[int]:
        """Return the generated ids of `row` from the one with index `start` on."""
        ids: list[int] = self._tokens[row, start : self._count[row]].tolist()
        return ids

    def output(self, row: int, reason: str, version: int) -> GenerationOutput:
        """Return the output of `row`, which ended for `reason`.

        Its tokens since the last interruption get the policy version `version`; earlier ones keep theirs.
        """
        count, interrupted = int(self._count[row]), self.requests[row].begun
        earlier_versions = [] if interrupted is None else interrupted.versions
        start = earlier_versions[-1][1] if earlier_versions else 0
        return GenerationOutput(
            ids=self._tokens[row, :count].tolist(),
            logprobs=self._logprobs[row, :count].tolist(),
            finish_reason=reason,
            versions=[*earlier_versions, *([(start, count, version)] if count > start else [])],
        )

    def remove(self, gone: Sequence[int]) -> list[tuple[int, int]]:
        """Remove the rows `gone`; return the (source, target) moves of rows that took their places."""
        num_left = len(self) - len(gone)
        dropped = set(gone)
        self._num_with_strings -= sum(bool(self.requests[row].params.stop_strings) for row in dropped)
        holes = sorted(row for row in dropped if row < num_left)
        sources = [row for row in range(num_left, len(self)) if row not in dropped]
        moves = list(zip(sources, holes, strict=True))
        for source, target in moves:
            self.requests[target] = self.requests[source]
            for array in (
                self._count,
                self._limit,
                self._prompt,
                self.stop_sets,
                self._tokens,
                self._logprobs,
                self._noise,
            ):
                array[target] = array[source]
        del self.requests[num_left:]
        return moves

    def _widen(self, width: int) -> None:
        def wider(array: np.ndarray) -> np.ndarray:
            widened = np.zeros((self._max_batch, width), dtype=array.dtype)
            widened[:, : self._width] = array
            return widened

        self._tokens, self._logprobs = wider(self._tokens), wider(self._logprobs)
        self._noise = wider(self._noise)
        self._width = width
