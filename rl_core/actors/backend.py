"""The port between a step and the machinery that trains it: the engine decides what is trained, the backend how.

StepEngine --parts, objective, normalizers--> TrainBackend.forward_backward --stats--> StepEngine

Where weights and optimizer state are, how they are saved, exported and published is nothing to a step: the actor's verbs answer for
that (`Actor`'s abstract methods), over the same object.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from torch import Tensor

from rl_core.actors.rows import Columns, StepRows
from rl_core.actors.schedule import OptimizerCounts
from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.losses import LossResult
from rl_core.algorithms.stats import Stat


class Scores(NamedTuple):
    """What a model says of a micro-batch's masked tokens, with gradient; 0 elsewhere."""

    log_probs: Tensor
    """[B, T] float32, at the sampling temperature."""
    entropy: Tensor
    """[B, T] float32."""
    values: Tensor | None = None
    """[B, T] float32, what the critic expects of the tokens from here on; None without a critic."""


class Scored(NamedTuple):
    """What a model says of rows without gradient, float32 on the CPU, 0 where the mask is false; None for what was not asked for."""

    log_probs: Tensor | None
    values: Tensor | None


Objective = Callable[[Scores, Columns, LossNormalizers], LossResult]
"""A micro-batch's share of the optimizer step's loss; shares of micro-batches and ranks are summed."""
Proceed = Callable[[], None]
"""Called on all ranks before each micro-batch, or once before a schedule of them that cannot be left; raises StepCancelled on all."""


class StepCancelled(Exception):
    """The step is given up; all ranks raise it before the same micro-batch."""


class TrainBackend(Protocol):
    """How one rank trains a model; implemented by `FSDPBackend`. All methods are collective, and all ranks get equally many parts.

    A part is one micro-batch, at least one row of one token. Ranks that train the same rows (tensor, context, pipeline) get equal parts.
    """

    counts: OptimizerCounts
    """How its optimizer steps ended; saved with its checkpoints."""

    @property
    def max_length(self) -> int:
        """Longest row in tokens."""

    @property
    def hidden_size(self) -> int:
        """Hidden size of the model, for the cost of a row."""

    def forward_backward(
        self, parts: Sequence[StepRows], objective: Objective, normalizers: LossNormalizers, *, proceed: Proceed
    ) -> list[dict[str, Stat]]:
        """Add the gradients of all `parts` to those held; return the objective's statistics, each on one rank only.

        A rank without a loss (a stage before the last) returns []. The gradient is that of the sum of the shares over parts and data
        ranks. When `proceed` raises, the gradients are dropped and the error is passed on.
        """

    def score_rows(
        self, parts: Sequence[StepRows], *, proceed: Proceed, log_probs: bool = True, values: bool = False
    ) -> list[Scored]:
        """Return what was asked for of each part, [B, T], from one pass; [] on a rank that has nothing of it.

        `values` needs a job with a critic.
        """

    def optimizer_step(self) -> tuple[float, list[float]]:
        """Apply the gradients, or skip and count a step that is not finite; return their norm and the learning rates used."""

    def reference(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the reference policy's weights."""
