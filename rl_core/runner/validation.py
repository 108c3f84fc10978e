"""Measures the served weights on the validation split: same rollouts, same environments, no training record."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rl_core.api.errors import ChannelEmpty, ConfigError, DeadlineExceeded
from rl_core.api.job import RLJobSpec
from rl_core.api.records import DatumSpec
from rl_core.channel import Channel
from rl_core.runner.intake import put_all

logger = logging.getLogger(__name__)
SOLVED = 1.0 - 1e-6
"""A sample counts as accurate when its reward reaches 1."""


class Validation:
    """Puts every validation prompt on the prompts channel and collects the scores."""

    def __init__(self, spec: RLJobSpec, samples: Sequence[DatumSpec], *, prompts: Channel, results: Channel) -> None:
        """Measure `samples`. Raises ConfigError when there are none."""
        if not samples:
            raise ConfigError("data.validation must hold at least one prompt, got none; fill it or remove it")
        self._spec = spec
        self._samples = samples[: spec.validation.max_prompts] if spec.validation.max_prompts else samples
        self._prompts = prompts
        self._results = results
        self._round = 0

    def measure(
        self,
        version: int,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        short: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Return `val/*` of policy `version`; every prompt answers or is counted as an error.

        While `short()` nobody can answer, and the time does not count. Raises DeadlineExceeded naming how many answers are missing.
        """
        self._round += 1
        began = time.monotonic()
        put_all(self._prompts, [self._item(sample, version) for sample in self._samples])
        answers: dict[str, dict[str, Any]] = {}
        limit = self._spec.runtime.deadlines.rollout
        while len(answers) < len(self._samples) and not cancelled():
            if short():
                began = max(began, time.monotonic() - limit / 2)
            elif time.monotonic() - began > limit:
                raise DeadlineExceeded(
                    f"validation of version {version} must finish in {limit:.0f} s, got {len(answers)} of {len(self._samples)} answers"
                )
            try:
                answer = self._results.get(timeout=1.0)
            except (DeadlineExceeded, ChannelEmpty):
                continue
            if answer["group_id"].startswith(f"val{self._round}-"):
                answers[answer["group_id"]] = answer
        return summarise(list(answers.values()), group_size=self._spec.validation.samples_per_prompt)

    def fail(self, item: Mapping[str, Any], message: str) -> None:
        """Answer a prompt of `measure` that no rollout will: it counts as an error. From any thread."""
        unanswered: dict[str, list[Any]] = {"rewards": [], "lengths": [], "truncated": []}
        self._results.put({"group_id": item["group_id"], "error": message, **unanswered})

    def _item(self, sample: DatumSpec, version: int) -> dict[str, Any]:
        validation = self._spec.validation
        return {
            "mode": "validation",
            "sample": sample,
            "group_id": f"val{self._round}-{sample['idx']}",
            "lease_token": "",
            "attempt": 1,
            "policy_version": version,
            "num_generations": validation.samples_per_prompt,
            "greedy": validation.temperature == 0,
            "temperature": validation.temperature or 1.0,
        }


def summarise(answers: Sequence[dict[str, Any]], *, group_size: int) -> dict[str, float]:
    """Return `val/*` over finished prompts; prompts that failed are excluded and counted in `val/errors`.

    A sample without a reward (None) is no wrong one: it leaves accuracy, a prompt without any other leaves pass@k too.
    """
    good = [answer for answer in answers if not answer.get("error")]
    for answer in answers:
        if answer.get("error"):
            logger.warning("validation prompt %s: %s", answer["group_id"], answer["error"])
    metrics = {"val/errors": float(len(answers) - len(good)), "val/prompts": float(len(answers))}
    by_prompt = [[r for r in answer["rewards"] if r is not None and math.isfinite(r)] for answer in good]
    rewards = [reward for prompt in by_prompt for reward in prompt]
    if not rewards:
        return metrics
    solved_by_prompt = [max(prompt) >= SOLVED for prompt in by_prompt if prompt]
    return metrics | {
        "val/accuracy": float(np.mean([reward >= SOLVED for reward in rewards])),
        "val/reward_mean": float(np.mean(rewards)),
        "val/response_length_mean": float(np.mean([length for answer in good for length in answer["lengths"]])),
        "val/truncation_rate": float(np.mean([cut for answer in good for cut in answer["truncated"]])),
        f"val/pass@{group_size}": float(np.mean(solved_by_prompt)),
    }
