"""Process groups that survive the loss of a member: formed with a deadline, aborted from any thread, formed again.

torch's default group cannot be re-formed, so these are bare ProcessGroup objects over a TCPStore that the first member
hosts (`GroupStore`). A group is good for one set of members; a failure poisons it, and whoever organises it (the weight
publisher) forms the next generation without the lost member. Names travel in a `GroupPlan`; ranks are places in it.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rl_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError
from rl_core.messages.weights import GroupPlan

logger = logging.getLogger(__name__)

ABORTED = b"aborted"
JOINED = b"joined"
POLL_SECONDS = 0.0005
"""Seconds between two polls of a broadcast between devices."""
RELEASE_SECONDS = 0.2
"""Seconds between two checks during a broadcast whether the group was released or its store is gone."""
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Variable that NCCL's watchdog reads when a group is made: 0 = it leaves errors to the caller."""
STORE_SECONDS = 60.0
"""Seconds within which a process must reach its own store at the address that it gives to other members."""


class GroupStore:
    """The store at which the members of each generation of the group meet; it runs in the process of rank 0."""

    def __init__(self, host: str) -> None:
        """Listen on a free port. `host`: the address the other members reach this process at."""
        self.host = host
        timeout = timedelta(seconds=STORE_SECONDS)
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self.port: int = self._store.port

    def release(self, plan: GroupPlan) -> None:
        """End the group of `plan` at all members: those that wait for it to be complete, and those that wait in a broadcast."""
        for rank in range(len(plan.members)):
            self._store.set(_member_key(plan, rank), ABORTED)


class TensorGroup:
    """A formed group. `broadcast` may be called by one thread at a time, `abort` by any."""

    def __init__(self, plan: GroupPlan, rank: int, *, process_group: Any, store: Any, timeout: float) -> None:
        """Use `form`."""
        self.plan, self.rank = plan, rank
        self._group, self._store = process_group, store
        self._timeout = timeout
        self._poison = ""
        self._in_use = False
        """Whether a broadcast holds the process group."""
        self._changed = threading.Condition()

    @classmethod
    def form(cls, plan: GroupPlan, rank: int, *, timeout: float) -> "TensorGroup":
        """Meet the other members, connect to all of them and return the group.

        Raises DeadlineExceeded naming who did not come within `timeout` seconds, InfrastructureError when the formation was
        released or a member was lost in it, ConfigError for a backend this build or machine does not have.
        """
        if plan.backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise ConfigError("backend nccl needs an accelerator and a torch built with NCCL; use gloo on CPUs")
        deadline = time.monotonic() + timeout
        try:
            store = dist.TCPStore(plan.host, plan.port, is_master=False, timeout=timedelta(seconds=timeout))
            _meet(store, plan, rank, deadline)
            group = _connect(dist.PrefixStore(f"{plan.key}/{plan.backend}", store), plan, rank, deadline)
        except RuntimeError as error:  # torch raises nothing narrower
            raise InfrastructureError(
                f"group {plan.key} could not be formed by {plan.members[rank]}: {error}"
            ) from error
        return cls(plan, rank, process_group=group, store=store, timeout=timeout)

    @property
    def poisoned(self) -> str:
        """The reason why the group was aborted or closed, or "" if it can be used. A group with a reason must be formed again."""
        return self._poison

    def broadcast(self, tensor: torch.Tensor, *, root: int = 0, timeout: float | None = None) -> None:
        """Broadcast `tensor` of `root` into those of the other members. After an error do not reuse them: a lost operation may still write to them.

        Raises InfrastructureError when the group is or gets aborted or released or a member is lost, DeadlineExceeded after
        `timeout` seconds (None = that of the formation). Either poisons the group.
        """
        options = dist.BroadcastOptions()
        limit = timeout if timeout is not None else self._timeout
        # Without an own timeout, gloo gives the operation the time that was left when the group was formed.
        options.rootRank, options.rootTensor, options.timeout = root, 0, timedelta(seconds=limit)
        with self._changed:
            self._refuse_if_poisoned()
            group, self._in_use = self._group, True
        work = None
        try:
            with torch.cuda.stream(_stream_for(tensor)):
                work = group.broadcast([tensor], options)
                self._wait(work, tensor.device, limit)
        except RuntimeError as error:  # torch raises nothing narrower
            self.abort(str(error).partition("\n")[0].partition(". This is typically")[0])
        except DeadlineExceeded as error:
            self.abort(str(error))
            raise error.with_traceback(None) from None
        finally:
            # Gloo closes its connections when the last reference is dropped. A traceback that is kept in a log record or a future holds some.
            del group, work
            with self._changed:
                self._in_use = False
                self._changed.notify_all()
        self._refuse_if_poisoned()

    def _wait(self, work: Any, device: torch.device, timeout: float) -> None:
        if device.type == "cuda":
            work.wait()  # orders the stream after the broadcast, no more
            self._poll(torch.cuda.current_stream(device).record_event().query, timeout)
            return
        finished: list[Any] = []

        def finish(future: Any) -> None:
            with self._changed:
                finished.append(future)
                self._changed.notify_all()

        work.get_future().add_done_callback(finish)
        deadline = time.monotonic() + timeout
        while not (finished or self._poison):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise self._deadline_error(timeout)
            with self._changed:
                # not work.wait(): an abort does not end it
                notified = self._changed.wait_for(lambda: finished or self._poison, min(remaining, RELEASE_SECONDS))
            if not notified:
                self._abort_if_released()
        if finished:
            work.wait()  # at once; raises its error

    def _poll(self, done: Callable[[], bool], timeout: float) -> None:
        """Poll until `done()` is true or the group is aborted, which ends its kernels. Raises DeadlineExceeded after `timeout` seconds.

        Aborts the group if rank 0 has released it or is lost.
        """
        started = checked = time.monotonic()
        while not done() and not self._poison:
            now = time.monotonic()
            if now - started > timeout:
                raise self._deadline_error(timeout)
            if now - checked > RELEASE_SECONDS:
                checked = now
                self._abort_if_released()
            time.sleep(POLL_SECONDS)

    def _abort_if_released(self) -> None:
        """Abort the group if rank 0 has released it, or has ended and the store with it. Takes as long as the store's answer."""
        try:
            released = self._store.get(_member_key(self.plan, self.rank)) == ABORTED
        except RuntimeError as error:  # torch raises nothing narrower
            self.abort(f"{self.plan.members[0]}, who holds its store, is lost: {str(error).partition(chr(10))[0]}")
            return
        if released:
            self.abort(f"{self.plan.members[0]} ended it: a member was lost")

    def _deadline_error(self, timeout: float) -> DeadlineExceeded:
        what = "received by all members" if self.rank == 0 else f"finished by {self.plan.members[0]}"
        return DeadlineExceeded(f"broadcast in group {self.plan.key} was not {what} within {timeout:g} s")

    def abort(self, reason: str) -> None:
        """Make the group unusable and end the operations in it. A second call does nothing."""
        with self._changed:
            if self._poison:
                return
            self._poison = reason or "aborted"
            self._changed.notify_all()
            holder, self._group = [self._group], None
        logger.warning("group %s is aborted: %s", self.plan.key, self._poison)
        threading.Thread(target=self._destroy, args=(holder,), name="rljob-group-end", daemon=True).start()

    def close(self) -> None:
        """Leave the group. An operation that runs in it ends with an error."""
        with self._changed:
            in_use = self._in_use
            if not in_use:
                self._poison = self._poison or "closed"
                group, self._group = self._group, None
        if in_use:
            self.abort("closed")
        else:
            del group  # outside the lock: this may join the threads of the group

    def _destroy(self, holder: list[Any]) -> None:
        """Abort the process group in `holder`, and drop its last reference. Runs on a thread of its own.

        Dropping the last reference joins the threads of the group, which may block in a read until their timeout. `holder` is a list of one, so
        that the caller keeps no reference; a broadcast in progress has one, and is waited for.
        """
        group = holder.pop()
        try:
            group.abort()
        except RuntimeError as error:
            logger.debug("abort of a process group failed: %s", error)
        with self._changed:
            self._changed.wait_for(lambda: not self._in_use)

    def _refuse_if_poisoned(self) -> None:
        if self._poison:
            raise InfrastructureError(f"group {self.plan.key} is over: {self._poison}; form a new generation")


