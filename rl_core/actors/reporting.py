"""The metrics of a training step. Statistics of all micro-batches and ranks are added as sums and divided once at the end."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from rl_core.actors.ranks import Ranks
from rl_core.actors.schedule import OptimizerCounts
from rl_core.algorithms.mismatch import PARTS, PREFIX
from rl_core.algorithms.stats import Stat, finish_stats, merge_stats, read_stats
from rl_core.api.errors import ConfigError

MISMATCH = (PREFIX, PARTS)
UNPREFIXED = ("perf/", "time/", *MISMATCH)
"""Prefixes of metrics that keep their name; all others are prefixed with `actor/`."""


class StepMetrics:
    """Collects the statistics of one training step."""

    def __init__(self, counts: OptimizerCounts) -> None:
        """Start a step. `counts` are the actor's running counters; the metrics contain their values at the end of the step."""
        self._counts = counts
        self._counts_at_start = replace(counts)
        self._stats: list[Mapping[str, Stat]] = []
        self._last_step_stats: list[Mapping[str, Stat]] | None = None
        self._norms: list[float] = []
        self._rate = 0.0
        self._seconds: dict[str, float] = {}
        self.imbalance = 1.0
        self.early_stopped = False

    @property
    def nothing_ended(self) -> bool:
        """Whether no mini-batch of the step has ended yet, be it applied, skipped or empty. Equal on all ranks."""
        return self._counts == self._counts_at_start

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Add the seconds of the block to the metric `time/<what>`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[what] = self._seconds.get(what, 0.0) + time.perf_counter() - started

    def add(self, stats: Mapping[str, Stat]) -> None:
        """Add statistics of the whole step."""
        self._stats.append(stats)

    def add_step(self, stats: Iterable[Mapping[str, Stat]], *, norm: float, rate: float) -> None:
        """Add the statistics of one optimizer step.

        `stats` holds those of its micro-batches and is empty on a rank that computes no loss. `norm` is the gradient norm, equal on all
        ranks; `rate` the learning rate.
        """
        self._last_step_stats = list(stats)
        self._stats.extend(self._last_step_stats)
        self._norms.append(norm)
        self._rate = rate

    def exceeds(self, ranks: Ranks, *, ratio: float | None, kl: float | None) -> bool:
        """Return whether mean ratio or KL of the last optimizer step, over all ranks, exceeds its bound.

        A bound of None is not checked; collective when one is set. Raises ConfigError when the loss does not report the metric that a bound
        needs.
        """
        bounds = {"maxPolicyRatio": ("ratio_mean", ratio), "maxPolicyKl": ("approx_kl", kl)}
        if self._last_step_stats is None or all(bound is None for _, bound in bounds.values()):
            return False
        values = finish_stats(_over_ranks(ranks, merge_stats(self._last_step_stats)))
        for field, (metric, bound) in bounds.items():
            if bound is not None and metric not in values:
                raise ConfigError(
                    f"algorithm.{field} needs a loss that reports the metric {metric}, got none of that name; report it or remove the bound"
                )
        self.early_stopped = any(bound is not None and values[metric] > bound for metric, bound in bounds.values())
        return self.early_stopped

    def finish(self, ranks: Ranks, *, tokens: int, seconds: float) -> dict[str, float]:
        """Return the step's metrics over all ranks as `actor/*`, `perf/*` and `time/*`. Collective.

        `tokens` is the number of tokens of all rows, `seconds` the duration of the step.
        """
        stats = _over_ranks(ranks, merge_stats(self._stats))
        unmeasured = {name for name, stat in stats.items() if name.startswith(MISMATCH) and not stat.count}
        metrics = finish_stats({name: stat for name, stat in stats.items() if name not in unmeasured})
        updates = max(self._counts.attempted - self._counts_at_start.attempted, 0)
        for name in ("loss", "policy_loss", "value_loss"):
            if name in metrics:
                # Sums over the parts of one optimizer step; several steps are averaged.
                metrics[name] /= max(updates, 1)
        finite = [norm for norm in self._norms if norm == norm and abs(norm) != float("inf")]
        applied = self._counts.applied - self._counts_at_start.applied
        metrics |= {
            "grad_norm": sum(finite) / len(finite) if finite else (self._norms or [0.0])[-1],
            "lr": self._rate,
            "update_success": applied / updates if updates else 0.0,
            "skipped_updates": float(self._counts.skipped),
            "empty_steps": float(self._counts.empty),
            "early_stopped": float(self.early_stopped),
            "perf/tokens_per_second": tokens / seconds,  # in a job the runner puts that of the whole step here
            "perf/train_tokens_per_second": tokens / seconds,
            "perf/dp_imbalance": self.imbalance,
            **{f"time/{name}": value for name, value in self._seconds.items()},
        }
        return {name if name.startswith(UNPREFIXED) else f"actor/{name}": value for name, value in metrics.items()}


def _over_ranks(ranks: Ranks, stats: dict[str, Stat]) -> dict[str, Stat]:
    if ranks.size == 1:
        return stats
    parts = [
        {name: Stat(kind, *torch.tensor(numbers, dtype=torch.float64)) for name, (kind, *numbers) in rank_stats.items()}
        for rank_stats in ranks.gather(read_stats(stats))
    ]
    return merge_stats(parts)
