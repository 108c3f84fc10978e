"""Metrics of a scored batch, computed over its unmasked samples."""

from collections import defaultdict
from collections.abc import Mapping
from math import fsum, nan
from typing import Any


def math_metrics(batch: Mapping[str, Any], *, correct: float = 1.0) -> dict[str, float]:
    """Return accuracy, pass@k, fraction_of_samples_properly_ended, num_problems_in_batch and mean lengths.

    `batch` has per row [B]: `rewards` (or `total_reward`), and optionally `is_end` (or `truncated`), `sample_mask` (or `loss_multiplier`;
    0 = masked), `generation_lengths`, `prompt_lengths`, and the prompt as `group_id`, `idx` or `text`. A sample is right if its reward is
    `correct` and it was not truncated; pass@k is the share of prompts with a right sample among their k. A metric without samples is NaN.
    """
    rewards = _column(batch, "rewards", "total_reward")
    if rewards is None:
        raise ValueError(f"batch must hold rewards, got columns {sorted(batch)}; pass a scored batch")
    rows = range(len(rewards))
    mask = _column(batch, "sample_mask", "loss_multiplier") or [1.0] * len(rewards)
    properly_ended = _ended(batch, len(rewards))
    prompts = _column(batch, "group_id", "idx", "text") or list(rows)
    kept_rows = [row for row in rows if mask[row]]
    is_correct = {row: rewards[row] == correct and properly_ended[row] for row in kept_rows}
    solved: dict[Any, bool] = defaultdict(bool)
    for row in kept_rows:
        solved[prompts[row]] |= is_correct[row]
    metrics = {
        "accuracy": _mean([float(value) for value in is_correct.values()]),
        "pass@k": _mean([float(value) for value in solved.values()]),
        "fraction_of_samples_properly_ended": _mean([float(properly_ended[row]) for row in kept_rows]),
        "num_problems_in_batch": float(len(kept_rows)),
    }
    for name in ("generation_lengths", "prompt_lengths"):
        lengths = _column(batch, name)
        if lengths is not None:
            metrics[name] = _mean([float(lengths[row]) for row in kept_rows])
    return metrics


def _column(batch: Mapping[str, Any], *names: str) -> list[Any] | None:
    for name in names:
        if name in batch:
            values = batch[name]
            return list(values.tolist() if hasattr(values, "tolist") else values)
    return None


def _ended(batch: Mapping[str, Any], rows: int) -> list[bool]:
    column = _column(batch, "is_end")
    if column is not None:
        return [bool(value) for value in column]
    return [not value for value in _column(batch, "truncated") or [False] * rows]


def _mean(values: list[float]) -> float:
    return fsum(values) / len(values) if values else nan