def _stream_for(tensor: torch.Tensor) -> "torch.cuda.Stream | None":
    """Return a stream for one operation on `tensor` that comes after those queued so far; None on a CPU.

    On the caller's stream the operations of several groups would wait for each other. Two processes that start those of two groups in
    different orders would block each other.
    """
    if not tensor.is_cuda:
        return None
    stream = torch.cuda.Stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    tensor.record_stream(stream)  # its memory is not used again before the operation has ended, after an error either
    return stream


def _member_key(plan: GroupPlan, rank: int) -> str:
    """Return the store's key that says whether a member has joined, or the group was released."""
    return f"{plan.key}/member/{rank}"


def _meet(store: Any, plan: GroupPlan, rank: int, deadline: float) -> None:
    keys = [_member_key(plan, peer) for peer in range(len(plan.members))]
    if store.compare_set(keys[rank], "", JOINED.decode()) == ABORTED:
        raise InfrastructureError(f"group {plan.key} was given up before {plan.members[rank]} joined")
    try:
        store.wait(keys, timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except RuntimeError as error:
        missing = [name for name, key in zip(plan.members, keys, strict=True) if not store.check([key])]
        raise DeadlineExceeded(f"group {plan.key} waits for {', '.join(missing) or 'its store'}") from error
    if any(store.get(key) == ABORTED for key in keys):
        raise InfrastructureError(f"group {plan.key} was given up while it formed: a member was lost")


def _connect(store: Any, plan: GroupPlan, rank: int, deadline: float) -> Any:
    remaining = timedelta(seconds=max(0.001, deadline - time.monotonic()))
    if plan.backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, len(plan.members), remaining)
    if plan.backend == "nccl":
        return _nccl(store, plan, rank)
    raise ConfigError(f"backend must be gloo or nccl, got {plan.backend!r}")


def _nccl(store: Any, plan: GroupPlan, rank: int) -> Any:
    """Return a group whose errors and deadlines this module handles: NCCL's watchdog would end this process when a peer is lost."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)
    previous = os.environ.get(ERROR_HANDLING)
    os.environ[ERROR_HANDLING] = "0"
    try:
        return dist.ProcessGroupNCCL(store, rank, len(plan.members), options)
    finally:
        del os.environ[ERROR_HANDLING]
        os.environ.update({} if previous is None else {ERROR_HANDLING: previous})
