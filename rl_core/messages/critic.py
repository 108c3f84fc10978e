"""What the actors send to the group that holds the critic. Legend: T tokens of the row."""

import numpy as np

from rl_core.messages.registry import record


@record
class CriticRow:
    """One sample of a step, on which the critic trains."""

    group_id: str
    """Prompt group of the sample. The rows of a step are ordered by it."""
    input_ids: np.ndarray
    """[T] int64 token ids."""
    loss_mask: np.ndarray
    """[T] bool, true on tokens that train."""
    values: np.ndarray
    """[T] float32, what the critic predicted before the step."""
    returns: np.ndarray
    """[T] float32, the returns that the critic learns to predict."""
