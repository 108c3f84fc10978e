"""Moves the records of decided prompt groups on the channel to their data ranks, or deletes them."""

import logging
import threading
from concurrent.futures import Future
from functools import partial

from rl_core.channel import Channel
from rl_core.runner.training_account import RecordMoves

logger = logging.getLogger(__name__)


class RecordMover:
    """Sends moves to the channel server in order, one message at a time. Moves that are added meanwhile form the next message.

    Moves are idempotent, so a message that failed is sent again by `retry`.
    """

    def __init__(self, trajectories: Channel) -> None:
        self._channel = trajectories
        self._lock = threading.Lock()
        """Guards the two below: any thread adds moves, the thread of the transport ends them."""
        self._waiting = RecordMoves()
        self._sending = False

    def add(self, moves: RecordMoves) -> None:
        """Send `moves` in the background. Thread-safe."""
        with self._lock:
            self._waiting.moves += moves.moves
            self._waiting.closed += moves.closed
        self.retry()

    def retry(self) -> None:
        """Send the waiting moves, unless a message is in progress. Also called once a second as a periodic task."""
        with self._lock:
            if self._sending or not self._waiting:
                return
            self._sending, batch = True, RecordMoves()
            if self._waiting.moves:
                batch.moves, self._waiting.moves = self._waiting.moves, []
                call = self._channel.move(batch.moves)
            else:  # After the moves: a rank considers its key complete once it is closed and empty.
                batch.closed = [self._waiting.closed.pop(0)]
                call = self._channel.close_key(batch.closed[0])
        call.add_done_callback(partial(self._sent, batch))

    def _sent(self, batch: RecordMoves, call: "Future[None]") -> None:
        error = call.exception()
        with self._lock:
            self._sending = False
            if error is not None:
                self._waiting.moves[:0] = batch.moves
                self._waiting.closed[:0] = batch.closed
        if error is None:
            self.retry()
        else:
            logger.warning("records cannot be moved on the channel, trying again: %s", error)
