"""The seeds and the metrics of the episodes of an env worker. Pure."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.plan.groups import ENV
from rl_core.plan.routing import shares

EVALUATION = 1 << 30
"""Smallest seed of evaluations. Seeds of training are smaller."""


def train_seed(base_seed: int, group: int, episode: int) -> int:
    """Return the seed of a training episode, below 2 ** 30. Equal arguments give equal seeds."""
    digest = hashlib.blake2b(f"{base_seed} {group} {episode}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % EVALUATION


def eval_seeds(base_seed: int, worker: int, workers: int, num_envs: int) -> list[int]:
    """Return the seeds of the `num_envs` evaluation episodes of one env worker: fixed by `base_seed`, disjoint over the workers.

    All are in [2 ** 30, 2 ** 31), and so differ from all seeds of training.
    """
    if not 0 <= worker < workers:
        raise ValueError(f"worker must be in [0, {workers}), got {worker}")
    return [EVALUATION + (base_seed * 1_000_003 + worker + index * workers) % EVALUATION for index in range(num_envs)]


def eval_share(episodes: int, worker: int, workers: int) -> int:
    """Return how many of `episodes` evaluation episodes the env worker with index `worker` runs."""
    return shares(episodes, workers)[worker]


def episode_metrics(final_infos: Sequence[Mapping[str, Any]], *, prefix: str = ENV) -> dict[str, float]:
    """Return means over episodes: return, reward per step, length, success at any step and at the last one; and their number.

    Without episodes the result has only `num_trajectories`.
    """
    count = len(final_infos)
    metrics = {f"{prefix}/num_trajectories": float(count)}
    if not count:
        return metrics
    returns, lengths = sum(info["return"] for info in final_infos), sum(info["length"] for info in final_infos)
    return metrics | {
        f"{prefix}/return": returns / count,
        f"{prefix}/reward": returns / max(lengths, 1),
        f"{prefix}/episode_len": lengths / count,
        f"{prefix}/success_once": sum(bool(info["success_once"]) for info in final_infos) / count,
        f"{prefix}/success_at_end": sum(bool(info["success_at_end"]) for info in final_infos) / count,
    }
