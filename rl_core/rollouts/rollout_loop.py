"""The loop of a rollout worker: it leases groups from the runner, generates them and reports each result.

    runner    --lease_groups--> generate(lease)
    rollout   --record--> channel `trajectories`, under the lease token       (validation: scores --> channel `validation`)
    rollout   --finish(GroupEntry)--> runner      the record is stored
    rollout   --return_group--> runner            the group failed, or was stopped before its end

Groups are leased only while leasing is open. The worker opens it (`open`) when a version is committed and closes it (`close`) when the next
one is offered. No more groups are leased than the engine has rows for; groups that arrive together start together. Everything here runs on
one event loop. Nothing is raised: a group ends as finished, as returned, or without a report because the runner has ended its lease.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl_core.algorithms.filtering import informative_groups
from rl_core.api.errors import GymTransportError, RLJobError, RolloutConfigError, text_of
from rl_core.api.records import Completion, GroupTimes, PromptGroupRecord
from rl_core.batching.collate import has_failed
from rl_core.batching.samples import keep_sample
from rl_core.messages.groups import GroupEntry, PromptLease, RequeueReason, ValidationScores
from rl_core.messages.members import WaitCause
from rl_core.messages.samples import KeptSample
from rl_core.rollouts.failed_sample import failed_sample
from rl_core.rollouts.leases import HubLeases, Renewal
from rl_core.rollouts.retry import classify_failure

if TYPE_CHECKING:
    from rl_core.channel import Channel

logger = logging.getLogger(__name__)
POLL_SECONDS = 20.0
"""How long the runner may hold a poll for groups that it cannot answer yet."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
"""Pauses before another call to a runner that failed, or that had no groups at once; each is twice as long as the one before."""
GATHER_S = 0.005
"""Seconds that a poll waits for further groups to end while others are being generated, so that one poll replaces all groups that end
together.
"""
RETURN_SECONDS = 1.0
"""Seconds that a stop waits for groups to be returned. A lease that cannot be returned ends by itself."""


@dataclass(slots=True)
class _Group:
    """One leased group that is being generated or reported."""

    lease: PromptLease
    task: asyncio.Task[None]
    current: bool = True
    """Whether the runner still counts the lease; a group whose lease it does not count is not given back."""
    reporting: bool = False
    """Whether its record is being stored: from then on the runner must hear of it, or the record would stay on the channel."""


