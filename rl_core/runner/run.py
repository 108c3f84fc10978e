"""What every run has, whatever its program: members, spec, progress, status, stops, channels, and the reports of its steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.api.job import RLJob
from rl_core.channel import Channel
from rl_core.observability.trackers import Trackers
from rl_core.plan.groups import Group
from rl_core.runner.changes import AppliedSpec
from rl_core.runner.history import failures_before
from rl_core.runner.progress import RunProgress
from rl_core.runner.roster import Roster
from rl_core.runner.status import StatusBoard
from rl_core.runner.step_report import StepReport
from rl_core.runner.stopping import StopController
from rl_core.runner.trace import Trace
from rl_core.workers.group import Cluster, WorkerGroup

IDLE = "rl_core.workers.worker:Worker"
"""Class of the processes of a group that a program does not use."""


class Run:
    """One run of a job under one epoch. A program's builder takes from it what the program needs."""

    def __init__(
        self,
        job: RLJob,
        cluster: Cluster,
        trackers: Trackers,
        *,
        planned: Mapping[str, Group],
        output: Path,
        epoch: int = 0,
        resume: str = "none",
        first_epoch: int | None = None,
        in_cluster: bool = False,
        model_files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Describe the run of `job` by the processes of `cluster`. `planned` are the groups that the program drives, by name.

        `resume` is auto, none or the path of a checkpoint, `first_epoch` the epoch in which the run was started first (None: this one).
        `in_cluster`: missing members are waited for without a limit, and `output` is on the job's volume. `model_files`: configuration
        and tokenizer of the model, by file name.
        """
        self.job, self.epoch, self.output = job, epoch, output
        self.resume, self.first_epoch, self.in_cluster = resume, first_epoch, in_cluster
        self.model_files = dict(model_files or {})
        self.cluster = cluster
        self.planned = planned
        self.groups: dict[str, WorkerGroup] = {}
        """The launched groups, by name."""
        self.channels: list[Channel] = []
        """Channels that `/status` shows."""
        self.applied = AppliedSpec(job.spec)
        self.progress = RunProgress()
        self.roster = Roster(job.spec, cluster, job=job.metadata.name, patient=in_cluster)
        self.board = StatusBoard(job.spec, cluster, self.roster, epoch=epoch, failures=failures_before(output))
        self.stops = StopController(lambda: self.board.phase)
        self.board.pending_wait = self.stops.pending_wait
        self.trackers = trackers
        self.trace = Trace.in_folder(output / "traces", epoch=epoch)
        self.report = StepReport(self.progress, self.board, self.trackers, self.trace, epoch=epoch)

    def launch(self, name: str, *args: Any, **kwargs: Any) -> WorkerGroup:
        """Return the planned group `name`, whose members are constructed with these arguments as they join."""
        return self._launch(name, WorkerGroup.of(self.planned[name].worker, *args, **kwargs))

    def launch_idle(self, name: str) -> WorkerGroup:
        """Return the planned group `name`, which the program does not use: its members join and do nothing."""
        return self._launch(name, WorkerGroup.of(IDLE))

    def _launch(self, name: str, group: WorkerGroup) -> WorkerGroup:
        self.groups[name] = group.launch(self.cluster, name=name)
        return group

    def channel(self, name: str, *, local: bool = False) -> Channel:
        """Return a new channel of the run, which `/status` shows. `local`: inside this process, without the channel server."""
        channel = Channel.create(name, local=local)
        self.channels.append(channel)
        return channel

    def close(self) -> None:
        """Write what the trace still holds."""
        self.trace.close()
