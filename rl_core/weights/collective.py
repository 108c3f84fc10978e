"""Weights over a process group (gloo on CPUs, NCCL between GPUs): the publisher broadcasts bucket by bucket.

Its members are the publisher and the processes that hold the weights: the receiver's own process, or each process of its engine. The group
exists as long as its members do. If a member is lost, no broadcast can finish. The publisher then marks the group as released in the store
of the group, which waiting members check regularly. It offers the version to the remaining receivers again, and forms a new group (the next
generation).
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rl_core.api.errors import InfrastructureError
from rl_core.collective.group import GroupStore, TensorGroup
from rl_core.messages.weights import GroupPlan, GroupSource, WeightTransfer
from rl_core.weights.bucket import Bucket, Layout
from rl_core.weights.device_buffer import DeviceBuffer
from rl_core.weights.handshake import Handshake
from rl_core.weights.host_copy import HostCopy

NAME = "weights"


class GroupSender:
    """The publisher's end, rank 0 of every generation. Methods run on the publisher's event loop, except `_broadcast`, which runs in a thread."""

    def __init__(
        self, *, host: str, epoch: int, backend: str, device: str, timeout: float, device_buffer: DeviceBuffer | None
    ) -> None:
        """`timeout`: seconds for forming the group and for each bucket. `device`: device from which NCCL sends.

        `device_buffer`: copy of the version on that device. If it is None or empty, the host copy is sent.
        """
        self._device_buffer = device_buffer
        self._host, self._epoch, self._backend, self._device, self._timeout = host, epoch, backend, device, timeout
        self._store: GroupStore | None = None
        self._plan: GroupPlan | None = None
        self._group: TensorGroup | None = None
        self._generation = 0

    async def send(self, copy: HostCopy, handshakes: Sequence[Handshake], timeout: float) -> None:
        """Broadcast to the READY `handshakes`, which become APPLIED. Those that are still READY afterwards must be offered the version again."""
        plan = self._plan_for(handshakes)
        broadcast = asyncio.ensure_future(asyncio.to_thread(self._broadcast, plan, copy))
        transfers: dict[asyncio.Future[Any], Handshake] = {}
        rank = 1
        for handshake in handshakes:
            message = WeightTransfer(digest=copy.manifest.digest, source=GroupSource(plan=plan, rank=rank))
            transfers[asyncio.ensure_future(handshake.transfer(message, timeout))] = handshake
            rank += _ranks(handshake)
        pending: set[asyncio.Future[Any]] = {broadcast, *transfers}
        while pending:
            completed, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            reason = next((text for future in completed if (text := self._broken(future, transfers))), "")
            if reason and self._plan is plan:
                self._abort(plan, reason)

    def _broken(self, completed: "asyncio.Future[Any]", transfers: Mapping["asyncio.Future[Any]", Handshake]) -> str:
        """Return the reason why the process group must be aborted, or "" if it can be used further.

        `completed` is either the broadcast or one receiver's answer to the transfer, which is a key of `transfers`.
        """
        handshake = transfers.get(completed)
        if handshake is None:
            error = completed.exception()
            return f"{error}" if error is not None else ""
        completed.result()
        if handshake.applied or handshake.verification_failed:
            return ""
        return f"{handshake.name}: {handshake.reason}"

    def _plan_for(self, handshakes: Sequence[Handshake]) -> GroupPlan:
        members = ("publisher", *(name for handshake in handshakes for name in [handshake.name] * _ranks(handshake)))
        group_keys = {handshake.ready.group for handshake in handshakes if handshake.ready is not None}
        usable = self._group is not None and not self._group.poisoned
        if self._plan is None or self._plan.members != members or group_keys != {self._plan.key} or not usable:
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

    def _broadcast(self, plan: GroupPlan, copy: HostCopy) -> None:
        group = self._group
        if group is None:
            group = TensorGroup.form(plan, 0, timeout=self._timeout)
            if self._plan is not plan:
                group.abort("a member was lost while it formed")
                raise InfrastructureError(f"group {plan.key} is over before its first broadcast")
            self._group = group
        buffer = self._device_buffer
        buckets = (
            copy.buckets(self._device) if buffer is None or not buffer.is_allocated else buffer.buckets(copy.layout)
        )
        for _, tensor in buckets:
            group.broadcast(tensor, timeout=self._timeout)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()


def _ranks(handshake: Handshake) -> int:
    """Return the number of members that a receiver has in the group: one, or one for each process of its engine."""
    return len(handshake.ready.devices) if handshake.ready is not None else 1


class GroupReceiver:
    """The receiving end of one member of the group. Used by one thread."""

    def __init__(self, *, timeout: float) -> None:
        """`timeout`: seconds for forming the group and for each bucket."""
        self._timeout = timeout
        self._group: TensorGroup | None = None

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
            pending = [thread.submit(receive, bucket) for bucket in layout.buckets[:1]]
            for bucket in layout.buckets[1:]:
                result = pending.pop().result()
                pending.append(thread.submit(receive, bucket))
                yield _kept_for_this_stream(result)
            yield _kept_for_this_stream(pending.pop().result())

    def _join(self, plan: GroupPlan, rank: int) -> TensorGroup:
        group = self._group
        if group is not None and group.plan == plan and not group.poisoned:
            return group
        if group is not None:
            group.close()
        self._group = None
        self._group = TensorGroup.form(plan, rank, timeout=self._timeout)
        return self._group

    def abort(self, reason: str) -> None:
        """End the group for all its members, because this member has given up the transfer."""
        if self._group is not None:
            self._group.abort(reason)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()


def _kept_for_this_stream(received: tuple[Bucket, torch.Tensor]) -> tuple[Bucket, torch.Tensor]:
    """Keep the memory of a received bucket until the work that is queued on the current CUDA stream has ended; return `received`.

    It was allocated on the stream of the receiving thread, and torch would otherwise reuse it as soon as the tensor is deleted.
    """
    _, buffer = received
    if buffer.is_cuda:
        buffer.record_stream(torch.cuda.current_stream(buffer.device))
    return received
