"""Publishes a version to the rollouts and proves that what they serve is what was trained (invariant I2)."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rl_core.api.errors import DeadlineExceeded, RLJobError, WeightsDiverged
from rl_core.api.job import RLJobSpec
from rl_core.messages.weights import PublishReport, ReceiverAddress
from rl_core.runner.membership import Membership
from rl_core.workers.group import Cluster, WorkerGroup

logger = logging.getLogger(__name__)
PROBE_TOKENS = 4
PROBE_PROMPT_LIMIT = 64


def sync_metrics(report: PublishReport) -> dict[str, float]:
    """Return `weights/*`."""
    return {
        "weights/version": float(report.version),
        "weights/publish_seconds": report.seconds,
        "weights/apply_seconds": report.apply_seconds,
        "weights/pause_seconds": report.pause_seconds,
        "weights/bytes": float(report.bytes),
        "weights/failed_receivers": float(len(report.failed)),
    }


class WeightSync:
    """Runs the sync of a version over the actor group and checks one fixed prompt afterwards."""

    def __init__(
        self, spec: RLJobSpec, *, cluster: Cluster, actor: WorkerGroup, membership: Membership, probe_prompt: list[int]
    ) -> None:
        """`probe_prompt`: token ids that every rollout continues greedily after each sync."""
        self._spec = spec
        self._cluster = cluster
        self._actor = actor
        self._membership = membership
        self._probe_prompt = probe_prompt[-PROBE_PROMPT_LIMIT:]
        self._checker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="content-check")
        self._due: tuple[int, tuple[str, ...]] | None = None
        """Version and rollouts that are not checked yet."""
        self._check: Future[None] | None = None
        self._acked: tuple[int, frozenset[str]] = (-1, frozenset())
        self.digest = ""
        """Digest of the manifest of the version published last."""

    def adopt(self, spec: RLJobSpec) -> None:
        """Go on as another spec says."""
        self._spec = spec

    def acked_at(self, version: int) -> frozenset[str]:
        """Return the names of the rollouts that acknowledged `version` in the last sync."""
        return self._acked[1] if self._acked[0] == version else frozenset()

    def publish(self, version: int) -> PublishReport:
        """Send `version` to every live rollout; the content check is due. Raises DeadlineExceeded below minReplicas."""
        self.confirm()
        with self._membership.sync_lock:
            report = self._send(version)
        self.digest = report.digest
        self._acked = (version, frozenset(report.acked))
        if report.failed:
            logger.warning("version %s: out of service until they pull it again: %s", version, report.failed)
            self._membership.rejoin(list(report.failed))
        if self._spec.weights.content_check and report.acked:
            self._due = (version, report.acked)
        return report

    def _send(self, version: int) -> PublishReport:
        """Return the publisher's report; where too few acknowledge because rollouts were lost meanwhile, those left are asked again."""
        receivers = self._receivers()
        while True:
            wanted = min(self._spec.rollout.min_replicas, len(receivers))
            sending = self._actor.sync_model_to_rollout(version, receivers, wanted)
            try:
                report: PublishReport = sending.wait(self._spec.runtime.deadlines.weight_sync)[0]
                return report
            except DeadlineExceeded:
                asked, receivers = receivers, self._receivers()
                left = {receiver.address for receiver in receivers}
                if all(receiver.address in left for receiver in asked):
                    raise
                logger.warning("version %s: %s of %s rollouts are left to take it", version, len(left), len(asked))

    def _receivers(self) -> list[ReceiverAddress]:
        return [
            ReceiverAddress(name=m.name, address=m.address, host_token=m.host_token)
            for m in self._cluster.members("rollout")
            if m.state in ("serving", "updating", "ready")
        ]

    def begin_check(self) -> None:
        """Start the content check that is due, in the background."""
        due, self._due = self._due, None
        if due is not None:
            self._check = self._checker.submit(self._compare, *due)

    def confirm(self) -> None:
        """Wait for the content check of the last sync. Raises WeightsDiverged when a rollout scores the prompt differently."""
        self.begin_check()
        check, self._check = self._check, None
        if check is not None:
            check.result(timeout=self._spec.runtime.deadlines.weight_sync)

    def _compare(self, version: int, names: tuple[str, ...]) -> None:
        scored: dict[tuple[int, ...], list[float]] = {}
        for name in names:
            try:
                answer = self._cluster.call(
                    name, "probe", self._probe_prompt, PROBE_TOKENS, timeout=self._spec.runtime.deadlines.rpc
                )
            except (RLJobError, DeadlineExceeded) as error:
                logger.warning("content check of %s skipped, it is gone or busy: %s", name, error)
                continue
            if answer["version"] == version:
                self._judge(name, version, answer, scored)

    def _judge(
        self, name: str, version: int, answer: dict[str, Any], scored: dict[tuple[int, ...], list[float]]
    ) -> None:
        ids = (*self._probe_prompt, *answer["ids"])
        if ids not in scored:
            results = self._actor.score(list(ids), len(self._probe_prompt)).wait(self._spec.runtime.deadlines.rpc)
            scored[ids] = next(result for result in results if result is not None)
        difference = max((abs(a - b) for a, b in zip(scored[ids], answer["logprobs"], strict=True)), default=0.0)
        tolerance = self._spec.weights.content_check_tolerance * (1 if self._spec.model.dtype == "float32" else 50)
        if not difference <= tolerance:
            raise WeightsDiverged(
                f"{name} must score a fixed prompt like the trainer at version {version} within {tolerance}, got a difference of "
                f"{difference:.3g} in log-probability; its weights are not the trained ones"
            )

    def close(self) -> None:
        """Stop checking."""
        self._checker.shutdown(wait=False, cancel_futures=True)
