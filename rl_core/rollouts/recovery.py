"""What a rollout worker does when its engine is lost while the worker lives on: nothing is served until weights are proven anew.

lost -> weights forgotten, gate closed, groups in flight given back, no receiver of versions -> another engine is up -> pull, verify -> gate open
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any

from rl_core.api.errors import RLJobError, exit_code
from rl_core.rollouts.serving import PromptServer
from rl_core.weights.receiver import WeightReceiver
from rl_core.weights.receiver_state import ReceiverState

logger = logging.getLogger(__name__)
PAUSE_S = 1.0
"""Seconds before a pull that failed is tried again."""


class Recovery:
    """Watches one engine. Before the worker has joined there is nothing to recover: the runner has the join tried again."""

    def __init__(self, receiver: WeightReceiver, server: PromptServer, *, starting: Callable[[int], None]) -> None:
        """`receiver` and `server` are those of the worker; both live on its event loop.

        `starting(losses)` tells the hub that an engine starts: a version that comes meanwhile is not to wait for it.
        """
        self._receiver, self._server, self._starting = receiver, server, starting
        self._publisher = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self.losses = 0
        """Engines lost so far."""

    def joined(self, publisher: str) -> None:
        """Take the committed weights from `publisher` from now on. On the worker's event loop."""
        self._publisher, self._loop = publisher, asyncio.get_running_loop()

    def lost(self, reason: str) -> None:
        """Serve nothing any more. From any thread."""
        self.losses += 1
        self._start(self._forget())

    def back(self, error: RLJobError | None) -> None:
        """Load the weights into the new engine; end the process where there will be none. From any thread."""
        if error is not None:
            # Not an exception: nobody waits here who could take it. The supervisor has the process started again, or the pod replaced.
            logger.error("this process ends, its engine cannot be had: %s", error)
            logging.shutdown()
            os._exit(exit_code(error))
        self._start(self._load())

    def close(self) -> None:
        """Recover nothing any more. On the worker's event loop."""
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
        await self._server.pause(0)

    async def _load(self) -> None:
        self._task = asyncio.ensure_future(self._pull())

    async def _pull(self) -> None:
        # The publisher may offer a version of its own meanwhile, which ends a pull and serves as well.
        while self._receiver.state is not ReceiverState.SERVING:
            try:
                version, _ = await self._receiver.pull(self._publisher)
                logger.info("the new engine serves version %s", version)
            except RLJobError as error:
                logger.warning("the weights cannot be loaded into the new engine yet: %s", error)
                await asyncio.sleep(PAUSE_S)
