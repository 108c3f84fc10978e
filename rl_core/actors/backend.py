"""The interface between a training step and the library that runs the model: StepEngine decides what is trained, the backend how.

    StepEngine --micro-batches, objective, normalizers--> TrainBackend.forward_backward --statistics--> StepEngine

A backend runs forward and backward passes. Optimizer steps, checkpoints, export and offloading belong to its `ModelManager`.

Legend: B rows of a micro-batch, T tokens of its longest row, K candidates of a token.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from rl_core.actors.rows import Columns, StepRows
from rl_core.actors.transfer import to_host
from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.losses import LossResult
from rl_core.algorithms.stats import Stat

if TYPE_CHECKING:
    from rl_core.actors.manager import ModelManager


class Scores(NamedTuple):
    """The model's outputs for one micro-batch with gradient, as the loss takes them.

    Values are 0 at tokens that the loss mask does not select.
    """

    log_probs: Tensor
    """[B, T] float32, log-probabilities of the tokens at the sampling temperature, in nats."""
    entropy: Tensor
    """[B, T] float32, entropy of the distribution that each token was drawn from, in nats."""
    values: Tensor | None = None
    """[B, T] float32, the critic's estimate of the return from each token on; None without a critic."""
    candidates: Tensor | None = None
    """[B, T, K] float32, log-probabilities of the column `candidates` in the place of each token; None without the column."""


class DetachedScores(NamedTuple):
    """The model's outputs for one micro-batch without gradient, [B, T] float32.

    Values are 0 where the loss mask is false. A field is None if it was not requested.
    """

    log_probs: Tensor | None
    values: Tensor | None

    @classmethod
    def on_cpu(cls, scores: "Sequence[DetachedScores]") -> "list[DetachedScores]":
        """Return `scores` on the CPU. They are copied together, so that the device is waited for once."""
        host_tensors = iter(to_host(tensor for batch_scores in scores for tensor in batch_scores if tensor is not None))
        return [
            cls(*(None if tensor is None else next(host_tensors) for tensor in batch_scores)) for batch_scores in scores
        ]


Objective = Callable[[Scores, Columns, LossNormalizers], LossResult]
"""A function that computes the loss of one micro-batch, already divided by the normalizers of its optimizer step.

The loss of the step is the sum over its micro-batches and over all ranks.
"""
Proceed = Callable[[], None]
"""A function that raises StepCancelled on all ranks if the step was cancelled. Backends call it on all ranks before each micro-batch, or
once before a pipeline schedule, which cannot be interrupted.
"""


class StepCancelled(Exception):
    """The training step was cancelled. All ranks raise it before the same micro-batch."""


class TrainBackend(ABC):
    """Runs the forward and backward passes of one rank. All methods are collective.

    Each element of `micro_batches` is one micro-batch with at least one row of one token. All ranks are given equally many. Ranks of the
    same replica (tensor, context and pipeline parallelism) are given the same rows.
    """

    manager: "ModelManager"
    """The model and its optimizer: steps, checkpoints, export, offloading."""

    @abstractmethod
    def forward_backward(
        self, micro_batches: Sequence[StepRows], objective: Objective, normalizers: LossNormalizers, *, proceed: Proceed
    ) -> list[dict[str, Stat]]:
        """Accumulate the gradients of all micro-batches; return the objective's statistics of each.

        The gradient is that of the sum of the losses over micro-batches and data ranks. Each statistic is reported by one rank of a
        replica; the ranks that compute no loss (pipeline stages before the last) return []. When `proceed` raises StepCancelled, the
        gradients are dropped and the exception is passed on.
        """

    @abstractmethod
    def score_rows(
        self, micro_batches: Sequence[StepRows], *, proceed: Proceed, log_probs: bool = True, values: bool = False
    ) -> list[DetachedScores]:
        """Return the requested `log_probs` and `values` of each micro-batch on the CPU, [B, T] each, from one forward pass without gradient.

        Ranks that compute no scores return []. `values` needs a job with a critic.
        """
