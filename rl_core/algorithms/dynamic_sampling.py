"""DAPO's dynamic sampling: replace prompt groups whose rewards say nothing until a step is full. Imports no torch.

One sampler serves one step: batches are added until it is complete, then the step's groups are taken once.
"""

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

from rl_core.api.errors import SamplingExhausted
from rl_core.api.records import PromptGroupRecord


class DynamicSampler:
    """Collects informative groups of at most `max_batches` batches until `target_groups` are held."""

    def __init__(self, *, target_groups: int, max_batches: int) -> None:
        for name, value in (("target_groups", target_groups), ("max_batches", max_batches)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._target_groups = target_groups
        self._max_batches = max_batches
        self._kept: list[Any] = []
        self._taken: tuple[Any, ...] | None = None
        self._num_batches = 0
        self._num_dropped = 0

    def add(self, groups: Iterable[Any], informative: Sequence[bool]) -> None:
        """Keep the groups marked informative, in arrival order.

        Raises ValueError when the lengths differ and SamplingExhausted, with the counts, when the last batch allowed
        does not complete the step.
        """
        groups = list(groups)
        if len(groups) != len(informative):
            raise ValueError(
                f"informative must have one entry per group, got {len(informative)} for {len(groups)} groups"
            )
        kept = [group for group, useful in zip(groups, informative, strict=True) if bool(useful)]
        self._kept += kept
        self._num_batches += 1
        self._num_dropped += len(groups) - len(kept)
        if self._num_batches >= self._max_batches and not self.complete:
            raise SamplingExhausted(
                f"dynamic sampling must find {self._target_groups} informative groups in {self._max_batches} batches, "
                f"got {len(self._kept)} ({self._num_dropped} dropped); raise maxGenerationBatches, lower minStd or use "
                "harder or easier prompts"
            )

    @property
    def complete(self) -> bool:
        """Whether the step's groups are held (or were taken)."""
        return self._taken is not None or len(self._kept) >= self._target_groups

    @property
    def surplus(self) -> tuple[Any, ...]:
        """Informative groups beyond the target, oldest first; the caller gives them back to the ledger as discarded."""
        return tuple(self._kept if self._taken is not None else self._kept[self._target_groups :])

    def take(self) -> list[Any]:
        """Return exactly `target_groups` groups, oldest first, once; RuntimeError when there are not as many."""
        if self._taken is not None:
            raise RuntimeError("the step's groups must be taken once, got a second take(); make a new DynamicSampler")
        if not self.complete:
            raise RuntimeError(f"take() needs {self._target_groups} groups, got {len(self._kept)}; add more batches")
        self._taken = tuple(self._kept[: self._target_groups])
        self._kept = self._kept[self._target_groups :]
        return list(self._taken)

    def metrics(self) -> dict[str, float]:
        """Return the counts so far and, for PromptGroupRecords, `filtered_reward`, the mean raw reward kept."""
        kept = (*(self._taken or ()), *self._kept)
        found = {
            "dynamic_sampling/batches": float(self._num_batches),
            "dynamic_sampling/kept_groups": float(len(kept)),
            "dynamic_sampling/dropped_groups": float(self._num_dropped),
            "dynamic_sampling/surplus_groups": float(len(self.surplus)),
        }
        rewards = _rewards(kept)
        if rewards:
            found["filtered_reward"] = sum(rewards) / len(rewards)
        return found


def _rewards(groups: Iterable[Any]) -> list[float]:
    """Return the rewards of the samples of `groups` that may train; a failed sample has NaN."""
    records = (group for group in groups if isinstance(group, PromptGroupRecord))
    samples = (sample for record in records for sample in record.completions)
    return [sample.reward for sample in samples if sample.loss_multiplier > 0 and isfinite(sample.reward)]
