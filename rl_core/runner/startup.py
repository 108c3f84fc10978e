"""Starts a run, in this order: the gangs, the weights of the actor (resumed or fresh), their first publication, rollouts and environments."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from rl_core.api.settings import DeadlinesSpec
from rl_core.plan.groups import ACTOR
from rl_core.runner.device_schedule import DeviceSchedule
from rl_core.runner.members import Members, Point
from rl_core.runner.progress import RunProgress
from rl_core.runner.saving import Saving
from rl_core.runner.status import Phase, StatusBoard
from rl_core.runner.stopping import StopController
from rl_core.runner.sync import WeightSync
from rl_core.workers.group import WorkerGroup


class Startup:
    """Performs the start of a run once."""

    def __init__(
        self,
        deadlines: DeadlinesSpec,
        progress: RunProgress,
        board: StatusBoard,
        *,
        trained: Sequence[WorkerGroup],
        schedule: DeviceSchedule,
        members: Members,
        sync: WeightSync,
        saving: Saving,
        stops: StopController,
    ) -> None:
        """`trained` are the worker groups that train: the actor, and the group of the critic if the job has one."""
        self._deadlines, self._progress, self._trained, self._members = deadlines, progress, trained, members
        self._board, self._schedule = board, schedule
        self._sync, self._saving, self._stops = sync, saving, stops

    def run(self, *, at: Point) -> None:
        """Start the run, and return when enough rollouts serve the current weights.

        `at()` is called repeatedly while this waits for members. An exception that it raises ends the start.
        """
        seconds = self._deadlines.wait_ready
        address = self._start_training_groups(seconds, at=at)
        self._members.open(address)
        self._members.await_weightless(seconds, at=at)
        self.await_rollouts(at=at)

    def _start_training_groups(self, seconds: float, *, at: Point) -> str:
        """Build the models of the groups that train, load the checkpoint, if any, and publish the first weights.

        Returns the address of the weight publisher, from which rollouts pull the weights.
        """
        stops, progress = self._stops, self._progress
        with self._starting("its processes, which load their libraries"):
            self._members.await_gangs(seconds, at=at)
        # No device lease is needed yet: rollouts use shared devices only once the first generation begins.
        with self._starting("its model and optimizer"):
            for building in [group.init_worker() for group in self._trained]:
                stops.wait(building, seconds)
        with self._schedule.training():
            with self._starting("the weights of its checkpoint"):
                self._saving.restore()
                for group in self._trained:
                    stops.wait(group.set_global_step(progress.version))
                self._saving.loaded = True
            with self._starting("its first version of the weights"):
                address: str = next(answer for answer in stops.wait(self._trained[0].publisher_address()) if answer)
                self._sync.publish_first(progress.version, lambda result: stops.wait(result, seconds))
        return address

    def _starting(self, what: str) -> AbstractContextManager[None]:
        """Show in `/status` that the start waits for `what` of the actor while the block runs."""
        return self._board.during(Phase.STARTING, on=ACTOR, what=what)

    def await_group(self, name: str, *, at: Point) -> None:
        """Wait, as Degraded, until enough members of an elastic group without weights are present."""
        self._members.await_group(name, limit=self._deadlines.degraded, at=at)

    def await_rollouts(self, *, at: Point) -> None:
        """Wait, as Degraded once training began, until enough rollouts serve the version published last."""
        progress, deadlines = self._progress, self._deadlines
        limit = deadlines.degraded if progress.step else deadlines.wait_ready
        with self._schedule.generating():
            self._members.await_rollouts(self._sync.version, begun=progress.begun, limit=limit, at=at)
