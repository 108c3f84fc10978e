"""How a data rank comes by its groups: fetched ahead, each admitted by the runner before it counts.

trajectories -> fetched -> fresh -> asked -> admitted, or dropped when the runner refuses
                    ^--------- later <---'   kept for a later step: asynchronous runs only
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from rl_core.algorithms.filtering import informative_groups
from rl_core.api.errors import DeadlineExceeded, RLJobError
from rl_core.api.records import PromptGroupRecord
from rl_core.batching.collate import has_failed
from rl_core.messages.groups import EndOfStep, GroupEntry
from rl_core.observability.statistics import aggregate_rollout_metrics

Admit = Callable[[list[PromptGroupRecord]], Awaitable[list[bool | None]]]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
"""Pauses until the runner is asked again about records that it put off: another rank may have the older group for which it kept a place,
or that group may be gone. Each is twice as long as the one before, until a record is admitted."""
REWARD = "total_reward/"
"""Prefix of a group's metrics that mean nothing without a reward."""


class GroupIntake:
    """Receives one step's groups of one rank.

    What is there is fetched, up to as many records as are missing, so that none is taken from another rank. The runner is asked
    about one lot at a time; what arrives meanwhile makes the next lot: groups that end together cost one or two calls.
    """

    def __init__(
        self,
        channel: Any,
        *,
        admit: Admit,
        progress: Callable[[], None],
        wanted: int,
        step: int | None,
        limit: float,
    ) -> None:
        """Take `wanted` records from `channel`, or fewer when it brings the EndOfStep of `step`; within `limit` seconds.

        `admit` answers for each record whether it may train (None: in a later step); `progress` is called for each that may.
        """
        self.admitted: list[PromptGroupRecord] = []
        self._channel, self._admit, self._progress = channel, admit, progress
        self._wanted, self._step = wanted, step
        self._limit, self._deadline = limit, time.monotonic() + limit
        self._fetch: asyncio.Task[list[Any]] | None = None
        self._fresh: list[PromptGroupRecord] = []
        self._asked: list[PromptGroupRecord] = []
        self._later: list[PromptGroupRecord] = []
        """Put off by the runner; back to the channel at the end, as another rank may lack them."""
        self._behind: list[Any] = []
        """Fetched behind the end of the step; back to the channel, another rank's end of it included."""
        self._ask_again_at = 0.0
        self._next_pause = FIRST_PAUSE_S
        self._answer: asyncio.Future[list[bool | None]] | None = None
        self._ended = False

    async def receive(self) -> list[PromptGroupRecord]:
        """Return the admitted records; refused ones (of an older lease, stale, filtered, surplus) are dropped.

        Raises DeadlineExceeded when the time is up.
        """
        try:
            await self._run()
        finally:
            await self._close()
        return self.admitted

    @property
    def _held(self) -> int:
        return len(self.admitted) + len(self._asked) + len(self._fresh)

    async def _run(self) -> None:
        """Fetch and ask until the groups are there or the runner ends the step."""
        while self._answer or self._fresh or (len(self.admitted) < self._wanted and not self._ended):
            missing = self._wanted - self._held
            if self._fetch is None and missing > 0 and not self._ended:
                left = max(self._deadline - time.monotonic(), 0.001)
                self._fetch = asyncio.ensure_future(self._channel.get_some_async(missing, timeout=left))
            if self._answer is None and (self._fresh or (self._later and not self._pause())):
                self._ask()
            pause = self._pause() if self._later and self._answer is None else None
            await asyncio.wait(
                [*filter(None, (self._fetch, self._answer))], timeout=pause, return_when=asyncio.FIRST_COMPLETED
            )
            if self._answer is not None and self._answer.done():
                self._settle(self._answer.result())
            if self._fetch is not None and self._fetch.done():
                fetch, self._fetch = self._fetch, None
                self._take(fetch)

    async def _close(self) -> None:
        """End what is under way; what came and was not looked at goes back."""
        fetch = self._fetch
        for task in filter(None, (fetch, self._answer)):
            task.cancel()
        if fetch is not None:
            await asyncio.wait([fetch])
        came = [] if fetch is None or fetch.cancelled() or fetch.exception() is not None else fetch.result()
        for item in (*self._later, *self._behind, *came):
            with suppress(RLJobError):  # the channel is gone, and everything in it
                await self._channel.put_async(item)

    def _take(self, fetch: asyncio.Task[list[Any]]) -> None:
        """Take up what was fetched."""
        try:
            items = fetch.result()
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"recv_batch must get {self._wanted} groups within deadlines.rollout {self._limit} s, got {self._held}; "
                f"the rollouts are slow or gone: {error}"
            ) from error
        for item in items:
            if self._ended:
                self._behind.append(item)
            elif not isinstance(item, EndOfStep):
                if item.times is not None:
                    item.times.arrived = time.monotonic()
                self._fresh.append(item)
            else:  # that of an earlier step, in which this rank was complete already, is passed over
                self._ended = item.step == self._step

    def _ask(self) -> None:
        self._asked, self._fresh = self._fresh, []
        if self._later:  # the oldest first, and no more than this rank has places for
            lot = sorted([*self._later, *self._asked], key=lambda record: (record.start_version, record.order))
            places = self._wanted - len(self.admitted)
            self._asked, self._later = lot[:places], lot[places:]
        self._answer = asyncio.ensure_future(self._admit(self._asked))

    def _pause(self) -> float:
        """Return the seconds until records that were put off may be asked about again."""
        return max(self._ask_again_at - time.monotonic(), 0.0)

    def _settle(self, answers: list[bool | None]) -> None:
        for record, taken in zip(self._asked, answers, strict=True):
            if taken:
                self.admitted.append(record)
                self._progress()
                self._next_pause = FIRST_PAUSE_S
            elif taken is None:
                self._later.append(record)
        if None in answers:
            self._ask_again_at = time.monotonic() + self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE_S)
        if False in answers:  # what was refused may have been what the others wait for
            self._ask_again_at = 0.0
        self._asked, self._answer = [], None


def group_entry(record: PromptGroupRecord, *, min_std: float | None, rank: int) -> GroupEntry:
    """Return what the runner needs to admit a finished group: versions, tokens, raw rewards, informative or not.

    `min_std` None: no group is replaced for its rewards, so none is looked at, and all count as informative.
    """
    versions = [version for completion in record.completions for version in completion.policy_versions]
    times = record.times
    if times is not None:
        times.asked, times.versions = (
            time.monotonic(),
            [completion.policy_versions for completion in record.completions],
        )
    return GroupEntry(
        group_id=record.group_id,
        token=record.lease_token,
        v_min=min(versions, default=record.start_version),
        v_max=max(versions, default=record.end_version),
        rewards=tuple(float(completion.reward) for completion in record.completions),
        tokens=sum(_generated(completion.message_log) for completion in record.completions),
        informative=min_std is None or _is_informative(record, min_std),
        rank=rank,
        times=times,
    )


def _is_informative(record: PromptGroupRecord, min_std: float) -> bool:
    rewards = torch.tensor([completion.reward for completion in record.completions], dtype=torch.float32)
    may_train = [not has_failed(completion) and completion.loss_multiplier != 0 for completion in record.completions]
    valid = torch.tensor(may_train) & rewards.isfinite()
    groups = torch.zeros(len(rewards), dtype=torch.int64)
    return bool(informative_groups(rewards, groups, valid=valid, min_std=min_std).any())


def _generated(log: Sequence[Any]) -> int:
    return sum(len(message["generation_logprobs"]) for message in log if message.get("generation_logprobs") is not None)


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
