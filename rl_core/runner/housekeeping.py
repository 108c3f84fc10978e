"""Once a second, beside the loop: leases that were not renewed, actors that must go, depths of the channels, the stall detector."""

import logging
import threading

from rl_core.api.errors import RLJobError
from rl_core.channel import Channel
from rl_core.runner.dispatcher import Dispatcher
from rl_core.runner.roster import MemberList
from rl_core.runner.status import StatusBoard
from rl_core.runner.stopping import StopController, StopKind

logger = logging.getLogger(__name__)


class Housekeeping:
    """What nobody else has time for. Its thread must outlive any bug: it alone finds stalls and hands overdue leases on."""

    def __init__(
        self,
        cluster: MemberList,
        dispatcher: Dispatcher,
        board: StatusBoard,
        stops: StopController,
        channels: tuple[Channel, ...],
    ) -> None:
        """`channels` are shown in `/status`."""
        self._cluster, self._dispatcher, self._board, self._stops = cluster, dispatcher, board, stops
        self._channels = channels
        self._stall: str | None = None
        """Reason that was logged last."""

    def run(self, ended: threading.Event) -> None:
        """Tidy up each second until `ended`."""
        while not ended.wait(1.0):
            for task in (self._interrupt_for_actors, self._dispatcher.tick, self._look_at_channels, self._log_stall):
                try:
                    task()
                except RLJobError as error:
                    logger.warning("housekeeping: %s", error)
                except Exception:  # whatever is wrong with one task, the others go on
                    logger.exception("housekeeping failed")

    def _interrupt_for_actors(self) -> None:
        """End the run when a pod of the gang must go: its SIGTERM is seen as `draining`."""
        leaving = [member.name for member in self._cluster.members("actor") if member.state == "draining"]
        if leaving and not self._stops.asked:
            self._stops.stop(f"SIGTERM at {', '.join(leaving)}", StopKind.INTERRUPT)

    def _look_at_channels(self) -> None:
        self._board.show_channels([channel.stats() for channel in self._channels])

    def _log_stall(self) -> None:
        stall = self._board.snapshot(self._dispatcher.metrics(), self._dispatcher.held())["stall"]
        if stall is not None and stall["reason"] != self._stall:
            logger.warning("stall: %s: %s", stall["reason"], stall["message"])
        self._stall = stall["reason"] if stall is not None else None
