"""`spec.algorithm.loss` and `spec.algorithm.importance`: the policy loss, its clip, and the weights of its tokens."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rl_core.api.base import Spec, rule
from rl_core.api.bounds import FUNCTION, Pattern
from rl_core.api.cel import Cel, literal

LOSSES = ("ppo_clip", "cispo", "gspo", "reinforce", "decoupled_ppo")
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
IMPORTANCE_BOUNDS = {"tis": (0.0, 2.0), "icepop": (0.5, 5.0), "seq-mask": (0.999, 1.002)}
"""Mode -> (low, high) where a job writes none; those of rl_core.algorithms.losses.importance, which needs torch."""
CLIP = (0.2, 0.2)
CLIPS = {"gspo": (3e-4, 4e-4)}
"""Loss -> (clipLow, clipHigh) where a job writes none, CLIP for the others; those of rl_core.algorithms.losses.policy."""
LOWEST, HIGHEST = (
    f"(has(self.{side}) ? self.{side} : {literal({mode: pair[index] for mode, pair in IMPORTANCE_BOUNDS.items()})}[$mode])"
    for index, side in enumerate(("low", "high"))
)
"""CEL expression of the bounds, with the defaults of the mode filled in."""


def one_of_or_function(*names: str, recipes: tuple[tuple[str, str], ...] = ()) -> Pattern:
    """Return the pattern of a name that is one of `names` or a function of the user; see `Pattern.recipes`."""
    return Pattern(
        regex=f"{'|'.join(map(re.escape, names))}|{FUNCTION}",
        rule=f"one of {', '.join(names)} or a function of yours as module:function",
        way_out="correct the name",
        names=names,
        recipes=recipes,
    )


RECIPES = (
    ("grpo", "the loss of GRPO is ppo_clip: docs/algorithms.md"),
    ("ppo", "the loss of PPO is ppo_clip: docs/algorithms.md"),
    ("dapo", "the loss of DAPO is ppo_clip with clipHigh above clipLow: docs/algorithms.md"),
    ("dr_grpo", "the loss of Dr. GRPO is ppo_clip, with algorithm.name: dr_grpo: docs/algorithms.md"),
)
"""Names of algorithms whose loss has another name."""
LossName = Annotated[str, Field(max_length=253), one_of_or_function(*LOSSES, recipes=RECIPES)]


class LossSpec(Spec):
    """The policy loss with its KL and entropy terms."""

    name: LossName = "ppo_clip"
    """Policy loss: a registered name, or your own function as `module:function`."""
    clip_low: float | None = Field(None, ge=0, le=1)
    """The policy ratio is clipped from below at 1 - clipLow; null = 0.2, for gspo 0.0003, as its ratio is a mean over the sequence."""
    clip_high: float | None = Field(None, ge=0)
    """The policy ratio is clipped from above at 1 + clipHigh; a value above clipLow is the asymmetric clip of DAPO. null = 0.2, for gspo 0.0004."""
    dual_clip: float | None = Field(None, gt=1)
    """Dual-clip PPO: bound of the loss for negative advantages; null = off. For ppo_clip and your own functions with an argument `dual_clip`."""
    behavior_weight_max: float | None = Field(None, gt=0)
    """Tokens whose ratio of proximal to behavior policy exceeds this are excluded from the loss; null = off. For decoupled_ppo and your own
    functions with an argument `behavior_weight_max`."""
    aggregation: Aggregation | None = None
    """How the losses of tokens are averaged; null = token-mean, for dr_grpo seq-mean-token-sum-norm."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of KL(policy || reference) in the loss; 0 = no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = "k3"
    """Estimator of the KL term."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""

    @property
    def clip(self) -> tuple[float, float]:
        """Return (low, high); a bound that is not given has the default of the loss."""
        low, high = CLIPS.get(self.name, CLIP)
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    @rule(
        Cel(
            holds="!has(self.dualClip) || $name == 'ppo_clip' || $name.contains(':')",
            refusal="dualClip is honoured by ppo_clip only, got loss %s; remove dualClip or choose ppo_clip",
            values=("$name",),
            field="dualClip",
        ),
        Cel(
            holds="!has(self.behaviorWeightMax) || $name == 'decoupled_ppo' || $name.contains(':')",
            refusal="behaviorWeightMax is honoured by decoupled_ppo only, got loss %s; remove it or choose decoupled_ppo",
            values=("$name",),
            field="behaviorWeightMax",
        ),
    )
    def _bounds_have_their_loss(self) -> Iterator[str]:
        if ":" in self.name:
            return
        if self.dual_clip is not None and self.name != "ppo_clip":
            yield (f"dualClip is honoured by ppo_clip only, got loss {self.name}; remove dualClip or choose ppo_clip")
        if self.behavior_weight_max is not None and self.name != "decoupled_ppo":
            yield f"behaviorWeightMax is honoured by decoupled_ppo only, got loss {self.name}; remove it or choose decoupled_ppo"


class ImportanceSpec(Spec):
    """Importance weights that correct the difference between the log-probabilities of rollout and trainer."""

    mode: Literal["tis", "icepop", "seq-mask"] = "tis"
    """Treatment of weights outside [low, high]. tis: they are truncated to the bound; icepop: their tokens are excluded; seq-mask: their
    sequences are excluded."""
    level: Literal["token", "sequence"] = "token"
    """Compute one weight per token, or one per sequence."""
    low: float | None = Field(None, ge=0)
    """Lower bound of a weight; null = the default of the mode."""
    high: float | None = Field(None, gt=0)
    """Upper bound of a weight; null = the default of the mode."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Return (low, high); a bound that is not given has the default of the mode."""
        low, high = IMPORTANCE_BOUNDS[self.mode]
        return low if self.low is None else self.low, high if self.high is None else self.high

    @rule(
        Cel(
            holds=f"{LOWEST} <= {HIGHEST}",
            refusal="low must be at most high, got %s and %s (mode %s); lower low or raise high",
            values=(LOWEST, HIGHEST, "$mode"),
            field="low",
        )
    )
    def _bounds(self) -> Iterator[str]:
        low, high = self.bounds
        if low > high:
            yield f"low must be at most high, got {low:g} and {high:g} (mode {self.mode}); lower low or raise high"
