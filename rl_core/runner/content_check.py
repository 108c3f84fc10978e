"""Scores one fixed prompt with the rollouts and with the trainer after a sync: served weights that differ end the run.

Each rollout goes on with the prompt by a fixed seed at the training temperature; the trainer scores what it drew. Checksums prove the
bytes that were sent; this proves what the engine computes with them.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from rl_core.api.errors import DeadlineExceeded, RLJobError, WeightsDiverged
from rl_core.messages.groups import ProbeAnswer
from rl_core.runner.changes import AppliedSpec
from rl_core.runner.device_schedule import DeviceSchedule
from rl_core.workers.cluster import Cluster, PendingCall
from rl_core.workers.group import WorkerGroup

logger = logging.getLogger(__name__)
PROBE_TOKENS = 2
"""One by the prefill, one by a decode step over its cache: each costs an asynchronous step the time of one more decode step."""
PROBE_PROMPT_LIMIT = 64


@dataclass(slots=True)
class CheckCounts:
    """What became of the checks so far."""

    passed: int = 0
    skipped: int = 0
    """Rollouts that were gone, busy or further when they were asked."""


class ContentCheck:
    """One check at a time, in the background: begun once prompts are out, in before the next sync.

    Where actor and rollouts share devices, the trainer scores once the loop has left the generation under way.
    """

    def __init__(
        self,
        applied: AppliedSpec,
        *,
        cluster: Cluster,
        actor: WorkerGroup,
        schedule: DeviceSchedule,
        prompt_ids: Sequence[int],
    ) -> None:
        """`prompt_ids`: token ids that every rollout continues after each sync."""
        self.counts = CheckCounts()
        self._applied, self._cluster, self._actor, self._schedule = applied, cluster, actor, schedule
        self._prompt = list(prompt_ids[-PROBE_PROMPT_LIMIT:])
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="content-check")
        self._due: tuple[int, tuple[str, ...]] | None = None
        """Version and rollouts that are not checked yet."""
        self._running: Future[None] | None = None

    def due(self, version: int, rollouts: Sequence[str]) -> None:
        """Have these rollouts checked for `version` at the next `begin`."""
        if self._applied.spec.weights.content_check and rollouts:
            self._due = (version, tuple(rollouts))

    def begin(self) -> None:
        """Start the check that is due, in the background. Not before the prompts of a step are out: engines would answer it first."""
        due, self._due = self._due, None
        if due is not None:
            self._running = self._pool.submit(self._compare, *due)

    def confirm(self) -> None:
        """Wait for the check of the last sync. Raises WeightsDiverged when a rollout scores the prompt differently.

        Due before every training, whatever it trains: the next optimizer step takes away the weights to score with.
        """
        self.begin()
        running, self._running = self._running, None
        if running is not None:
            running.result(timeout=self._applied.spec.runtime.deadlines.weight_sync)

    def close(self) -> None:
        """Stop checking."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compare(self, version: int, names: tuple[str, ...]) -> None:
        seconds = self._applied.spec.runtime.deadlines.rpc
        asked = [self._prompt, PROBE_TOKENS]
        with self._schedule.generating():
            calls = {name: self._cluster.submit(name, "probe", asked, {}, timeout=seconds) for name in names}
            answers = {name: self._answer(name, call, version) for name, call in calls.items()}
        scored: dict[tuple[int, ...], list[float]] = {}
        with self._schedule.training():
            for name, answer in answers.items():
                if answer is None:
                    self.counts.skipped += 1
                else:
                    self._judge(name, version, answer, scored)
                    self.counts.passed += 1

    def _answer(self, name: str, call: PendingCall, version: int) -> ProbeAnswer | None:
        """Return how a rollout goes on with the prompt; None when it is gone, busy, or serves another version."""
        try:
            answer: ProbeAnswer = call.future.result().value
        except (RLJobError, DeadlineExceeded) as error:
            logger.warning("content check of %s skipped, it is gone or busy: %s", name, error)
            return None
        return answer if answer.version == version else None

    def _judge(self, name: str, version: int, answer: ProbeAnswer, scored: dict[tuple[int, ...], list[float]]) -> None:
        spec, ids = self._applied.spec, (*self._prompt, *answer.ids)
        if ids not in scored:
            results = self._actor.score(list(ids), len(self._prompt)).wait(spec.runtime.deadlines.rpc)
            scored[ids] = next(result for result in results if result is not None)
        difference = max((abs(a - b) for a, b in zip(scored[ids], answer.logprobs, strict=True)), default=0.0)
        tolerance = spec.weights.content_check_tolerance * (1 if spec.model.dtype == "float32" else 50)
        if not difference <= tolerance:
            raise WeightsDiverged(
                f"{name} must score a fixed prompt like the trainer at version {version} within {tolerance}, got a difference of "
                f"{difference:.3g} in log-probability; its weights are not the trained ones"
            )
