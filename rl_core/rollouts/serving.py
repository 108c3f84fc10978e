"""The loop of a rollout worker: lease groups from the runner, run them, deliver records, give back what cannot be done.

    runner --lease_groups--> run(lease) --record--> trajectories         (validation: scores --> validation)
    runner <---delivered-------- the record is with the data ranks (asynchronous runs)
    runner <---give_back-------- failed, or stopped before its end

Groups are asked for only while the gate is open, which the worker does between COMMIT of a version and the next OFFER, and
only as many as the engine has rows for: those that come together start together. Everything here runs on one event loop.
Nothing is raised: a group ends as a record, as given back, or unanswered because the runner counts its lease no longer.
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

from rl_core.api.errors import RLJobError, text_of
from rl_core.api.records import PromptGroupRecord
from rl_core.messages.groups import PromptLease, RequeueReason, ValidationScores
from rl_core.rollouts.leases import LeaseSource, Renewal
from rl_core.rollouts.retry import classify_failure

if TYPE_CHECKING:
    from rl_core.channel import Channel

logger = logging.getLogger(__name__)
POLL_SECONDS = 20.0
"""How long the runner may hold a question for groups that it cannot answer yet."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
"""Pauses before asking again a runner that failed, or refused at once; each is twice as long as the one before."""
GATHER_S = 0.005
"""How long a question waits for further groups to end while some run: those that end together are asked for together."""
RETURN_SECONDS = 1.0
"""How long a stop waits for groups to be given back; a lease that cannot be given back ends by itself."""


@dataclass(slots=True)
class _Group:
    """One leased group that runs."""

    lease: PromptLease
    task: asyncio.Task[None]
    current: bool = True
    """Whether the runner still counts the lease; one that it does not is not given back."""


