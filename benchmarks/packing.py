"""Padding waste, data-parallel balance and the time of both, beside the usual way and the physical limit. Prints JSON.

Lengths are lognormal (median 400 tokens, sigma 0.8, at most 8,192), as completions of a reasoning model are. Waste is the
share of computed tokens that are padding: in packed rows (each padded to a multiple of 8, as tensor parallelism wants), and the
usual way, length-sorted rows padded to the longest of their batch. Balance is the load of the heaviest of 8 ranks over the mean;
the usual way is equal row counts in order of arrival. Times are medians of several runs.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rl_core.batching.balance import karmarkar_karp, load_ratio, sequence_costs, split_evenly
from rl_core.batching.microbatch import plan_microbatches

CAPACITY = 16384
RANKS = 8
MULTIPLE = 8
RUNS = 9
SEEDS = range(5)


def lognormal_lengths(count: int, seed: int) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(400), 0.8, count)
    return np.clip(drawn, 1, 8192).astype(int).tolist()


def milliseconds_per_1000(call: Callable[[], Any], count: int) -> float:
    call()  # compiles, or loads the compiled kernel
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return round(statistics.median(seconds) * 1e6 / count, 4)


def sorted_padded_tokens(lengths: list[int]) -> int:
    """Tokens computed by length-sorted rows in batches whose padded size fits the capacity."""
    total = rows = 0
    longest = 0
    for length in sorted(lengths, reverse=True):
        if rows and longest * (rows + 1) > CAPACITY:
            total, rows, longest = total + longest * rows, 0, 0
        longest, rows = max(longest, length), rows + 1
    return total + longest * rows


def padding_waste(lengths: list[int], padded_total: int) -> float:
    """Return the share of `padded_total` tokens that are padding."""
    return 1 - sum(lengths) / padded_total


def waste(count: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    for seed in SEEDS:
        lengths = lognormal_lengths(count, seed)
        packed = sum(length + -length % MULTIPLE for length in lengths)
        found.setdefault("packed_rows", []).append(padding_waste(lengths, packed))
        found.setdefault("sorted_padded_batches", []).append(padding_waste(lengths, sorted_padded_tokens(lengths)))
    return {name: round(statistics.median(values), 5) for name, values in found.items()}


def balance(count: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    for seed in SEEDS:
        costs = sequence_costs(lognormal_lengths(count, seed), quadratic=1 / (12 * 1024))
        mean = sum(costs) / RANKS
        found.setdefault("limit", []).append(max(max(costs), mean) / mean)
        for name, parts in {
            "karmarkar_karp": karmarkar_karp(costs, RANKS),
            "karmarkar_karp_equal_size": karmarkar_karp(costs, RANKS, equal_size=True),
            "order_of_arrival": [list(part) for part in split_evenly(range(count), RANKS)],
        }.items():
            found.setdefault(name, []).append(load_ratio(costs, parts))
    return {name: round(statistics.median(values), 6) for name, values in found.items()}


def times(count: int) -> dict[str, float]:
    lengths = lognormal_lengths(count, 0)
    costs = sequence_costs(lengths, quadratic=1 / (12 * 1024))
    calls: dict[str, Callable[[], Any]] = {
        "micro_batches": lambda: plan_microbatches(lengths, token_budget=CAPACITY),
    }
    calls["karmarkar_karp"] = lambda: karmarkar_karp(costs, RANKS)
    calls["karmarkar_karp_equal_size"] = lambda: karmarkar_karp(costs, RANKS, equal_size=True)
    calls["limit_one_numpy_sort_of_the_list"] = lambda: np.argsort(np.asarray(costs), kind="stable").tolist()
    return {name: milliseconds_per_1000(call, count) for name, call in calls.items()}


def main() -> None:
    sizes = (256, 1024, 8192)
    report: dict[str, Any] = {"capacity": CAPACITY, "ranks": RANKS, "by_sequences": {}}
    for count in sizes:
        report["by_sequences"][count] = {
            "padding_waste": waste(count),
            "load_max_over_mean": balance(count),
            "milliseconds_per_1000": times(count),
        }
    report["targets"] = {
        "padding_waste": {
            "at_most": 0.015,
            "packed_rows": max(entry["padding_waste"]["packed_rows"] for entry in report["by_sequences"].values()),
        },
        "load_max_over_mean": {
            "at_most": 1.005,
            "karmarkar_karp": max(
                entry["load_max_over_mean"]["karmarkar_karp"] for entry in report["by_sequences"].values()
            ),
        },
        "milliseconds_per_1000": {
            "below": 1.0,
            "slowest_at_1024_and_8192": max(
                report["by_sequences"][count]["milliseconds_per_1000"][name]
                for count in (1024, 8192)
                for name in ("micro_batches", "karmarkar_karp", "karmarkar_karp_equal_size")
            ),
        },
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
