"""Tasks that the runner process runs once a second on a thread of their own. A failing task does not end the others."""

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Sequence

from rl_core.api.errors import RLJobError
from rl_core.channel import Channel, ChannelStats
from rl_core.runner.status import StatusBoard
from rl_core.runner.stopping import StopController, StopKind
from rl_core.workers.cluster import Cluster

logger = logging.getLogger(__name__)
STATS_SECONDS = 0.5
"""Seconds that the task for channels waits for the answer of the channel server."""


class PeriodicTasks:
    """The periodic tasks of the runner process.

    They end the run when a member of a gang drains, update the depths of the channels in `/status`, log stalls, and call the tasks of the
    program.
    """

    def __init__(
        self,
        cluster: Cluster,
        board: StatusBoard,
        stops: StopController,
        *,
        channels: Sequence[Channel],
        also: Sequence[Callable[[], None]] = (),
    ) -> None:
        """`channels`: channels whose depths `/status` shows. `also`: the periodic tasks of the program."""
        self._cluster, self._board, self._stops, self._channels = cluster, board, stops, channels
        self._tasks = (self._interrupt_for_gangs, *also, self._show_channels, self._log_stall)
        self._stats: list[concurrent.futures.Future[ChannelStats]] = []
        """Requests to the channel server that are in progress."""
        self._stall: str | None = None
        """Reason of the stall that was logged last."""

    def run(self, ended: threading.Event) -> None:
        """Run the tasks each second until `ended` is set."""
        while not ended.wait(1.0):
            for task in self._tasks:
                try:
                    task()
                except RLJobError as error:
                    logger.warning("periodic task: %s", error)
                except Exception:
                    # Only this thread finds stalls and expires leases, so a bug in one task must not end it.
                    logger.exception("a periodic task failed")

    def _interrupt_for_gangs(self) -> None:
        """End the run when a pod of a gang received SIGTERM: its member then reports the state `draining`."""
        gangs = [group.name for group in self._cluster.kinds.values() if not group.elastic]
        leaving = [m.name for name in gangs for m in self._cluster.members(name) if m.state == "draining"]
        if leaving and not self._stops.stop_requested:
            self._stops.stop(f"SIGTERM at {', '.join(leaving)}", StopKind.INTERRUPT)

    def _show_channels(self) -> None:
        """Show the depths of the channels. If the channel server does not answer, the last values stay, and other tasks are not delayed."""
        if not self._stats:
            self._stats = [channel.request_stats() for channel in self._channels]
        _, waiting = concurrent.futures.wait(self._stats, STATS_SECONDS)
        if waiting:
            return
        finished, self._stats = self._stats, []
        self._board.show_channels([stats.result() for stats in finished])

    def _log_stall(self) -> None:
        stall = self._board.stall()
        if stall is not None and stall["reason"] != self._stall:
            logger.warning("stall: %s: %s", stall["reason"], stall["message"])
        self._stall = stall["reason"] if stall is not None else None
