"""Has the group `algorithm.inference` compute the old log-probabilities of a step."""

import logging

from torch import Tensor

from rl_core.actors.row_calls import RowCalls
from rl_core.api.errors import InfrastructureError
from rl_core.batching.collate import TrainingBatch
from rl_core.workers.worker import Worker

logger = logging.getLogger(__name__)
MEMBER_SHARE = 0.9
"""Share of the wait that a member may wait for the version, so that its answer comes in time."""


class InferenceGroup:
    """The inference group of a job, as an actor calls it."""

    def __init__(self, worker: Worker, group: str, *, temperature: float, seconds: float) -> None:
        """`temperature` divides the logits, as where the tokens were sampled. `seconds` bounds the wait for all answers of a step."""
        self._calls, self._group = RowCalls(worker, seconds=seconds), group
        self._temperature, self._seconds = temperature, seconds

    def __call__(self, batch: TrainingBatch, version: int) -> Tensor | None:
        """Return the log-probabilities of `batch` at `version` of the weights, [B, S] float32, zeros where nothing trains.

        None means that the group did not answer in time, or not with this version; the trainer then computes them itself.
        """
        options = (self._temperature, version, MEMBER_SHARE * self._seconds)
        try:
            return self._calls.token_values(self._group, batch, "log_probs", *options)
        except InfrastructureError as error:
            logger.warning("the trainer computes the old log-probabilities of this step itself: %s", error)
            return None
