"""A group that computes the old log-probabilities of the policy on devices of its own, so that the trainer only trains.

groups:
- name: inference
  worker: rl_core.groups.inference:Inference
  weights: pulls
algorithm: {recomputeLogProbs: true, inference: inference}
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from rl_core.api.base import Spec
from rl_core.envs.base import parse_config
from rl_core.groups.model import after_nothing, entries, token_scores
from rl_core.groups.policy import PolicyWorker
from rl_core.plan.groups import ACTOR


class InferenceConfig(Spec):
    """Options of `Inference`."""

    batch_tokens: int = Field(4096, ge=1)
    """Largest number of tokens of a forward pass, padding included; the logits of all of them are in memory at once."""


class Inference(PolicyWorker):
    """Scores token sequences with the policy."""

    peer_methods: ClassVar[Mapping[str, frozenset[str]]] = {
        ACTOR: PolicyWorker.peer_methods[ACTOR] | {"log_probs"},
    }

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Check `config`. Raises ConfigError for an option that does not exist."""
        super().__init__(config)
        self._batch_tokens = parse_config(InferenceConfig, config, where="config").batch_tokens

    async def log_probs(
        self, rows: Sequence[np.ndarray], temperature: float, version: int, seconds: float
    ) -> list[np.ndarray]:
        """Return log p(row[t] | row[:t]) of each row of token ids [T], float32 [T]; the first entry of a row is 0.

        The logits are divided by `temperature`. `version` is the version of the weights, for which the call waits up to `seconds`.
        Raises DataError for an empty row and for ids outside the vocabulary, and the errors of `policy`.
        """
        async with self.policy(version, seconds=seconds) as model:
            return await asyncio.to_thread(self._scored, model, rows, temperature)

    def _scored(self, model: Any, rows: Sequence[np.ndarray], temperature: float) -> list[np.ndarray]:
        log_probs: list[np.ndarray] = [np.zeros(0, np.float32)] * len(rows)
        for index, targets, scores in token_scores(model, rows, temperature, batch_tokens=self._batch_tokens):
            log_probs[index] = after_nothing(entries(targets, scores))
        self.record_progress("inference_rows", len(rows))
        return log_probs
