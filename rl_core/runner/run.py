"""`Run`: the objects that a training loop needs, whichever program it is.

They are the members of the worker groups, the job's spec, the progress, the status that users see, stop requests, channels and the
reports of steps.
"""

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
"""Worker class for groups that the program does not use: it does nothing."""


class Run:
    """One run of a job in one epoch. Programs take the objects that they need from here."""

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
        """Create the run of `job` on the processes of `cluster`.

        - `trackers`: receive the metrics of each step.
        - `planned`: the groups that the program uses, by name.
        - `output`: the output folder. In a cluster it is on a volume of the job.
        - `epoch`: number of gang restarts of the job so far.
        - `resume`: "auto", "none" or the path of a checkpoint.
        - `first_epoch`: epoch of the first start of the run; None means `epoch`.
        - `in_cluster`: whether the job runs in a Kubernetes cluster. The run then waits for missing members without a limit.
        - `model_files`: configuration and tokenizer files of the model, by file name.
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
        """Launch the planned group `name` and return it. The arguments are passed to the worker class when a member joins."""
        return self._launch(name, WorkerGroup.of(self.planned[name].worker, *args, **kwargs))

    def launch_idle(self, name: str) -> WorkerGroup:
        """Launch the planned group `name` for a program that does not use it: its members join and do nothing."""
        return self._launch(name, WorkerGroup.of(IDLE))

    def _launch(self, name: str, group: WorkerGroup) -> WorkerGroup:
        self.groups[name] = group.launch(self.cluster, name=name)
        return group

    def channel(self, name: str, *, local: bool = False) -> Channel:
        """Create a channel, whose depth `/status` shows, and return it. If `local`, it exists only in this process."""
        channel = Channel.create(name, local=local)
        self.channels.append(channel)
        return channel

    def close(self) -> None:
        """Write the remaining part of the trace."""
        self.trace.close()
