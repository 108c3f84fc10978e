"""The content check: compares log-probabilities of rollouts and trainer after a weight sync, and ends the run on a `DivergenceAlarm`.

Each rollout continues one fixed prompt with a fixed seed at the training temperature. The trainer computes the log-probabilities of the
sampled tokens. Checksums verify the bytes that were sent; this check verifies what the engine computes with them.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from rl_core.api.errors import DeadlineExceeded, RLJobError, WeightsDiverged
from rl_core.messages.groups import ProbeAnswer
from rl_core.runner.changes import AppliedSpec
from rl_core.runner.device_schedule import DeviceSchedule
from rl_core.runner.divergence import DivergenceAlarm
from rl_core.workers.cluster import Cluster, PendingCall
from rl_core.workers.group import WorkerGroup

logger = logging.getLogger(__name__)
PROBE_TOKENS = 2
"""Tokens to sample: one from the prefill and one from a decode step with the KV cache. Each costs the time of one decode step."""
PROBE_PROMPT_LIMIT = 64


@dataclass(slots=True)
class CheckCounts:
    """Numbers of rollouts checked so far."""

    passed: int = 0
    skipped: int = 0
    """Rollouts that were lost, busy, or had another version when they were asked."""


class ContentCheck:
    """Runs one check at a time in the background, between the leasing of a step's prompts and the next sync.

    Where actor and rollouts share devices, the trainer computes its part after the generation of the step.
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
        """Check with `prompt_ids`, token ids that every rollout continues after each sync; at most the last 64 are used."""
        self.counts = CheckCounts()
        self._applied, self._cluster, self._actor, self._schedule = applied, cluster, actor, schedule
        self._prompt = list(prompt_ids[-PROBE_PROMPT_LIMIT:])
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="content-check")
        self._next_check: tuple[int, tuple[str, ...]] | None = None
        """Version and rollouts of the check that is not started yet; None without one."""
        self._running: Future[None] | None = None
        self._alarms: dict[str, DivergenceAlarm] = {}
        """By rollout."""

    def schedule(self, version: int, rollouts: Sequence[str]) -> None:
        """Schedule a check of these rollouts for `version`; `begin` starts it."""
        if self._applied.spec.weights.content_check and rollouts:
            self._next_check = (version, tuple(rollouts))

    def begin(self) -> None:
        """Start the scheduled check in the background.

        Call it after the step's prompts are leased, so that the check does not delay them.
        """
        arguments, self._next_check = self._next_check, None
        if arguments is not None:
            self._running = self._pool.submit(self._compare, *arguments)

    def confirm(self) -> None:
        """Wait for the check of the last sync. Raises WeightsDiverged if a rollout's log-probabilities differ.

        Call it before every training: the next optimizer step overwrites the weights that the trainer checks with.
        """
        self.begin()
        running, self._running = self._running, None
        if running is not None:
            running.result(timeout=self._applied.spec.runtime.deadlines.weight_sync)

    def close(self) -> None:
        """Cancel a scheduled check and stop the background thread; does not wait for a running check."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compare(self, version: int, names: tuple[str, ...]) -> None:
        seconds = self._applied.spec.runtime.deadlines.rpc
        arguments = [self._prompt, PROBE_TOKENS]
        with self._schedule.generating():
            calls = {name: self._cluster.submit(name, "probe", arguments, {}, timeout=seconds) for name in names}
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
        """Return the continuation of a rollout; None if it is lost, busy, or has another version."""
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
        if name not in self._alarms:
            exact = spec.model.dtype == "float32"
            self._alarms[name] = DivergenceAlarm(spec.weights.content_check_tolerance, exact=exact)
        differences = [abs(a - b) for a, b in zip(scored[ids], answer.logprobs, strict=True)]
        if (alarm := self._alarms[name].judge(differences)) is not None:
            raise WeightsDiverged(
                f"{name} must score a fixed prompt like the trainer at version {version} within {alarm[1]:.3g}, got a difference of "
                f"{alarm[0]:.3g} in log-probability; its weights are not the trained ones"
            )
