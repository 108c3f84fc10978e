"""Recovery of a rollout worker whose engine process is lost while the worker itself continues.

engine lost -> forget the weights, stop leasing, return groups in flight, receive no versions
new engine  -> pull the committed weights, verify them, lease again
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any

from rl_core.api.errors import RLJobError, exit_code
from rl_core.rollouts.rollout_loop import RolloutLoop
from rl_core.weights.receiver import WeightReceiver
from rl_core.weights.receiver_state import ReceiverState

logger = logging.getLogger(__name__)
PAUSE_S = 1.0
"""Seconds before a pull that failed is tried again."""


class EngineRecovery:
    """Recovers from the loss of an engine. Before the worker has joined it does nothing, because the runner repeats the join."""

    def __init__(self, receiver: WeightReceiver, loop: RolloutLoop, *, starting: Callable[[int], None]) -> None:
        """Recover the worker that `receiver` and `loop` belong to; both live on its event loop.

        `starting(losses)` is called with the number of engines lost so far. It reports to the hub that an engine is starting, so that no
        weight sync waits for this worker.
        """
        self._receiver, self._rollout_loop, self._starting = receiver, loop, starting
        self._publisher = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self.losses = 0
        """Engines lost so far."""

    def joined(self, publisher: str) -> None:
        """Remember `publisher`, from which a new engine gets its weights. Called on the worker's event loop once it has joined."""
        self._publisher, self._loop = publisher, asyncio.get_running_loop()

    def lost(self, reason: str) -> None:
        """Stop serving, because the engine is lost. May be called from any thread."""
        self.losses += 1
        self._start(self._forget())

    def back(self, error: RLJobError | None) -> None:
        """Load the weights into the new engine. May be called from any thread.

        An `error` says that there will be no new engine; the process then ends.
        """
        if error is not None:
            # An exception would reach nobody. The supervisor restarts the process, or the operator replaces the pod.
            logger.error("this process ends, its engine cannot be had: %s", error)
            logging.shutdown()
            os._exit(exit_code(error))
        self._start(self._load())

    def close(self) -> None:
        """Stop recovering. Called on the worker's event loop."""
        self._loop = None
        if self._task is not None:
            self._task.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            work.close()
        else:
            asyncio.run_coroutine_threadsafe(work, loop)

    async def _forget(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._receiver.forget()
        self._starting(self.losses)
        await self._rollout_loop.pause(0)

    async def _load(self) -> None:
        self._task = asyncio.ensure_future(self._pull())

    async def _pull(self) -> None:
        # The publisher may offer a newer version meanwhile. That ends the pull, and the worker serves the newer version.
        while self._receiver.state is not ReceiverState.SERVING:
            try:
                version, _ = await self._receiver.pull(self._publisher)
                logger.info("the new engine serves version %s", version)
            except RLJobError as error:
                logger.warning("the weights cannot be loaded into the new engine yet: %s", error)
                await asyncio.sleep(PAUSE_S)
