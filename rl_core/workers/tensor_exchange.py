"""The messages of one transfer of a tensor, at one of its ends: the sender's or the receiver's.

`rl_core.messages.tensors` lists the messages. Each end has a deadline and notices when the process at the other end is lost. An error that
ends the transfer at one end is sent to the other end, once.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

from rl_core.api.errors import DeadlineExceeded, Deadlock, InfrastructureError, RLJobError, WorkerLost
from rl_core.channel import AsyncHandle
from rl_core.messages.rpc import PackedError
from rl_core.messages.tensors import TensorTarget
from rl_core.transports.rpc_wire import pack_error, rebuild_error
from rl_core.workers.message_channel import LOOK_SECONDS, MessageChannel, Receipt, Watch

TENSOR = "a tensor"
"""What a worker waits for once the header has arrived, and in an asynchronous send."""
ORIGINAL_SECONDS = 5.0
"""Seconds that an end whose group has failed waits for the error of the other end, which may be the reason."""
REPORT_SECONDS = 30.0
"""Seconds within which the channel must store an error for the other end."""


class TensorExchange:
    """One end of a transfer. Used by one thread at a time."""

    def __init__(self, messages: MessageChannel, peer: str, transfer: str, seconds: float, watch: Watch) -> None:
        """`peer`: name of the other end, whose process `watch` watches. `seconds`: limit of the whole transfer at this end."""
        self.peer = peer
        self._messages, self._transfer, self._watch, self._seconds = messages, transfer, watch, seconds
        self._deadline = time.monotonic() + seconds
        self._has_failed = False
        """Whether one of the ends has sent an error to the other."""

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, at least a millisecond."""
        return max(0.001, self._deadline - time.monotonic())

    # --- messages --------------------------------------------------------------------------------------------------

    def post(self, message: Any) -> AsyncHandle[None]:
        """Start to send `message` to the other end. The handle is done when it is stored."""
        return self._messages.put(message, self.peer, transfer=self._transfer, timeout=self.seconds_left)

    def receipt(self, what: str, seconds: float | None = None) -> Receipt:
        """Start to receive the next message of the other end, and return the receive to wait for.

        `what` names the message in the status of this worker and in errors. `seconds` None means the time that is left for the transfer.
        """
        return Receipt(
            self._messages,
            self.peer,
            self.seconds_left if seconds is None else seconds,
            self._checked,
            transfer=self._transfer,
            what=what,
            watch=self._watch,
        )

    def receive(self, what: str, seconds: float | None = None) -> Any:
        """Return the next message of the other end, or raise the error that it has sent."""
        return self.receipt(what, seconds).wait()

    def receive_target(self, what: str) -> TensorTarget:
        """Return the answer to the header of a tensor. `what` is reported as that for which this worker waits."""
        try:
            answer: TensorTarget = self.receive(what)
        except Deadlock:
            raise
        except DeadlineExceeded as error:
            if self._has_failed:
                raise
            raise DeadlineExceeded(
                f"{self.peer} must receive {TENSOR} of {self._messages.name} within {self._seconds:g} s, it has not begun to"
            ) from error
        return answer

    def _checked(self, message: Any) -> Any:
        """Return a message of the other end, or raise the error that it is."""
        if not isinstance(message, PackedError):
            return message
        self._has_failed = True
        self._messages.take_back(self.peer, self._transfer)  # The receiver receives no more of this transfer.
        if message.type == ValueError.__name__:
            raise ValueError(message.message)
        raise rebuild_error(message, method="a transfer of a tensor", peer=self.peer)

    # --- waits -----------------------------------------------------------------------------------------------------

    def wait_for(self, work: "Future[Any]", *, until: float = math.inf, or_done: Receipt | None = None) -> None:
        """Return when `work` has ended or `or_done` has arrived, and at the time `until` of the monotonic clock.

        Raises the errors of `check`.
        """
        with self._messages.context.waiting(TENSOR, self.peer):
            while not (work.done() or (or_done is not None and or_done.done()) or time.monotonic() >= until):
                self.check()
                wait([work], LOOK_SECONDS)

    def check(self) -> None:
        """Raise WorkerLost if the other end is gone, DeadlineExceeded after the deadline of the transfer, and the error given to `stop`."""
        self._watch.check(f"{self._messages.name} waited for {TENSOR} on its way")
        if time.monotonic() > self._deadline:
            raise DeadlineExceeded(
                f"{TENSOR} between {self._messages.name} and {self.peer} must arrive within {self._seconds:g} s, it is on its way"
            )

    # --- errors ----------------------------------------------------------------------------------------------------

    def raise_original(self, error: InfrastructureError) -> None:
        """Raise the error of the other end, which may be the reason of `error`, if it arrives within some moments; WorkerLost if it is gone."""
        self._messages.context.wait_view_changed(0.0)
        try:
            self.receive(TENSOR, ORIGINAL_SECONDS)
        except (RLJobError, ValueError) as other:
            if self._has_failed or isinstance(other, WorkerLost):
                raise other from error

    def stop(self, error: BaseException) -> None:
        """End the transfer with `error`, which waits of another thread raise then, and `report` sends. May be called by any thread."""
        self._watch.error = error

    def report(self, error: BaseException) -> None:
        """Send `error` to the other end, or the one given to `stop`, unless one of the ends has sent an error before.

        If the other end is gone, the hub deletes the error with the other messages for it, but a replacement that gets the header needs it.
        """
        if self._has_failed:
            return
        self._has_failed = True
        with contextlib.suppress(RLJobError):
            packed = pack_error(self._watch.error or error)
            self._messages.put(packed, self.peer, transfer=self._transfer, timeout=REPORT_SECONDS)

    @contextlib.contextmanager
    def reporting_errors(self, end: Callable[[BaseException], None] = lambda error: None) -> Iterator[None]:
        """Send an error of the block to the other end, and call `end(error)` afterwards, so that the other end sees the reason first."""
        try:
            yield
        except BaseException as error:
            self.report(error)
            end(error)
            raise
