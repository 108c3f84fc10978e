"""How a data rank receives its groups: the runner moves the record of each admitted group to the rank's key of the channel.

The rank decides nothing. It takes records until it has its share, or until the runner closes the key because the step is smaller.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from rl_core.api.errors import ChannelClosed, DeadlineExceeded
from rl_core.api.records import PromptGroupRecord
from rl_core.messages.channel import Key
from rl_core.observability.statistics import aggregate_rollout_metrics

REWARD = "total_reward/"
"""Prefix of a group's metrics that mean nothing without a reward."""


async def receive_groups(
    channel: Any, *, wanted: int, limit: float, key: Key, progress: Callable[[], None] = lambda: None
) -> list[PromptGroupRecord]:
    """Return `wanted` records of `channel` under `key`, or fewer when the key is closed; `progress` is called for each.

    Raises DeadlineExceeded, with the number of records that came, after `limit` seconds.
    """
    records: list[PromptGroupRecord] = []
    deadline = time.monotonic() + limit
    while len(records) < wanted:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            received = await channel.get_some_async(wanted - len(records), key=key, timeout=left)
        except ChannelClosed:
            break
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"recv_batch must get {wanted} groups within deadlines.rollout {limit} s, got {len(records)}; "
                f"the rollouts are slow or gone: {error}"
            ) from error
        records += received
        for _ in received:
            progress()
    return records


def rollout_metrics(records: Sequence[PromptGroupRecord]) -> dict[str, float]:
    """Return the finite numbers of the groups' `rollout_metrics`, aggregated, as `rollout/*`."""
    finite = []
    for record in records:
        # An empty histogram: all samples are masked. No reward is not a reward of 0.
        unrewarded = record.rollout_metrics.get(f"{REWARD}histogram") == []
        values = record.rollout_metrics.items()
        numbers = {name: float(v) for name, v in values if isinstance(v, int | float) and math.isfinite(v)}
        finite.append({name: v for name, v in numbers.items() if not (unrewarded and name.startswith(REWARD))})
    return {f"rollout/{name}": value for name, value in aggregate_rollout_metrics(finite).items()}
