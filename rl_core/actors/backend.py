"""The interface between a training step and the library that runs the model: the engine decides what is trained, the backend how.

    StepEngine --parts, objective, normalizers--> TrainBackend.forward_backward --statistics--> StepEngine

A backend runs forward and backward passes. Optimizer steps, checkpoints, export and offloading belong to its `ModelManager`.

Legend: B rows of a micro-batch, T tokens of its longest row.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from rl_core.actors.rows import Columns, StepRows
from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.losses import LossResult
from rl_core.algorithms.stats import Stat

if TYPE_CHECKING:
    from rl_core.actors.manager import ModelManager


class Scores(NamedTuple):
    """A model's outputs for the tokens of a micro-batch that its mask selects, with gradient; 0 at the other tokens."""

    log_probs: Tensor
    """[B, T] float32, log-probabilities of the tokens at the sampling temperature, in nats."""
    entropy: Tensor
    """[B, T] float32, entropy of the distribution that each token was drawn from, in nats."""
    values: Tensor | None = None
    """[B, T] float32, the critic's estimate of the return from each token on; None without a critic."""


class Scored(NamedTuple):
    """A model's outputs for rows, without gradient: [B, T] float32 on the CPU, 0 where the mask is false; None if not requested."""

    log_probs: Tensor | None
    values: Tensor | None

    @classmethod
    def on_cpu(cls, log_probs: Tensor | None, values: Tensor | None) -> "Scored":
        """Return the tensors, copied to the CPU where they are on a device."""
        return cls(*(None if tensor is None else tensor.cpu() for tensor in (log_probs, values)))


Objective = Callable[[Scores, Columns, LossNormalizers], LossResult]
"""Computes a micro-batch's share of the loss of an optimizer step. The shares of all micro-batches and ranks are summed."""
Proceed = Callable[[], None]
"""Called on all ranks before each micro-batch, or once before a pipeline schedule, which cannot be interrupted. Raises StepCancelled on
all ranks when the step was cancelled."""


class StepCancelled(Exception):
    """The training step was cancelled. All ranks raise it before the same micro-batch."""


class TrainBackend(ABC):
    """How one rank runs a model; each backend derives its own. All methods are collective, and all ranks get equally many parts.

    A part is one micro-batch, at least one row of one token. Ranks that train the same rows (tensor, context, pipeline) get equal parts.
    """

    manager: "ModelManager"
    """The model and its optimizer: steps, checkpoints, export, offloading."""

    @abstractmethod
    def forward_backward(
        self, parts: Sequence[StepRows], objective: Objective, normalizers: LossNormalizers, *, proceed: Proceed
    ) -> list[dict[str, Stat]]:
        """Accumulate the gradients of all `parts`; return the objective's statistics of each part, each on one rank only.

        Ranks without a loss (pipeline stages before the last) return []. The gradient is that of the sum of the losses over parts and
        data ranks. When `proceed` raises StepCancelled, the gradients are dropped and the exception is passed on.
        """

    @abstractmethod
    def score_rows(
        self, parts: Sequence[StepRows], *, proceed: Proceed, log_probs: bool = True, values: bool = False
    ) -> list[Scored]:
        """Return the requested `log_probs` and `values` of each part, [B, T] each, from one forward pass without gradient.

        Ranks that have no scores return []. `values` needs a job with a critic.
        """
