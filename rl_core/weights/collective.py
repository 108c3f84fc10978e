"""Weights over a process group (gloo on CPUs, NCCL between GPUs): the publisher broadcasts bucket by bucket.

The group exists as long as its members do. If a member is lost, no broadcast can finish; the publisher then aborts the group at every
member (RPC `weights_abort`), offers the version to the remaining members again, and forms a new group (the next generation) with them.
"""

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rl_core.api.errors import InfrastructureError
from rl_core.collective.group import GroupStore, TensorGroup
from rl_core.messages.weights import GroupPlan, GroupSource, WeightTransfer
from rl_core.weights.bucket import Bucket, Layout
from rl_core.weights.handshake import Handshake
from rl_core.weights.host_copy import HostCopy

NAME = "weights"
ABORT_SECONDS = 5.0
"""Seconds to wait for a member's answer to an abort. The answer is not used."""


class GroupSender:
    """The publisher's end, rank 0 of every generation. Methods run on the publisher's event loop, except `_cast`, which runs in a thread."""

    def __init__(self, *, host: str, epoch: int, backend: str, device: str, timeout: float) -> None:
        """`timeout`: seconds for forming the group and for each bucket. `device`: device from which NCCL sends."""
        self._host, self._epoch, self._backend, self._device, self._timeout = host, epoch, backend, device, timeout
        self._store: GroupStore | None = None
        self._plan: GroupPlan | None = None
        self._group: TensorGroup | None = None
        self._generation = 0
        self._aborting: asyncio.Future[None] | None = None
        """Task of the last abort. A reference is kept because the event loop keeps none."""

    async def send(self, copy: HostCopy, handshakes: Sequence[Handshake], timeout: float) -> None:
        """Broadcast to the READY `handshakes`, which become APPLIED. Those that are still READY afterwards must be offered the version again."""
        plan = self._plan_for(handshakes)
        casting = asyncio.ensure_future(asyncio.to_thread(self._cast, plan, copy))
        transfers: dict[asyncio.Future[Any], Handshake] = {}
        for rank, handshake in enumerate(handshakes, start=1):
            message = WeightTransfer(digest=copy.manifest.digest, source=GroupSource(plan=plan, rank=rank))
            transfers[asyncio.ensure_future(handshake.transfer(message, timeout))] = handshake
        pending: set[asyncio.Future[Any]] = {casting, *transfers}
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            reason = next((text for one in done if (text := self._broken(one, transfers))), "")
            if reason and self._plan is plan:
                self._abort(plan, reason)
                left = [handshake for task, handshake in transfers.items() if task in pending]
                self._aborting = asyncio.ensure_future(self._send_aborts(plan, left))

    def _broken(self, done: "asyncio.Future[Any]", transfers: Mapping["asyncio.Future[Any]", Handshake]) -> str:
        """Return why the group cannot be used after `done`, or ""."""
        handshake = transfers.get(done)
        if handshake is None:
            error = done.exception()
            return f"{error}" if error is not None else ""
        done.result()
        if handshake.applied or handshake.verification_failed:
            return ""
        return f"{handshake.name}: {handshake.reason}"

    def _plan_for(self, handshakes: Sequence[Handshake]) -> GroupPlan:
        members = ("publisher", *(handshake.name for handshake in handshakes))
        held = {handshake.ready.group for handshake in handshakes if handshake.ready is not None}
        whole = self._group is not None and not self._group.poisoned
        if self._plan is None or self._plan.members != members or held != {self._plan.key} or not whole:
            if self._store is None:
                self._store = GroupStore(self._host)
            if self._group is not None:
                self._group.close()
            self._generation += 1
            self._group = None
            self._plan = GroupPlan(
                name=NAME,
                epoch=self._epoch,
                generation=self._generation,
                members=members,
                backend=self._backend,
                host=self._store.host,
                port=self._store.port,
            )
        return self._plan

    def _abort(self, plan: GroupPlan, reason: str) -> None:
        if self._store is not None:
            self._store.release(plan)
        if self._group is not None:
            self._group.abort(reason)
        self._plan = self._group = None

    async def _send_aborts(self, plan: GroupPlan, handshakes: Sequence[Handshake]) -> None:
        calls = [
            handshake.client.call("weights_abort", plan.generation, timeout=ABORT_SECONDS) for handshake in handshakes
        ]
        await asyncio.gather(*calls, return_exceptions=True)

    def _cast(self, plan: GroupPlan, copy: HostCopy) -> None:
        group = self._group
        if group is None:
            group = TensorGroup.form(plan, 0, timeout=self._timeout)
            if self._plan is not plan:
                group.abort("a member was lost while it formed")
                raise InfrastructureError(f"group {plan.key} is over before its first broadcast")
            self._group = group
        for _, tensor in copy.buckets(self._device):
            group.broadcast(tensor, timeout=self._timeout)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()


class GroupReceiver:
    """A receiver's end. `buckets` runs in the receiver's thread; `abort` may be called from any thread."""

    def __init__(self, *, timeout: float) -> None:
        """`timeout`: seconds for forming the group and for each bucket."""
        self._timeout = timeout
        self._group: TensorGroup | None = None
        self._aborted: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        """Guards `_group` and `_aborted`: an abort that arrives while the group forms must end the group once it is formed."""

    @property
    def key(self) -> str:
        """Return the key of the group if it is formed and not known to be broken, else ""."""
        return self._group.plan.key if self._group is not None and not self._group.poisoned else ""

    @property
    def broken(self) -> bool:
        """Return whether the last transfer failed because of the group and not because of this receiver."""
        return self._group is None or bool(self._group.poisoned)

    def buckets(self, source: GroupSource, layout: Layout, *, device: str) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yield the buckets as they arrive. The next bucket is received while the caller processes the current one.

        Each bucket has its own memory, because an aborted broadcast may still write to the last one.
        """
        group = self._join(source.plan, source.rank)

        def receive(bucket: Bucket) -> tuple[Bucket, torch.Tensor]:
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
            group.broadcast(buffer, timeout=self._timeout)
            return bucket, buffer

        with ThreadPoolExecutor(1, thread_name_prefix="rljob-weights-group") as thread:
            coming = [thread.submit(receive, bucket) for bucket in layout.buckets[:1]]
            for bucket in layout.buckets[1:]:
                arrived = coming.pop().result()
                coming.append(thread.submit(receive, bucket))
                yield arrived
            yield coming.pop().result()

    def _join(self, plan: GroupPlan, rank: int) -> TensorGroup:
        group = self._group
        if group is not None and group.plan == plan and not group.poisoned:
            return group
        if group is not None:
            group.close()
        self._group = None
        group = TensorGroup.form(plan, rank, timeout=self._timeout)
        with self._lock:
            self._group = group
            if (plan.epoch, plan.generation) in self._aborted:
                group.abort("a member was lost while it formed")
        return group

    def abort(self, epoch: int, generation: int, reason: str) -> None:
        """Abort the group of that generation, even if it is still being formed."""
        with self._lock:
            self._aborted.add((epoch, generation))
            if self._group is not None and (self._group.plan.epoch, self._group.plan.generation) == (epoch, generation):
                self._group.abort(reason)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
