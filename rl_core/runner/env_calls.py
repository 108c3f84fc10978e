"""Calls of a collection to env workers. The loss of an env worker is not an error: only its own trajectories are lost."""

import concurrent.futures
import contextlib

from rl_core.api.errors import InfrastructureError
from rl_core.messages.calls import MethodResult
from rl_core.messages.embodied import EpisodeStats
from rl_core.workers.result import RankCall

Future = concurrent.futures.Future[MethodResult]


class EnvCall:
    """A call to an env worker, implements `RankCall`. If the env worker is lost, the result says that all its episodes are lost."""

    def __init__(self, name: str, call: RankCall, *, episodes: int) -> None:
        """Wrap `call`, a call to the member `name`, which runs `episodes` episodes at a time.

        If `call` fails with an InfrastructureError, the member counts as lost.
        """
        self.name, self.lost = name, False
        self.future: Future = concurrent.futures.Future()
        self._call, self._episodes = call, episodes
        call.future.add_done_callback(self._on_done)

    def describe(self) -> str:
        """Return one line about the member."""
        return self._call.describe()

    def cancel(self) -> None:
        """Cancel the call."""
        self._call.cancel()
        self.future.cancel()

    def give_up(self) -> None:
        """Declare the member lost and end the call, unless it has been answered."""
        self.lost = True
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # The member has answered meanwhile.
            self.future.set_result(MethodResult(value=EpisodeStats(lost=self._episodes), durations={}))
        self._call.cancel()

    def _on_done(self, future: Future) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if isinstance(error, InfrastructureError):
            self.give_up()
            return
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # The call was given up or cancelled meanwhile.
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(future.result())