class PromptServer:
    """Serves prompt groups with `run`. STOPPED -> started (gate closed) -> serving <-> paused -> stopped."""

    def __init__(
        self,
        run: Callable[[PromptLease], Awaitable[PromptGroupRecord]],
        source: LeaseSource,
        *,
        row_limit: Callable[[], int],
        group_rows: int,
        version: Callable[[], int],
        waiting: Callable[[str, str], AbstractContextManager[None]],
        records_wait: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`run` makes the record of a lease that `source` gave.

        `row_limit` is the number of rows in flight at which leasing stops, `group_rows` what a group is expected to have;
        `version` is that of the served weights; `waiting(what, on)` declares a wait. `records_wait`: a record may lie with the data
        ranks for longer than its lease runs, so the runner is told of each.
        """
        self._run = run
        self._source = source
        self._row_limit = row_limit
        self._group_rows = group_rows
        self._version = version
        self._waiting = waiting
        self._records_wait = records_wait
        self._clock = clock
        self._renewal = Renewal(source, self._disown)
        self._gate = asyncio.Event()
        self._changed = asyncio.Event()
        """Set when a group ends and when the gate moves."""
        self._rows = 0
        self._groups: dict[str, _Group] = {}
        """Groups that run, by token."""
        self._polls: set[asyncio.Task[bool]] = set()
        """Questions whose answer may be on its way, that of a stopped loop included."""
        self._returns: set[asyncio.Task[None]] = set()
        self._loop_task: asyncio.Task[None] | None = None
        self._refusals = 0
        """Polls in a row that brought nothing, too early."""
        self._complaint = ""
        """The last failure of a poll, so that the same one is logged once."""
        self.groups_done = 0

    @property
    def groups_in_flight(self) -> int:
        """Return the number of groups leased and not delivered."""
        return len(self._groups)

    def start(self, trajectories: Channel, validation: Channel) -> None:
        """Deliver to these channels from now on; while the gate is closed nothing is leased."""
        if self._loop_task is None or self._loop_task.done():
            self._trajectories, self._validation = trajectories, validation
            self._loop_task = asyncio.ensure_future(self._serve())

    def open(self) -> None:
        """Lease groups: the weights are proven."""
        if not self._gate.is_set():
            self._refusals = 0
            self._gate.set()
            self._changed.set()

    def close(self) -> None:
        """Lease no more groups; those in flight go on, and those that a late answer brings are given back."""
        if self._gate.is_set():
            self._gate.clear()
            self._changed.set()

    async def pause(self, seconds: float | None) -> None:
        """Close, and wait until nothing is in flight; what has not ended after `seconds` is given back.

        None = wait without a bound; whoever awaits this sets one.
        """
        self.close()
        if self._groups:
            await asyncio.wait({group.task for group in self._groups.values()}, timeout=seconds)
        if self._groups:
            names = ", ".join(group.lease.group_id for group in self._groups.values())
            logger.warning("groups %s did not end in %s s; given back", names, seconds)
            await self._give_all_back()

    async def stop(self) -> None:
        """Give everything in flight back and end the loop."""
        self.close()
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait({self._loop_task})
            self._loop_task = None
        await self._give_all_back()
        self._renewal.close()

    def drop(self, tokens: Iterable[str]) -> None:
        """End the groups of leases that the runner counts no longer; one that has ended is ignored."""
        for token in tokens:
            self._disown(token)

    # --- asking ------------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            self._changed.clear()
            if not self._gate.is_set():
                with self._waiting("weights", "actor"):
                    await self._gate.wait()
                continue  # it may have closed again before this loop woke up
            if self._groups and self._room():
                await asyncio.sleep(GATHER_S)
            want = self._room()
            if not want:
                await self._changed.wait()
            elif not await self._ask(want):
                pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._refusals)
                self._refusals += 1
                # Not wait_for: before Python 3.12 it swallows a cancellation that comes together with the event.
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._changed.wait()

    def _room(self) -> int:
        """Return the groups that fit beside those that run; one fits always where none runs."""
        free = -(-(self._row_limit() - self._rows) // self._group_rows)
        return max(free, 0 if self._groups else 1)

    async def _ask(self, want: int) -> bool:
        """Ask once and wait for the answer; return whether to ask again without a pause.

        The question stays open while the gate is closed: the runner knows which version this worker serves by its acknowledgement, so
        the groups of the next version come as its answer. It is never cancelled: leases that are on their way would belong to nobody
        until they end.
        """
        poll = self._start_poll(want)
        while not poll.done():
            self._changed.clear()
            if not self._groups and self._room() > want:
                # Asked while groups ran, it would bring fewer than fit now; the runner answers it with nothing when a newer one comes.
                want = self._room()
                poll = self._start_poll(want)
            change = asyncio.ensure_future(self._changed.wait())
            try:
                with self._idle():
                    await asyncio.wait({poll, change}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                change.cancel()
        return poll.result()

    def _start_poll(self, want: int) -> asyncio.Task[bool]:
        poll = asyncio.ensure_future(self._poll(want))
        self._polls.add(poll)
        poll.add_done_callback(self._polls.discard)
        return poll

    def _idle(self) -> AbstractContextManager[None]:
        """Declare what an idle worker waits for."""
        if self._groups:
            return nullcontext()
        return self._waiting("prompts", "ledger") if self._gate.is_set() else self._waiting("weights", "actor")

    async def _poll(self, want: int) -> bool:
        """Begin the groups that the runner gives; return False when it failed, or gave nothing sooner than it should."""
        began = self._clock()
        try:
            leases = await self._source.lease_groups(want, POLL_SECONDS, self._version())
        except RLJobError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.warning("no group can be leased, asking again: %s", error)
            return False
        self._complaint = ""
        begun = 0
        for lease in leases:
            if not self._gate.is_set() or lease.policy_version != self._version():
                self._give_back(lease, "stale", "its weights are not those that are served")
            else:  # also beyond the row limit, where the answers to an older and a newer question crossed: the engine queues it
                self._begin(lease)
                begun += 1
        if begun or self._clock() - began >= POLL_SECONDS / 2:
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
            self._give_back(group.lease, "stale", "the rollout stopped before the group ended")

    async def _serve_group(self, lease: PromptLease) -> None:
        began = self._clock()
        try:
            record = await self._run(lease)
        except Exception as error:  # noqa: BLE001 - task boundary: whatever failed is reported, never trained on
            reason: RequeueReason = classify_failure(error).value
            self._give_back(lease, reason, f"{type(error).__name__}: {text_of(error)}")
            return
        try:
            if record.times is not None:
                record.times.given, record.times.began, record.times.sent = lease.given, began, self._clock()
            await self._deliver(lease, record)
        except Exception as error:  # noqa: BLE001 - task boundary, as above
            # RLJobError: the channel's fault. Any other TypeError or ValueError: the record cannot be encoded, also not if made again.
            broken = isinstance(error, TypeError | ValueError) and not isinstance(error, RLJobError)
            what = "cannot be sent" if broken else "could not be delivered"
            self._give_back(lease, "data" if broken else "infrastructure", f"the record {what}: {text_of(error)}")
        else:
            self.groups_done += 1

    async def _deliver(self, lease: PromptLease, record: PromptGroupRecord) -> None:
        if lease.mode == "validate":
            await self._validation.put_async(scores(lease, record))
        else:
            record.lease_token, record.order = lease.token, lease.order
            await self._trajectories.put_async(record)
            if self._records_wait:
                await self._tell(lease)

    async def _tell(self, lease: PromptLease) -> None:
        """Tell the runner of a record that is delivered. Where it does not hear of it, the lease ends and the group is made again."""
        try:
            await self._source.delivered(lease.token)
        except RLJobError as error:
            logger.warning("group %s is delivered, but the runner does not know: %s", lease.group_id, error)

    def _disown(self, token: str) -> None:
        """End a group whose lease the runner counts no longer: its record would be refused."""
        group = self._groups.get(token)
        if group is not None:
            logger.info("group %s is dropped, its lease is no longer current", group.lease.group_id)
            group.current = False
            group.task.cancel()

    # --- giving back -------------------------------------------------------------------------------------------------

    def _give_back(self, lease: PromptLease, reason: RequeueReason, message: str) -> None:
        """Return a lease in the background, so that its rows are free at once."""
        self._renewal.drop(lease.token)
        task = asyncio.ensure_future(self._return(lease, reason, message))
        self._returns.add(task)
        task.add_done_callback(self._returns.discard)

    async def _return(self, lease: PromptLease, reason: RequeueReason, message: str) -> None:
        try:
            await self._source.give_back(lease.token, reason, message)
        except RLJobError as error:
            logger.warning("group %s cannot be given back, its lease ends by itself: %s", lease.group_id, error)

    async def _give_all_back(self) -> None:
        groups = {group.task for group in self._groups.values()}
        for task in groups:
            task.cancel()
        if groups:
            await asyncio.wait(groups)
        if self._returns:
            await asyncio.wait(set(self._returns), timeout=RETURN_SECONDS)


def scores(lease: PromptLease, record: PromptGroupRecord) -> ValidationScores:
    """Return what the runner gets for a validation group; the reward of a masked sample is None."""
    completions = record.completions
    return ValidationScores(
        group_id=lease.group_id,
        token=lease.token,
        rewards=tuple(None if math.isnan(one.reward) else one.reward for one in completions),
        lengths=tuple(int(one.metrics["gen_tokens"]) for one in completions),
        truncated=tuple(one.truncated for one in completions),
    )
