"""The loop of a rollout worker: lease prompts, run them, deliver records, return what cannot be done.

    prompts --lease--> run(item) --record--> trajectories, with the ack    (validation: scores --> validation, with the ack)
                          \\--failed--> give_back to the runner, then ack

Prompts are leased only while the gate is open, which the worker does between COMMIT of a version and the next OFFER, and
only as many as the engine has rows for: those that lie there come together and start together. Everything here runs on one
event loop. Nothing is raised: a group ends as a record, as given back, or as returned to its channel.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from rl_core.api.errors import ChannelClosed, DeadlineExceeded, RLJobError, text_of
from rl_core.api.records import PromptGroupRecord
from rl_core.rollouts.retry import FailureKind, classify_failure

if TYPE_CHECKING:
    from rl_core.channel import Channel, Delivery

logger = logging.getLogger(__name__)
TOO_NEW_DELAY_S = 0.2
"""Pause before leasing again after a prompt for weights that this worker does not have yet."""
RETURN_SECONDS = 1.0
"""Bound of handing a lease back; the channel takes it back by itself when that fails."""
RETRY_SECONDS = 1.0


class PromptServer:
    """Serves prompt groups with `run`. STOPPED -> started (gate closed) -> serving <-> paused -> stopped."""

    def __init__(
        self,
        run: Callable[[Mapping[str, Any]], Awaitable[PromptGroupRecord]],
        *,
        give_back: Callable[[str, str, str, str], Awaitable[Any]],
        row_limit: Callable[[], int],
        group_rows: int,
        version: Callable[[], int],
        waiting: Callable[[str, str], AbstractContextManager[None]],
    ) -> None:
        """`run` makes the record of an item; `give_back(group_id, lease_token, reason, message)` tells the runner of a failure.

        `row_limit` is the number of rows in flight at which leasing stops, `group_rows` what a group is expected to have;
        `waiting(what, on)` declares a wait.
        """
        self._run = run
        self._give_back = give_back
        self._row_limit = row_limit
        self._group_rows = group_rows
        self._version = version
        self._waiting = waiting
        self._gate = asyncio.Event()
        self._room = asyncio.Event()
        self._rows = 0
        self._groups: dict[asyncio.Task[None], str] = {}
        self._lease: asyncio.Task[list[Delivery]] | None = None
        """What waits for prompts."""
        self._asked = 0
        """Prompts that it takes at most."""
        self._loop_task: asyncio.Task[None] | None = None
        self._complaint = ""
        """Why the channel gave nothing, so that leases which fail together are told once."""
        self.groups_done = 0

    @property
    def groups_in_flight(self) -> int:
        """Return the number of groups leased and not delivered."""
        return len(self._groups)

    def start(self, prompts: Channel, trajectories: Channel, validation: Channel) -> None:
        """Serve these channels from now on; while the gate is closed nothing is leased."""
        if self._loop_task is None or self._loop_task.done():
            self._trajectories, self._validation = trajectories, validation
            self._loop_task = asyncio.ensure_future(self._serve(prompts))

    def open(self) -> None:
        """Lease prompts: the weights are proven."""
        self._gate.set()

    def close(self) -> None:
        """Lease no more prompts; those in flight go on."""
        self._gate.clear()
        if self._lease is not None:
            self._lease.cancel()

    async def pause(self, seconds: float | None) -> None:
        """Close, and wait until nothing is in flight; what has not ended after `seconds` goes back to its channel.

        None = wait without a bound; whoever awaits this sets one.
        """
        self.close()
        if self._groups:
            await asyncio.wait(set(self._groups), timeout=seconds)
        if self._groups:
            logger.warning("groups %s did not end in %s s; returned", ", ".join(self._groups.values()), seconds)
            await self._cancel_groups()

    async def stop(self) -> None:
        """Return everything in flight to its channel and end the loop."""
        self.close()
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait({self._loop_task})
            self._loop_task = None
        await self._return_lease()
        await self._cancel_groups()

    async def _return_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is None:
            return
        await asyncio.wait({lease})
        if not lease.cancelled() and lease.exception() is None:
            for delivery in lease.result():
                await _quietly(delivery.nack_async())

    async def _cancel_groups(self) -> None:
        groups = set(self._groups)
        for task in groups:
            task.cancel()
        if groups:
            await asyncio.wait(groups)

    async def _serve(self, prompts: Channel) -> None:
        while True:
            if not self._gate.is_set():
                with self._waiting("weights", "actor"):
                    await self._gate.wait()
            self._room.clear()
            self._ask(prompts)
            room = asyncio.ensure_future(self._room.wait())
            try:
                with nullcontext() if self._groups else self._waiting("prompts", "channel:prompts"):
                    await asyncio.wait({room, *filter(None, [self._lease])}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                room.cancel()
            if self._lease is not None and self._lease.done():
                lease, self._lease = self._lease, None
                if not lease.cancelled():
                    await asyncio.sleep(await self._take_up(lease))

    def _ask(self, prompts: Channel) -> None:
        """Have one lease under way, for as many prompts as fit; one that asks for more than that by now is taken back."""
        room = -(-(self._row_limit() - self._rows) // self._group_rows)
        wanted = max(room, 0 if self._groups else 1)
        if self._lease is not None and wanted < self._asked:
            self._lease.cancel()
        elif self._lease is None and wanted:
            self._asked = wanted
            self._lease = asyncio.ensure_future(prompts.lease_many_async(wanted))

    async def _take_up(self, lease: asyncio.Task[list[Delivery]]) -> float:
        """Begin the groups of a lease; return the seconds to leave the channel alone, for what it gave instead."""
        try:
            deliveries = lease.result()
        except DeadlineExceeded:
            return 0.0
        except ChannelClosed:
            logger.info("the prompts channel is closed")
            await asyncio.Event().wait()
        except RLJobError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.warning("no prompt can be leased: %s", error)
            return RETRY_SECONDS
        self._complaint = ""
        returned = []
        for delivery in deliveries:
            if self._gate.is_set() and delivery.item["policy_version"] <= self._version():
                self._begin(delivery)
            else:
                returned.append(_quietly(delivery.nack_async()))
        await asyncio.gather(*returned)
        return TOO_NEW_DELAY_S if returned and self._gate.is_set() else 0.0

    def _begin(self, delivery: Delivery) -> None:
        rows = int(delivery.item["num_generations"])
        self._rows += rows
        task = asyncio.ensure_future(self._group(delivery))
        self._groups[task] = delivery.item["group_id"]

        def ended(_: Any) -> None:
            del self._groups[task]
            self._rows -= rows
            self._room.set()

        task.add_done_callback(ended)

    async def _group(self, delivery: Delivery) -> None:
        try:
            await self._answer(delivery)
            self.groups_done += 1
        except asyncio.CancelledError:
            await _quietly(delivery.nack_async())
            raise
        except Exception:
            logger.exception("group %s could not be delivered; returned", delivery.item["group_id"])
            await _quietly(delivery.nack_async())

    async def _answer(self, delivery: Delivery) -> None:
        """Run the group and tell the result, which ends its lease."""
        item: Mapping[str, Any] = delivery.item
        training = item["mode"] == "train"
        try:
            record = await self._run(item)
        except Exception as error:  # noqa: BLE001 - task boundary: whatever failed is told, never trained on
            text = f"{type(error).__name__}: {text_of(error)}"
            if training:
                reason = classify_failure(error).value
                await self._give_back(item["group_id"], item["lease_token"], reason, text)
                await delivery.ack_async()
            else:
                await self._validation.put_async(scores(item, None, error=text), ack=delivery)
            return
        if not training:
            await self._validation.put_async(scores(item, record, error=None), ack=delivery)
            return
        record.lease_token = item["lease_token"]
        try:
            await self._trajectories.put_async(record, ack=delivery)
        except (TypeError, ValueError) as error:
            if isinstance(
                error, RLJobError
            ):  # of the channel; what is left is of the record, which no message can hold
                raise
            text = f"the record cannot be sent: {text_of(error)}"
            await self._give_back(item["group_id"], item["lease_token"], FailureKind.DATA.value, text)
            await delivery.ack_async()


def scores(item: Mapping[str, Any], record: PromptGroupRecord | None, *, error: str | None) -> dict[str, Any]:
    """Return what the runner gets for a validation prompt; the reward of a masked sample is None."""
    completions = record.completions if record is not None else []
    return {
        "group_id": item["group_id"],
        "prompt_idx": item["sample"]["idx"],
        "rewards": [None if math.isnan(one.reward) else one.reward for one in completions],
        "lengths": [int(one.metrics["gen_tokens"]) for one in completions],
        "truncated": [one.truncated for one in completions],
        "error": error,
    }


async def _quietly(call: Awaitable[Any]) -> None:
    """Await a hand-back within its bound; a channel that is gone takes everything back by itself."""
    with suppress(RLJobError, TimeoutError):
        await asyncio.wait_for(call, RETURN_SECONDS)
