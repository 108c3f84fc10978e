"""Validates weights on the validation split, with the rollouts and environments of training. No records are trained on."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby, islice

import numpy as np

from rl_core.api.errors import ChannelEmpty, ConfigError, DeadlineExceeded
from rl_core.api.job import RLJobSpec
from rl_core.api.records import DatumSpec
from rl_core.channel import Channel
from rl_core.messages.groups import ValidationScores
from rl_core.messages.samples import KeptSample
from rl_core.runner.dispatcher import Dispatcher
from rl_core.runner.prompt_order import index_of
from rl_core.runner.validation_round import ValidationRound

logger = logging.getLogger(__name__)
SOLVED = 1.0 - 1e-6
"""A sample counts as accurate when its reward reaches 1."""
LOOK = 1.0
"""Seconds between two checks of whether a wait for scores should continue."""


class Validation:
    """Has rollouts generate and score every validation prompt, and collects the scores."""

    def __init__(
        self,
        spec: RLJobSpec,
        samples: Sequence[DatumSpec],
        *,
        dispatcher: Dispatcher,
        results: Channel,
        attempts: dict[str, int],
    ) -> None:
        """Validate with `samples`, which `dispatcher` leases; `results` carries ValidationScores. Raises ConfigError without samples."""
        if not samples:
            raise ConfigError("data.validation must hold at least one prompt, got none; fill it or remove it")
        self._spec = spec
        self._samples = _first_of_each_set(samples, spec.validation.max_prompts)
        self._dispatcher, self._results, self._attempts = dispatcher, results, attempts
        self._rounds = 0
        self.kept: list[KeptSample] = []
        """Samples of the last round in the order of the prompts, followed by the samples that made their prompts fail."""

    def measure(
        self,
        version: int,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        short: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Return the metrics `val/*` of policy `version`. Each prompt is scored, or counted as an error.

        `cancelled()` ends the wait early, with the scores so far. While `short()` returns True, because too few members are present, at
        least half of deadlines.rollout remains. Raises DeadlineExceeded, with the number of answers, after deadlines.rollout.
        """
        self._rounds += 1
        validation = ValidationRound(
            self._rounds,
            version,
            self._samples,
            self._spec.validation,
            attempts=self._attempts,
            lease_seconds=self._spec.runtime.lease_seconds,
        )
        self._dispatcher.open_validation(validation)
        try:
            self._collect(validation, cancelled, short)
        finally:
            self._dispatcher.close_validation()
        self.kept = sorted(
            (sample for scores in validation.scores.values() for sample in scores.samples),
            key=lambda sample: (sample.prompt_index, sample.index),
        )
        self.kept += validation.failed[: self._spec.samples.validation_groups]
        for group_id, message in validation.failures.items():
            logger.warning("validation prompt %s: %s", group_id, message)
        return self._metrics(validation)

    def _metrics(self, validation: ValidationRound) -> dict[str, float]:
        """Return `val/*` over all prompts. If the job has several data sets, also return `val/<name>/*` for each of them."""
        scores: dict[str, list[ValidationScores]] = {}
        errors = Counter(self._set_of(group_id) for group_id in validation.failures)
        for group_id, score in validation.scores.items():
            scores.setdefault(self._set_of(group_id), []).append(score)
        size = self._spec.validation.samples_per_prompt
        metrics = summarise(list(validation.scores.values()), errors=len(validation.failures), group_size=size)
        for name in (scores | errors).keys() - {""}:
            set_metrics = summarise(scores.get(name, []), errors=errors[name], group_size=size)
            metrics |= {f"val/{name}/{key.removeprefix('val/')}": value for key, value in set_metrics.items()}
        return metrics

    def _set_of(self, group_id: str) -> str:
        """Return the name of the data set of a validation prompt; empty if the job has only one data set."""
        return self._samples[index_of(group_id)].get("data_set", "")

    def _collect(
        self, validation: ValidationRound, cancelled: Callable[[], bool], lacks_rollouts: Callable[[], bool]
    ) -> None:
        start, limit = time.monotonic(), self._spec.runtime.deadlines.rollout
        while not cancelled():
            num_answered = len(validation.scores) + len(validation.failures)
            if num_answered == len(self._samples):
                return
            if lacks_rollouts():
                start = max(start, time.monotonic() - limit / 2)
            elif time.monotonic() - start > limit:
                raise DeadlineExceeded(
                    f"validation of version {validation.version} must finish in {limit:.0f} s, got {num_answered} of {len(self._samples)} answers"
                )
            try:
                self._dispatcher.take_scores(self._results.get(timeout=LOOK))
            except (DeadlineExceeded, ChannelEmpty):
                continue


def _first_of_each_set(samples: Sequence[DatumSpec], limit: int | None) -> Sequence[DatumSpec]:
    """Return at most `limit` samples of each validation data set, the first ones; all of them if `limit` is None.

    The samples of a data set must be next to each other in `samples`.
    """
    sets = groupby(samples, key=lambda sample: sample.get("data_set"))
    return [sample for _, set_samples in sets for sample in islice(set_samples, limit)]


def summarise(scores: Sequence[ValidationScores], *, errors: int, group_size: int) -> dict[str, float]:
    """Return `val/*` over the scored prompts; `errors` is the number of prompts that failed.

    A sample without a reward (None) is not a wrong answer: accuracy leaves it out, and pass@k leaves out a prompt that has no other sample.
    """
    metrics = {"val/errors": float(errors), "val/prompts": float(len(scores) + errors)}
    by_prompt = [[r for r in prompt.rewards if r is not None and np.isfinite(r)] for prompt in scores]
    rewards = [reward for prompt in by_prompt for reward in prompt]
    if not rewards:
        return metrics
    solved_by_prompt = [max(prompt) >= SOLVED for prompt in by_prompt if prompt]
    return metrics | {
        "val/accuracy": float(np.mean([reward >= SOLVED for reward in rewards])),
        "val/reward_mean": float(np.mean(rewards)),
        "val/response_length_mean": float(np.mean([length for prompt in scores for length in prompt.lengths])),
        "val/truncation_rate": float(np.mean([truncated for prompt in scores for truncated in prompt.truncated])),
        f"val/pass@{group_size}": float(np.mean(solved_by_prompt)),
    }
