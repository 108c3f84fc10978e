"""Completions that are kept for people to look at: from data ranks (training) and rollouts (validation) to the runner, which writes them.

data rank -> runner    StepSamples, the answer of `take_samples`
rollout   -> runner    the `samples` of ValidationScores; the `failed` sample of `return_group`

The samples of a filtered group are made by the runner from the record of the group.
"""

from typing import TYPE_CHECKING, Any

from rl_core.messages.registry import record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GIVEN, GENERATED, TRAINED = 0, 1, 2
"""Values of `KeptSample.mask`: a token of the prompt or the environment; one that the policy generated; one that it also trained on."""


@record
class KeptSample:
    """One completion with its tokens. T is the number of its tokens, prompt included."""

    group_id: str
    index: int
    """Place in its group."""
    prompt_index: int
    """Index of the prompt in the data set."""
    info: dict[str, Any]
    """What the data set and the environment know of the prompt, such as the ground truth; plain JSON values."""
    messages: tuple[tuple[str, str, int], ...]
    """Role, text and number of tokens of each message."""
    prompt_messages: int
    """Number of messages of the prompt, with which `messages` begin."""
    reward: float
    """As the environment gave it; NaN for a failed sample."""
    parts: dict[str, float]
    """Components of the reward by name."""
    reason: str
    """Why the completion ended (FinishReason)."""
    versions: tuple[int, int]
    """Lowest and highest policy version of its tokens."""
    token_ids: "NDArray[np.int32]"
    """[T]"""
    mask: "NDArray[np.uint8]"
    """[T] GIVEN, GENERATED or TRAINED."""
    engine: "NDArray[np.float32]"
    """[T] log-probabilities of the engine that generated; NaN where the mask is GIVEN."""
    token_versions: "NDArray[np.int32]"
    """[T] policy version of each token; -1 where the mask is GIVEN."""
    explanation: str = ""
    """Why the environment gave this reward, such as the answer of a judge; empty where it gives no text."""
    error: str = ""
    """Why the sample failed; empty for one that did not."""
    filtered: str = ""
    """Why dynamic sampling discarded the group; empty for other groups."""
    row: int = -1
    """Number of the row in its training step; -1 in validation."""
    shaped_reward: float | None = None
    """The reward that trained, after scaling and shaping; None in validation."""
    advantages: "NDArray[np.float32] | None" = None
    """[T]; None in validation."""


@record
class StepSamples:
    """What one rank kept of a training step."""

    samples: tuple[KeptSample, ...]
    """Completions of the groups that this rank received."""
    log_probs: tuple[tuple[int, "NDArray[np.float32]"], ...]
    """Row number and the trainer's log-probabilities [T] before the update, of rows that this rank trained; NaN where a token did not."""
