"""The parts of a run, built once and in one place; a program is handed them and owns nothing but its loop.

hub, cluster, groups    -> Roster -> StatusBoard -> StopController
data, ledger, Admission -> TrainingAccount -> Dispatcher        who holds which group
                           Members -> WeightSync                who serves which version
                           Checkpoints -> Saving, Startup
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.api.job import RLJob
from rl_core.channel import Channel
from rl_core.messages.groups import EndOfStep
from rl_core.messages.members import Incarnation, MemberState
from rl_core.observability.trackers import Trackers
from rl_core.plan.groups import groups_of
from rl_core.runner.admission import Admission
from rl_core.runner.changes import AppliedSpec
from rl_core.runner.checkpoints import Checkpoints
from rl_core.runner.content_check import ContentCheck
from rl_core.runner.controls import Controls, drain
from rl_core.runner.device_schedule import DeviceSchedule
from rl_core.runner.dispatcher import Dispatcher
from rl_core.runner.handover import VersionHandover
from rl_core.runner.history import LedgerFile, failures_before
from rl_core.runner.joining import build_strategies
from rl_core.runner.ledger import PromptLedger
from rl_core.runner.members import Members
from rl_core.runner.progress import Progress
from rl_core.runner.roster import Roster
from rl_core.runner.saving import Saving
from rl_core.runner.startup import Startup
from rl_core.runner.status import StatusBoard
from rl_core.runner.stopping import StopController
from rl_core.runner.sync import WeightSync
from rl_core.runner.time_sharing import build_device_schedule
from rl_core.runner.trace import Trace, build_trace
from rl_core.runner.training_account import TrainingAccount
from rl_core.workers.group import Cluster, WorkerGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What every program needs."""

    job: RLJob
    epoch: int
    applied: AppliedSpec
    progress: Progress
    cluster: Cluster
    actor: WorkerGroup
    trajectories: Channel
    """PromptGroupRecords on their way from the rollouts to the data ranks."""
    results: Channel
    """ValidationScores on their way from the rollouts to the runner."""
    roster: Roster
    board: StatusBoard
    stops: StopController
    dispatcher: Dispatcher
    members: Members
    sync: WeightSync
    check: ContentCheck | None
    """Of a program that has a prompt which rollouts and trainer can both score."""
    checkpoints: Checkpoints
    saving: Saving
    startup: Startup
    schedule: DeviceSchedule
    trackers: Trackers
    trace: Trace
    ledger_file: LedgerFile

    def controls(self) -> Controls:
        """Return the control calls of the run."""
        return Controls(
            self.applied,
            self.stops,
            ask_checkpoint=self.checkpoints.ask,
            drain=lambda pods: drain(pods, cluster=self.cluster, roster=self.roster),
            applied_generation=lambda: int(self.board.fact("appliedGeneration")),
        )

    def status(self) -> dict[str, Any]:
        """Return `/status`."""
        return self.board.snapshot(self.dispatcher.metrics(), self.dispatcher.held()) | {
            "workload": self.dispatcher.workload(),
            "devices": self.schedule.devices(),
        }

    def close(self) -> None:
        """Stop background work."""
        self.members.close()
        if self.check is not None:
            self.check.close()
        self.trace.close()
        self.ledger_file.close()


def build_parts(
    job: RLJob,
    cluster: Cluster,
    groups: dict[str, WorkerGroup],
    ledger: PromptLedger,
    trackers: Trackers,
    *,
    trajectories: Channel,
    results: Channel,
    output: Path,
    admission: Admission,
    probe_prompt: list[int] | None,
    epoch: int = 0,
    resume: str = "none",
    first_epoch: int | None = None,
    in_cluster: bool = False,
) -> Parts:
    """Wire the parts.

    `groups` holds actor, rollout and env; `trajectories` brings records, `results` the scores of validation. `resume` is auto, none or a
    path, `first_epoch` the epoch of the first start. `in_cluster`: members that are missing are waited for without a bound, and `output`
    is on the job's volume. `probe_prompt`: token ids for the content check, None = the program has none.
    """
    spec, actor = job.spec, groups["actor"]
    applied, progress = AppliedSpec(spec), Progress()
    roster = Roster(spec, cluster, job=job.metadata.name, patient=in_cluster)
    board = StatusBoard(spec, cluster, roster, epoch=epoch, failures=failures_before(output))
    stops = StopController(
        lambda: board.phase, cancel_training=lambda: actor.within(spec.runtime.deadlines.rpc).cancel_training()
    )

    def is_live(name: str, incarnation: Incarnation) -> bool:
        member = cluster.hub.get(name)
        return (
            member is not None
            and member.incarnation == incarnation
            and not member.state.gone
            and member.state not in (MemberState.DRAINING, MemberState.SUSPECT)  # who is silent gets no new work
        )

    def end_step(step: int) -> None:
        for _ in range(spec.actor.data_parallel):
            trajectories.put(EndOfStep(step=step))

    account = TrainingAccount(
        ledger,
        spec.algorithm,
        admission,
        data_ranks=spec.actor.data_parallel,
        lease_seconds=spec.runtime.lease_seconds,
    )
    dispatcher = Dispatcher(account, is_live=is_live, is_short=roster.short, end_step=end_step, fail=stops.fail)
    schedule = build_device_schedule(spec, cluster=cluster, actor=actor)
    versions = VersionHandover(dispatcher.serves)
    strategies = build_strategies(
        groups_of(spec).values(),
        groups,
        cluster=cluster,
        versions=versions,
        dispatcher=dispatcher,
        schedule=schedule,
        seconds=spec.runtime.deadlines.wait_ready,
        start_args=(trajectories, results),
    )
    members = Members(cluster, strategies, roster, board, spec.runtime.deadlines, fail=stops.fail)
    check = (
        None
        if probe_prompt is None
        else ContentCheck(applied, cluster=cluster, actor=actor, schedule=schedule, prompt_ids=probe_prompt)
    )
    sync = WeightSync(
        applied,
        cluster=cluster,
        actor=actor,
        members=members,
        versions=versions,
        roster=roster,
        dispatcher=dispatcher,
        check=check,
    )
    checkpoints = Checkpoints(spec, output=output, epoch=epoch, in_cluster=in_cluster)
    saving = Saving(
        applied,
        progress,
        checkpoints,
        actor=actor,
        schedule=schedule,
        dispatcher=dispatcher,
        sync=sync,
        board=board,
        stops=stops,
        output=output,
    )
    startup = Startup(
        spec.runtime.deadlines,
        progress,
        actor=actor,
        schedule=schedule,
        members=members,
        dispatcher=dispatcher,
        sync=sync,
        checkpoints=checkpoints,
        board=board,
        stops=stops,
        resume=resume,
        first_epoch=first_epoch,
    )
    return Parts(
        job=job,
        epoch=epoch,
        applied=applied,
        progress=progress,
        cluster=cluster,
        actor=actor,
        trajectories=trajectories,
        results=results,
        roster=roster,
        board=board,
        stops=stops,
        dispatcher=dispatcher,
        members=members,
        sync=sync,
        check=check,
        checkpoints=checkpoints,
        saving=saving,
        startup=startup,
        schedule=schedule,
        trackers=trackers,
        trace=build_trace(output, epoch),
        ledger_file=LedgerFile(output / "ledger.jsonl", attempt=saving.with_patience),
    )
