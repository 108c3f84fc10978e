"""How a data rank comes by its groups: one record at a time, each admitted by the runner before it counts (protocol.md 2)."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_core.actors.preparation import group_entry
from rl_core.api.errors import DeadlineExceeded
from rl_core.api.records import PromptGroupRecord

if TYPE_CHECKING:
    from rl_core.actors.base import Actor


async def receive(
    actor: "Actor", channel: Any, wanted: int, step: int | None, *, limit: float
) -> list[PromptGroupRecord]:
    """Return `wanted` admitted records, or fewer when the runner ends the step early.

    Refused records (of an older lease, stale, filtered, surplus) are dropped. While the runner decides on one record the
    next is fetched, unless it might be one too many. Raises DeadlineExceeded after `limit` seconds.
    """
    deadline = time.monotonic() + limit
    admitted: list[PromptGroupRecord] = []
    asked: deque[tuple[PromptGroupRecord, asyncio.Task[list[bool]]]] = deque()

    async def settle() -> None:
        record, answer = asked.popleft()
        if (await answer)[0]:
            admitted.append(record)
            actor.record_progress("groups")

    try:
        with actor.waiting("trajectories", "rollout"):
            while len(admitted) < wanted:
                if len(admitted) + len(asked) == wanted:
                    await settle()
                    continue
                item = await _next(channel, deadline, limit, len(admitted) + len(asked), wanted)
                if not isinstance(item, dict):
                    entry = group_entry(
                        item, min_std=actor.cfg.algorithm.dynamic_sampling.min_std, rank=actor.ranks.rank
                    )
                    asked.append((item, asyncio.ensure_future(_admit(actor, entry))))
                elif (
                    item.get("end_of_step") == step
                ):  # else of an earlier step, in which this rank was complete already
                    break
            while asked:
                await settle()
    finally:
        for _, answer in asked:
            answer.cancel()
    return admitted


async def _admit(actor: "Actor", entry: dict[str, Any]) -> list[bool]:
    """Return the runner's answer; outside a job nobody refuses."""
    return [True] if actor.stand_alone else await actor.hub_call("admit", [entry])


async def _next(channel: Any, deadline: float, limit: float, held: int, wanted: int) -> Any:
    try:
        return await channel.get_async(timeout=max(deadline - time.monotonic(), 0.001))
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            f"recv_batch must get {wanted} groups within deadlines.rollout {limit} s, got {held}; the rollouts are slow or gone: {error}"
        ) from error


def rollout_metrics(records: Sequence[PromptGroupRecord]) -> dict[str, float]:
    """Return `rollout/*`: the groups' finite numbers averaged, of `/max` and `/min` names the extreme."""
    gathered: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.rollout_metrics.items():
            if isinstance(value, int | float) and math.isfinite(value):
                gathered.setdefault(name, []).append(float(value))
    return {f"rollout/{name}": _reduce(name, values) for name, values in gathered.items()}


def _reduce(name: str, values: list[float]) -> float:
    if name.endswith("/max"):
        return max(values)
    return min(values) if name.endswith("/min") else sum(values) / len(values)
