"""Tasks of the runner process that run once a second beside the loop, each guarded: a failing task does not end the others."""

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
"""How long one round waits for the channel server."""


class PeriodicTasks:
    """Ends the run when an actor must go, shows the channels' depths, logs stalls, and calls what the program adds."""

    def __init__(
        self,
        cluster: Cluster,
        board: StatusBoard,
        stops: StopController,
        *,
        channels: Sequence[Channel],
        also: Sequence[Callable[[], None]] = (),
    ) -> None:
        """`channels` are shown in `/status`; `also` are the tasks of the program."""
        self._cluster, self._board, self._stops, self._channels = cluster, board, stops, channels
        self._tasks = (self._interrupt_for_actors, *also, self._show_channels, self._log_stall)
        self._stats: list[concurrent.futures.Future[ChannelStats]] = []
        """Requests to the channel server that are under way."""
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
                except (
                    Exception
                ):  # this thread alone finds stalls and expires leases: a bug in one task must not end it
                    logger.exception("a periodic task failed")

    def _interrupt_for_actors(self) -> None:
        """End the run when a pod of the gang received SIGTERM: its member reports `draining`."""
        leaving = [member.name for member in self._cluster.members("actor") if member.state == "draining"]
        if leaving and not self._stops.asked:
            self._stops.stop(f"SIGTERM at {', '.join(leaving)}", StopKind.INTERRUPT)

    def _show_channels(self) -> None:
        """Show the channels' depths. A channel server that does not answer leaves those shown last, and delays no other task."""
        if not self._stats:
            self._stats = [channel.request_stats() for channel in self._channels]
        _, waiting = concurrent.futures.wait(self._stats, STATS_SECONDS)
        if waiting:
            return
        ended, self._stats = self._stats, []
        self._board.show_channels([stats.result() for stats in ended])

    def _log_stall(self) -> None:
        stall = self._board.stall()
        if stall is not None and stall["reason"] != self._stall:
            logger.warning("stall: %s: %s", stall["reason"], stall["message"])
        self._stall = stall["reason"] if stall is not None else None
