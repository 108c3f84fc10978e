"""How a data rank comes by its groups: fetched ahead, each admitted by the runner before it counts (protocol.md 2)."""

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rl_core.actors.preparation import group_entry
from rl_core.api.errors import DeadlineExceeded, RLJobError
from rl_core.api.records import PromptGroupRecord
from rl_core.observability.statistics import aggregate_rollout_metrics

if TYPE_CHECKING:
    from rl_core.actors.base import Actor

FETCHES = 16
"""Most records asked of the channel at once."""
REWARD = "total_reward/"
"""Prefix of a group's metrics that mean nothing without a reward."""


async def receive(
    actor: "Actor", channel: Any, wanted: int, step: int | None, *, limit: float
) -> list[PromptGroupRecord]:
    """Return `wanted` admitted records, or fewer when the runner ends the step early.

    Refused records (of an older lease, stale, filtered, surplus) are dropped. Raises DeadlineExceeded after `limit` seconds.
    """
    reception = _Reception(actor, channel, wanted, step, limit)
    try:
        with actor.waiting("trajectories", "rollout"):
            await reception.run()
    finally:
        await reception.close()
    return reception.admitted


class _Reception:
    """One step's groups of one rank: fetched -> fresh -> asked -> admitted or dropped.

    As many records are fetched at a time as are missing, never more, so that none is taken from another rank. The runner is
    asked about one lot at a time; what arrives meanwhile makes the next lot: groups that end together cost one or two calls.
    """

    def __init__(self, actor: "Actor", channel: Any, wanted: int, step: int | None, limit: float) -> None:
        self.admitted: list[PromptGroupRecord] = []
        self._actor, self._channel = actor, channel
        self._wanted, self._step = wanted, step
        self._limit, self._deadline = limit, time.monotonic() + limit
        self._fetches: list[asyncio.Task[Any]] = []
        self._fresh: list[PromptGroupRecord] = []
        self._asked: list[PromptGroupRecord] = []
        self._answer: asyncio.Task[list[bool]] | None = None
        self._ended = False

    @property
    def _held(self) -> int:
        return len(self.admitted) + len(self._asked) + len(self._fresh)

    async def run(self) -> None:
        """Fetch and ask until the groups are there or the runner ends the step."""
        while self._answer or self._fresh or (len(self.admitted) < self._wanted and not self._ended):
            if not self._ended:
                missing = min(self._wanted - self._held, FETCHES) - len(self._fetches)
                left = max(self._deadline - time.monotonic(), 0.001)
                self._fetches += [asyncio.ensure_future(self._channel.get_async(timeout=left)) for _ in range(missing)]
            if self._answer is None and self._fresh:
                self._ask()
            waited = [] if self._ended else self._fetches
            await asyncio.wait({*waited, *filter(None, [self._answer])}, return_when=asyncio.FIRST_COMPLETED)
            if self._answer is not None and self._answer.done():
                self._settle(self._answer.result())
            if not self._ended:
                self._take()

    async def close(self) -> None:
        """End what is under way; a record that came and was not looked at goes back, as does another rank's end of step."""
        fetches, self._fetches = self._fetches, []
        for task in (*fetches, *filter(None, [self._answer])):
            task.cancel()
        if fetches:
            await asyncio.wait(fetches)
        for fetch in fetches:
            if not fetch.cancelled() and fetch.exception() is None:
                with suppress(RLJobError):  # the channel is gone, and everything in it
                    await self._channel.put_async(fetch.result())

    def _take(self) -> None:
        """Take up what was fetched, in the order of asking."""
        for fetch in [fetch for fetch in self._fetches if fetch.done()]:
            self._fetches.remove(fetch)
            try:
                item = fetch.result()
            except DeadlineExceeded as error:
                raise DeadlineExceeded(
                    f"recv_batch must get {self._wanted} groups within deadlines.rollout {self._limit} s, got {self._held}; "
                    f"the rollouts are slow or gone: {error}"
                ) from error
            if not isinstance(item, dict):
                self._fresh.append(item)
            elif item.get("end_of_step") == self._step:
                self._ended = True
                break
            # else the end of an earlier step, in which this rank was complete already

    def _ask(self) -> None:
        sampling, rank = self._actor.cfg.algorithm.dynamic_sampling, self._actor.ranks.rank
        min_std = sampling.min_std if sampling.enabled else None
        entries = [group_entry(record, min_std=min_std, rank=rank) for record in self._fresh]
        self._asked, self._fresh = self._fresh, []
        self._answer = asyncio.ensure_future(_admit(self._actor, entries))

    def _settle(self, answers: list[bool]) -> None:
        for record, taken in zip(self._asked, answers, strict=True):
            if taken:
                self.admitted.append(record)
                self._actor.record_progress("groups")
        self._asked, self._answer = [], None


async def _admit(actor: "Actor", entries: list[dict[str, Any]]) -> list[bool]:
    """Return the runner's answers; outside a job nobody refuses."""
    return [True] * len(entries) if actor.stand_alone else await actor.hub_call("admit", entries)


def rollout_metrics(records: Sequence[PromptGroupRecord]) -> dict[str, float]:
    """Return the groups' finite numbers as one, as `rollout/*`."""
    finite = []
    for record in records:
        # All masked: no reward is not a reward of 0.
        unrewarded = record.rollout_metrics.get(f"{REWARD}histogram") == []
        found = record.rollout_metrics.items()
        numbers = {name: float(v) for name, v in found if isinstance(v, int | float) and math.isfinite(v)}
        finite.append({name: v for name, v in numbers.items() if not (unrewarded and name.startswith(REWARD))})
    return {f"rollout/{name}": value for name, value in aggregate_rollout_metrics(finite).items()}