class RolloutLoop:
    """Leases prompt groups, generates them with `generate` and reports them.

    States: STOPPED -> started (leasing closed) -> open <-> closed -> stopped. `open` and `close` only switch leasing; `stop` ends the loop.
    """

    def __init__(
        self,
        generate: Callable[[PromptLease], Awaitable[PromptGroupRecord]],
        leases: HubLeases,
        *,
        row_limit: Callable[[], int],
        group_rows: int,
        version: Callable[[], int],
        waiting: Callable[[str, str, WaitCause | None], AbstractContextManager[None]],
        min_std: float | None = None,
        kept_prompts: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`generate` makes the record of a lease that `leases` brought.

        `row_limit` is the number of rows in flight at which leasing stops, `group_rows` the expected rows of a group; `version` is that of
        the served weights; `waiting(what, on, cause)` declares a wait. `min_std`: see `group_entry`.
        `kept_prompts`: number of validation prompts, the first ones, whose samples are sent with their scores.
        """
        self._generate = generate
        self._leases = leases
        self._row_limit = row_limit
        self._group_rows = group_rows
        self._version = version
        self._waiting = waiting
        self._min_std = min_std
        self._kept_prompts = kept_prompts
        self._clock = clock
        self._renewal = Renewal(leases, self._disown)
        self._gate = asyncio.Event()
        self._changed = asyncio.Event()
        """Set when a group ends and when the gate moves."""
        self._rows = 0
        self._groups: dict[str, _Group] = {}
        """Groups in flight, by token."""
        self._polls: set[asyncio.Task[bool]] = set()
        """Polls whose answer may be on its way, that of a stopped loop included."""
        self._returns: set[asyncio.Task[None]] = set()
        self._loop_task: asyncio.Task[None] | None = None
        self._refusals = 0
        """Polls in a row that brought nothing, too early."""
        self._complaint = ""
        """The last failure of a poll, so that the same one is logged once."""
        self.groups_done = 0

    @property
    def groups_in_flight(self) -> int:
        """Number of groups that are leased and not yet reported."""
        return len(self._groups)

    def start(self, trajectories: Channel, validation: Channel) -> None:
        """Start the loop. Records and scores go to these channels. Nothing is leased before `open`."""
        if self._loop_task is None or self._loop_task.done():
            self._trajectories, self._validation = trajectories, validation
            self._loop_task = asyncio.ensure_future(self._serve())

    def open(self) -> None:
        """Start leasing groups, because the engine serves verified weights."""
        if not self._gate.is_set():
            self._refusals = 0
            self._gate.set()
            self._changed.set()

    def close(self) -> None:
        """Stop leasing groups. Groups in flight continue; groups of a lease that arrives afterwards are returned to the runner."""
        if self._gate.is_set():
            self._gate.clear()
            self._changed.set()

    async def pause(self, seconds: float | None) -> None:
        """Stop leasing and wait until no group is in flight. Groups that have not ended after `seconds` are returned to the runner.

        None waits without a limit; the caller sets one.
        """
        self.close()
        if self._groups:
            await asyncio.wait({group.task for group in self._groups.values()}, timeout=seconds)
        if self._groups:
            names = ", ".join(group.lease.group_id for group in self._groups.values())
            logger.warning("groups %s did not end in %s s; given back", names, seconds)
            await self._return_all()

    async def stop(self) -> None:
        """End the loop and return all groups in flight to the runner."""
        self.close()
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait({self._loop_task})
            self._loop_task = None
        await self._return_all()
        self._renewal.close()

    def drop(self, tokens: Iterable[str]) -> None:
        """Cancel the groups of the leases `tokens`, which the runner has ended. Groups that have ended are ignored."""
        for token in tokens:
            self._disown(token)

    # --- leasing -----------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            self._changed.clear()
            if not self._gate.is_set():
                with self._waiting("weights", "actor", WaitCause.WEIGHTS):
                    await self._gate.wait()
                continue  # The gate may have closed again before this loop woke up.
            if self._groups and self._room():
                await asyncio.sleep(GATHER_S)
            max_groups = self._room()
            if not max_groups:
                await self._change_within(LONGEST_PAUSE_S)  # there is also room once another rollout is lost
            elif not await self._lease(max_groups):
                pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._refusals)
                self._refusals += 1
                await self._change_within(pause)

    async def _change_within(self, seconds: float) -> None:
        # Not wait_for: before Python 3.12 it swallows a cancellation that comes together with the event.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _room(self) -> int:
        """Return how many groups fit beside those in flight; at least one where none is."""
        free = -(-(self._row_limit() - self._rows) // self._group_rows)
        return max(free, 0 if self._groups else 1)

    async def _lease(self, max_groups: int) -> bool:
        """Poll once and wait for the answer; return whether to poll again without a pause.

        The poll stays open while the gate is closed: the runner learns from the acknowledgement of a version that this worker serves it,
        and answers with groups of that version. A poll is never cancelled: leases on their way would belong to nobody until they end.
        """
        poll = self._start_poll(max_groups)
        while not poll.done():
            self._changed.clear()
            if not self._groups and self._room() > max_groups:
                # The poll was sent while groups were in flight and would bring fewer than fit now. The runner answers it with nothing when a
                # newer one comes.
                max_groups = self._room()
                poll = self._start_poll(max_groups)
            change = asyncio.ensure_future(self._changed.wait())
            try:
                with self._idle():
                    await asyncio.wait({poll, change}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                change.cancel()
        return poll.result()

    def _start_poll(self, max_groups: int) -> asyncio.Task[bool]:
        poll = asyncio.ensure_future(self._poll(max_groups))
        self._polls.add(poll)
        poll.add_done_callback(self._polls.discard)
        return poll

    def _idle(self) -> AbstractContextManager[None]:
        """Declare what an idle worker waits for."""
        if self._groups:
            return nullcontext()
        if self._gate.is_set():
            return self._waiting("prompts", "ledger", None)
        return self._waiting("weights", "actor", WaitCause.WEIGHTS)

    async def _poll(self, max_groups: int) -> bool:
        """Start the groups that the runner leases; return False when it failed, or had none long before the poll's time was up."""
        start = self._clock()
        try:
            leases = await self._leases.lease_groups(max_groups, POLL_SECONDS, self._version())
        except RLJobError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.warning("no group can be leased, trying again: %s", error)
            return False
        self._complaint = ""
        num_started = 0
        for lease in leases:
            if not self._gate.is_set() or lease.policy_version != self._version():
                self._return_group(lease, "stale", "its weights are not those that are served")
            else:  # also beyond the row limit, where the answers to an older and a newer poll crossed: the engine queues it
                self._begin(lease)
                num_started += 1
        if num_started or self._clock() - start >= POLL_SECONDS / 2:
            self._refusals = 0
            return True
        return False

    # --- groups ------------------------------------------------------------------------------------------------------

    def _begin(self, lease: PromptLease) -> None:
        self._rows += lease.num_generations
        task = asyncio.ensure_future(self._serve_group(lease))
        self._groups[lease.token] = _Group(lease, task)
        self._renewal.hold(lease)
        task.add_done_callback(lambda _: self._ended(lease.token))

    def _ended(self, token: str) -> None:
        group = self._groups.pop(token)
        self._rows -= group.lease.num_generations
        self._renewal.drop(token)
        self._changed.set()
        if group.task.cancelled() and group.current:
            self._return_group(group.lease, "stale", "the rollout stopped before the group ended")

    async def _serve_group(self, lease: PromptLease) -> None:
        start = self._clock()
        try:
            record = await self._generate(lease)
        except Exception as error:  # noqa: BLE001 - task boundary: whatever failed is reported, never trained on
            if isinstance(error, RolloutConfigError):
                self._return_group(lease, "config", text_of(error))
                return
            reason: RequeueReason = classify_failure(error).value
            message = f"{type(error).__name__}: {text_of(error)}"
            # What a lost process of the job leaves explains nothing; what a server of NeMo-Gym that fails was asked does.
            explains = reason != "infrastructure" or isinstance(error, GymTransportError)
            failed = failed_sample(error, lease, message) if explains else None
            self._return_group(lease, reason, message, failed)
            return
        times, record.times = record.times, None
        if times is not None:
            times.given, times.began, times.sent = lease.given, start, self._clock()
        try:
            await self._report(lease, record, times)
        except Exception as error:  # noqa: BLE001 - task boundary, as above
            # RLJobError: the channel's fault. Any other TypeError or ValueError: the record cannot be encoded, also not if made again.
            broken = isinstance(error, TypeError | ValueError) and not isinstance(error, RLJobError)
            problem = "cannot be sent" if broken else "could not be delivered"
            self._return_group(lease, "data" if broken else "infrastructure", f"the record {problem}: {text_of(error)}")
        else:
            self.groups_done += 1

    async def _report(self, lease: PromptLease, record: PromptGroupRecord, times: GroupTimes | None) -> None:
        """Store the record of a group and inform the runner; or send the scores of a validation group."""
        if lease.mode == "validate":
            await self._validation.put_async(scores(lease, record, kept=lease.order < self._kept_prompts))
            return
        self._groups[lease.token].reporting = True
        record.lease_token, record.order = lease.token, lease.order
        with self._waiting("room for its record", "trajectories", WaitCause.CHANNEL_FULL):
            await self._trajectories.put_async(record, key=lease.token)
        if times is not None:
            times.stored = self._clock()
        await self._finish(lease, group_entry(record, min_std=self._min_std, times=times))

    async def _finish(self, lease: PromptLease, entry: GroupEntry) -> None:
        """Inform the runner that a record is stored. The call is repeated until the runner answers or the lease is lost."""
        pause = FIRST_PAUSE_S
        while True:
            try:
                return await self._leases.finish(entry)
            except RLJobError as error:
                if not self._groups[lease.token].current:
                    return
                logger.warning(
                    "group %s is finished, but the runner does not hear of it yet: %s", lease.group_id, error
                )
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE_S, 2 * pause)

    def _disown(self, token: str) -> None:
        """Cancel a group whose lease the runner no longer counts, unless its record is being stored: the runner then discards it."""
        group = self._groups.get(token)
        if group is not None:
            logger.info("group %s is dropped, its lease is no longer current", group.lease.group_id)
            group.current = False
            if not group.reporting:
                group.task.cancel()

    # --- giving back -------------------------------------------------------------------------------------------------

    def _return_group(
        self, lease: PromptLease, reason: RequeueReason, message: str, failed: KeptSample | None = None
    ) -> None:
        """Return an unfinished group to the runner in the background, so that its rows are free at once."""
        self._renewal.drop(lease.token)
        task = asyncio.ensure_future(self._send_return(lease, reason, message, failed))
        self._returns.add(task)
        task.add_done_callback(self._returns.discard)

    async def _send_return(
        self, lease: PromptLease, reason: RequeueReason, message: str, failed: KeptSample | None
    ) -> None:
        try:
            await self._leases.return_group(lease.token, reason, message, failed)
        except RLJobError as error:
            logger.warning("group %s cannot be given back, its lease ends by itself: %s", lease.group_id, error)

    async def _return_all(self) -> None:
        groups = {group.task for group in self._groups.values()}
        for task in groups:
            task.cancel()
        if groups:
            await asyncio.wait(groups)
        if self._returns:
            await asyncio.wait(set(self._returns), timeout=RETURN_SECONDS)


