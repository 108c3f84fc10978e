"""Publishes a version of the weights to the members that hold the policy, and records which of them have proved it."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from rl_core.api.errors import DeadlineExceeded, RLJobError
from rl_core.messages.members import MemberState
from rl_core.messages.weights import PublishReport, ReceiverAddress
from rl_core.plan.groups import ROLLOUT, groups_of
from rl_core.runner.changes import AppliedSpec
from rl_core.runner.content_check import ContentCheck
from rl_core.runner.member_versions import MemberVersions
from rl_core.runner.members import Members
from rl_core.runner.roster import Identity, Roster
from rl_core.runner.workload import Workload
from rl_core.workers.group import Cluster, WorkerGroup, WorkerGroupFuncResult
from rl_core.workers.member import Member

logger = logging.getLogger(__name__)
LOSS_HEARTBEATS = 2.0
"""Heartbeat intervals within which the hub learns of a loss."""
LOOK_S = 0.05


class WeightSync:
    """Publishes versions of the weights from the actor to the groups that pull them, and schedules the content check of each."""

    def __init__(
        self,
        applied: AppliedSpec,
        *,
        cluster: Cluster,
        actor: WorkerGroup,
        members: Members,
        versions: MemberVersions,
        roster: Roster,
        workload: Workload,
        check: ContentCheck | None,
    ) -> None:
        """`check` is None for a program without a content check."""
        self._applied, self._cluster, self._actor = applied, cluster, actor
        self._versions, self._roster, self._workload = versions, roster, workload
        self.members, self.check = members, check
        self.digest = ""
        """Digest of the manifest of the version published last."""
        self._last_report: PublishReport | None = None

    @property
    def version(self) -> int:
        """Return the version published last, which the rollouts serve."""
        return self._versions.committed

    def publish_first(self, version: int, wait: Callable[[WorkerGroupFuncResult], list[Any]]) -> None:
        """Commit the initial weights at the publisher, without receivers; rollouts pull them when they join.

        `wait` returns the results by rank.
        """
        with self._versions.publishing(version):
            self.digest = wait(self._actor.sync_model_to_rollout(version, [], 0))[0].digest

    def publish(self, version: int) -> None:
        """Send `version` to every live member that has weights, and schedule the content check of the rollouts.

        A member that is silent meanwhile is brought in again in the background: it would keep its version if it returned.
        First waits for the content check of the previous version, which raises WeightsDiverged. Raises DeadlineExceeded if fewer than
        rollout.minReplicas rollouts acknowledge the version in time; those that failed are brought in again in the background. Once enough
        serve it, those that are slower are not waited for.
        """
        if self.check is not None:
            self.check.confirm()
        with self._versions.publishing(version), self._workload.weights_in_transit():
            members = self._cluster.members()
            processes, report = self._send(version, self._versions.receivers(members))
            acked = [process for process in processes if process[0] in report.acked]
            self._roster.acknowledged(version, acked)
            self._versions.proved(acked, version)
        self._last_report = report
        self.digest = report.digest
        if report.failed:
            logger.warning("version %s: out of service until they pull it again: %s", version, report.failed)
            self.members.rejoin(list(report.failed))
        silent = [member for member in members if member.state is MemberState.SUSPECT]
        if waiting := [m.name for m in silent if self._versions.version_of((m.name, m.incarnation)) is not None]:
            logger.warning("version %s: silent, to pull it when they are here again: %s", version, waiting)
            self.members.rejoin(waiting)
        if report.late:
            threading.Thread(
                target=self._follow_late, args=(version, processes), daemon=True, name="late-receivers"
            ).start()
        if self.check is not None:
            rollouts = {member.name for member in self._cluster.members(ROLLOUT)}
            self.check.schedule(version, [name for name in report.acked if name in rollouts])

    def _follow_late(self, version: int, processes: list[Identity]) -> None:
        """Wait for the receivers that were late, and record which of them have proved `version`. Those that failed join again."""
        try:
            (late_report,) = (
                self._actor.execute_on(0).late_receivers().wait(self._applied.spec.runtime.deadlines.weight_sync)
            )
        except RLJobError as error:
            logger.warning("not known which of the late receivers serve: %s", error)
            return
        if late_report.version != version:  # a newer one is published, and its own late receivers are waited for
            return
        self._versions.proved([process for process in processes if process[0] in late_report.acked], version)
        if late_report.failed:
            logger.warning("version %s: out of service until they pull it again: %s", version, late_report.failed)
            self.members.rejoin(list(late_report.failed))

    def metrics(self) -> dict[str, float]:
        """Return the metrics `weights/*`: figures of the last sync, and numbers of content checks."""
        metrics: dict[str, float] = {}
        if (report := self._last_report) is not None:
            metrics = {
                "weights/version": float(report.version),
                "weights/publish_seconds": report.seconds,
                "weights/apply_seconds": report.apply_seconds,
                "weights/pause_seconds": report.pause_seconds,
                "weights/bytes": float(report.bytes),
                "weights/failed_receivers": float(len(report.failed)),
                "weights/late_receivers": float(len(report.late)),
            }
            if report.patch_share is not None:
                metrics["weights/patch_share"] = report.patch_share
                metrics["weights/patched_receivers"] = float(len(report.patched))
            if report.relayed:
                metrics["weights/relayed_receivers"] = float(len(report.relayed))
        if self.check is not None:
            counts = self.check.counts
            metrics["weights/content_check_passed_total"] = float(counts.passed)
            metrics["weights/content_check_skipped_total"] = float(counts.skipped)
        return metrics

    def _send(self, version: int, receivers: list[Member]) -> tuple[list[Identity], PublishReport]:
        """Send `version` to the members `receivers`; return the identities of the members that it was sent to, and the publisher's report.

        When too few receivers acknowledge because some were lost meanwhile, the version is sent again to those that are left.
        """
        while True:
            minimum = groups_of(self._applied.spec)[ROLLOUT].min_members
            required = min(minimum, sum(m.group == ROLLOUT for m in receivers))
            addresses = [
                ReceiverAddress(
                    name=m.name, address=m.address, host_token=m.host_token, group=m.group, devices=m.device_uuids
                )
                for m in receivers
            ]
            sending = self._actor.sync_model_to_rollout(version, addresses, required)
            try:
                report: PublishReport = sending.wait(self._applied.spec.runtime.deadlines.weight_sync)[0]
                return [(m.name, m.incarnation) for m in receivers], report
            except DeadlineExceeded:
                previous, receivers = receivers, self._those_left(receivers)
                if len(receivers) == len(previous):
                    raise
                logger.warning(
                    "version %s: %s of %s receivers are left to take it", version, len(receivers), len(previous)
                )

    def _those_left(self, receivers: list[Member]) -> list[Member]:
        """Return those of `receivers` that can still receive weights.

        Waits at most LOSS_HEARTBEATS heartbeats for the hub to notice a loss, because the publisher may notice it earlier.
        """
        addresses = {m.address for m in receivers}
        deadline = time.monotonic() + LOSS_HEARTBEATS * self._applied.spec.runtime.deadlines.heartbeat
        while True:
            remaining = [m for m in self._versions.receivers(self._cluster.members()) if m.address in addresses]
            if len(remaining) < len(receivers) or time.monotonic() > deadline:
                return remaining
            time.sleep(LOOK_S)