def scores(lease: PromptLease, record: PromptGroupRecord, *, kept: bool = False) -> ValidationScores:
    """Return what the runner receives for a validation group; the reward of a masked sample is None. `kept`: with its samples."""
    completions = record.completions
    return ValidationScores(
        group_id=lease.group_id,
        token=lease.token,
        rewards=tuple(None if math.isnan(completion.reward) else completion.reward for completion in completions),
        lengths=tuple(int(completion.metrics["gen_tokens"]) for completion in completions),
        truncated=tuple(completion.truncated for completion in completions),
        samples=tuple(keep_sample(record, index, group_id=lease.group_id) for index in range(len(completions) * kept)),
    )


def group_entry(record: PromptGroupRecord, *, min_std: float | None, times: GroupTimes | None = None) -> GroupEntry:
    """Return what the runner needs to decide about a finished group: versions, tokens, raw rewards, informative or not.

    `min_std`: standard deviation of the rewards above which a group is informative; None: dynamic sampling is off and every group is.
    """
    completions = record.completions
    versions = [version for completion in completions for version in completion.policy_versions]
    if times is not None:
        times.versions = [completion.policy_versions for completion in completions]
    return GroupEntry(
        group_id=record.group_id,
        token=record.lease_token,
        v_min=min(versions, default=record.start_version),
        v_max=max(versions, default=record.end_version),
        rewards=tuple(float(completion.reward) for completion in completions),
        tokens=sum(_generated_tokens(completion) for completion in completions),
        informative=min_std is None or _is_informative(record, min_std),
        times=times,
    )


def _is_informative(record: PromptGroupRecord, min_std: float) -> bool:
    rewards = torch.tensor([completion.reward for completion in record.completions], dtype=torch.float32)
    may_train = [not has_failed(completion) and completion.loss_multiplier != 0 for completion in record.completions]
    valid = torch.tensor(may_train) & rewards.isfinite()
    groups = torch.zeros(len(rewards), dtype=torch.int64)
    return bool(informative_groups(rewards, groups, valid=valid, min_std=min_std).any())


def _generated_tokens(completion: Completion) -> int:
    logprobs = [message.get("generation_logprobs") for message in completion.message_log]
    return sum(len(part) for part in logprobs if part is not None)
