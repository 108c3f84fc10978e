"""`spec.algorithm`: what is optimised, on how many prompts, and how samples are filtered."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rl_core.api.base import Spec, rule
from rl_core.api.bounds import FUNCTION, Pattern, listed

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "raw")
ADVANTAGE_ALIASES = {"reinforce++": "reinforce_plus_plus"}
"""Other spellings a job may use -> the name."""
LOSSES = ("ppo_clip", "cispo", "gspo", "reinforce")
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
GROUP_RELATIVE: frozenset[str] = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"})
"""Advantages that compare the samples of one prompt and therefore need at least two."""
PER_TOKEN: frozenset[str] = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Advantages with rewards per token, which whiten by themselves."""


IMPORTANCE_BOUNDS = {"tis": (0.0, 2.0), "icepop": (0.5, 5.0), "seq-mask": (0.999, 1.002)}
"""Mode -> (low, high) where a job writes none; those of rl_core.algorithms.losses.importance, which needs torch."""
CLIP = (0.2, 0.2)
CLIPS = {"gspo": (3e-4, 4e-4)}
"""Loss -> (clipLow, clipHigh) where a job writes none, CLIP for the others; those of rl_core.algorithms.losses.policy."""


def _named(name: Any) -> Any:
    return ADVANTAGE_ALIASES.get(name, name) if isinstance(name, str) else name


def _one_of(*names: str) -> Pattern:
    return Pattern(
        regex=f"{'|'.join(map(re.escape, names))}|{FUNCTION}",
        rule=f"one of {', '.join(names)} or a function of yours as module:function",
        way_out="correct the name",
    )


AdvantageName = Annotated[str, Field(max_length=253), BeforeValidator(_named), _one_of(*ADVANTAGES, *ADVANTAGE_ALIASES)]
LossName = Annotated[str, Field(max_length=253), _one_of(*LOSSES)]


class LossSpec(Spec):
    """The policy loss and what is added to it (algorithms.md 5, 6)."""

    name: LossName = "ppo_clip"
    """Loss from the registry, or a function of yours as `module:function`."""
    clip_low: float | None = Field(None, ge=0, le=1)
    """The ratio is clipped below at 1 - clipLow; null = 0.2, and 0.0003 for gspo, whose ratio is a mean over the row."""
    clip_high: float | None = Field(None, ge=0)
    """The ratio is clipped above at 1 + clipHigh; larger than clipLow = asymmetric clip (DAPO); null = 0.2, 0.0004 for gspo."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of the loss for negative advantages (dual-clip PPO); null = off. With ppo_clip and functions of yours that take `dual_clip`."""
    aggregation: Aggregation | None = None
    """How token losses become one number; null = token-mean, or seq-mean-token-sum-norm for dr_grpo."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of KL(policy || reference) in the loss; 0 = no reference model is held."""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = "k3"
    """Estimator of the KL term."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""

    @property
    def clip(self) -> tuple[float, float]:
        """Return (low, high), the loss's defaults where none was written."""
        low, high = CLIPS.get(self.name, CLIP)
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    @rule
    def _dual_clip_needs_ppo(self) -> Iterator[str]:
        if self.dual_clip is not None and self.name != "ppo_clip" and ":" not in self.name:
            yield (f"dualClip is honoured by ppo_clip only, got loss {self.name}; remove dualClip or choose ppo_clip")


class ImportanceSpec(Spec):
    """Correction of the difference between rollout and trainer log-probabilities (algorithms.md 7)."""

    mode: Literal["tis", "icepop", "seq-mask"] = "tis"
    """How weights outside [low, high] are treated."""
    level: Literal["token", "sequence"] = "token"
    """Whether a weight is per token or per sequence."""
    low: float | None = Field(None, ge=0)
    """Lower bound; null = the mode's default."""
    high: float | None = Field(None, gt=0)
    """Upper bound; null = the mode's default."""

    @rule
    def _bounds(self) -> Iterator[str]:
        default_low, default_high = IMPORTANCE_BOUNDS[self.mode]
        low = default_low if self.low is None else self.low
        high = default_high if self.high is None else self.high
        if low > high:
            yield f"low must be at most high, got {low:g} and {high:g} (mode {self.mode}); lower low or raise high"


class DynamicSamplingSpec(Spec):
    """Groups whose rewards do not differ are replaced by other prompts (DAPO)."""

    enabled: bool = False
    """Whether uninformative groups are replaced."""
    min_std: float = Field(0.0, ge=0)
    """A group trains only when the deviation of its raw rewards is above this; needs enabled."""

    @rule
    def _bound_is_used(self) -> Iterator[str]:
        if self.min_std and not self.enabled:
            yield f"minStd needs enabled: true, got minStd {self.min_std:g} without it; set enabled or remove minStd"


class OverlongSpec(Spec):
    """What happens to completions that were cut."""

    filter: bool = False
    """True: cut completions train nothing and leave the statistics."""
    keep_in_baseline: bool = False
    """Keep their reward in the group's baseline; needs filter."""
    buffer: int | None = Field(None, ge=1, lt=2**31)
    """Tokens before maxNewTokens in which a length penalty grows; null = no penalty."""
    penalty: float = Field(1.0, ge=0)
    """Penalty at the full buffer; needs buffer."""
    penalty_cap: float | None = Field(None, ge=0)
    """Largest penalty; null = unbounded; needs buffer."""
    stop_properly_coefficient: float | None = Field(None, ge=0, le=1)
    """Factor on positive rewards of cut completions; null = off."""

    @rule
    def _baseline_is_used(self) -> Iterator[str]:
        if self.keep_in_baseline and not self.filter:
            yield "keepInBaseline needs filter: true, got filter false; set filter or remove keepInBaseline"

    @rule
    def _penalty_is_used(self) -> Iterator[str]:
        if self.buffer is not None:
            return
        if self.penalty != 1.0:
            yield f"penalty needs buffer, got penalty {self.penalty:g} without one; set buffer or remove penalty"
        if self.penalty_cap is not None:
            yield f"penaltyCap needs buffer, got penaltyCap {self.penalty_cap:g} without one; set buffer or remove penaltyCap"


class RewardScaleSpec(Spec):
    """Linear map of raw rewards, clamped to the source range."""

    source_min: float
    """Raw reward mapped to targetMin."""
    source_max: float
    """Raw reward mapped to targetMax."""
    target_min: float = 0.0
    """Scaled reward at sourceMin."""
    target_max: float = 1.0
    """Scaled reward at sourceMax."""

    @rule
    def _range(self) -> Iterator[str]:
        if self.source_max <= self.source_min:
            yield (
                f"sourceMax must be greater than sourceMin, got {self.source_min:g} and {self.source_max:g}; swap or widen them"
            )


class AlgorithmSpec(Spec):
    """The algorithm and the shape of a step."""

    name: AdvantageName = "grpo"
    """Advantage estimator from the registry, or a function of yours as `module:function`."""
    prompts_per_step: int = Field(32, ge=1, le=65536)
    """Prompt groups trained per step."""
    group_size: int = Field(8, ge=1, le=1024)
    """Completions per prompt."""
    steps: int = Field(200, ge=1, lt=2**31)
    """Training steps of the run."""
    loss: LossSpec = LossSpec()
    """The policy loss."""
    max_staleness: Literal[0] = 0
    """Versions a trained token may be old; 0 = on policy."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of data order, sampling and shuffling."""
    optimizer_steps_per_batch: int = Field(1, ge=1, lt=2**31)
    """Mini-batches (optimizer steps) a step's rows are cut into."""
    update_epochs: int = Field(1, ge=1, lt=2**31)
    """Passes over a step's rows."""
    recompute_log_probs: bool = False
    """True: old log-probabilities come from the trainer before the update; false: from the rollout."""
    importance: ImportanceSpec | None = None
    """Correction weights; needs recomputeLogProbs."""
    sequence_error_threshold: float | None = Field(None, gt=1)
    """Rows whose mean exp|rollout - old| is above this train nothing; null = off; needs recomputeLogProbs."""
    advantage_clip: float | None = Field(None, gt=0)
    """Advantages are clamped to +- this; null = off."""
    whiten: bool = False
    """Whiten advantages once over the step's tokens (not for estimators that already do)."""
    reward_kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the per-token KL(policy || reference), estimator k1, taken off the rewards; with reinforce_plus_plus(_baseline) only."""
    reward_scale: RewardScaleSpec | None = None
    """Linear map of rewards before advantages; null = raw rewards."""
    dynamic_sampling: DynamicSamplingSpec = DynamicSamplingSpec()
    """Replacement of uninformative groups."""
    overlong: OverlongSpec = OverlongSpec()
    """Treatment of cut completions."""
    max_generation_batches: int = Field(3, ge=1, lt=2**31)
    """Rounds of promptsPerStep groups dynamic sampling may use in a step before the run fails."""
    max_policy_ratio: float | None = Field(None, gt=1)
    """Skip a step's remaining mini-batches once the mean ratio exceeds this; null = off."""
    max_policy_kl: float | None = Field(None, gt=0)
    """Skip a step's remaining mini-batches once approx_kl exceeds this; null = off."""
    allow_truncated_sampling: bool = False
    """Accept top-p, top-k in training rollouts although they bias the ratio; needs recomputeLogProbs."""
    on_drop: Literal["replace", "shrink"] = "replace"
    """A dropped group is replaced by the next prompt, or the step shrinks."""
    min_batch_fraction: float = Field(0.9, gt=0, le=1)
    """Smallest share of promptsPerStep a shrunk step may have."""
    max_dropped_groups: int = Field(0, ge=0, lt=2**31)
    """Groups the whole run may drop; the next one ends it (0: the first)."""
    max_consecutive_drops: int = Field(0, ge=0, lt=2**31)
    """Drops in a row without a trained group that end the run; 0 = not bounded apart from maxDroppedGroups."""

    @property
    def aggregation(self) -> Aggregation:
        """Return the loss aggregation, the estimator's default where none was written."""
        if self.loss.aggregation is not None:
            return self.loss.aggregation
        return "seq-mean-token-sum-norm" if self.name == "dr_grpo" else "token-mean"

    @property
    def needs_reference(self) -> bool:
        """Return whether the reference policy's log-probabilities enter, in the loss or in the rewards."""
        return self.loss.kl_coefficient > 0 or self.reward_kl_coefficient > 0

    @rule
    def _kl_once(self) -> Iterator[str]:
        if self.reward_kl_coefficient > 0 and self.name not in PER_TOKEN:
            yield f"rewardKlCoefficient needs rewards per token, got {self.name}; use loss.klCoefficient or reinforce_plus_plus"
        if self.reward_kl_coefficient > 0 and self.loss.kl_coefficient > 0:
            yield (
                f"rewardKlCoefficient must be 0 beside loss.klCoefficient, which counts the same KL, got {self.reward_kl_coefficient:g} and "
                f"{self.loss.kl_coefficient:g}; remove one"
            )

    @rule
    def _group_size(self) -> Iterator[str]:
        if self.group_size < 2 and self.name in GROUP_RELATIVE:
            yield (
                f"groupSize must be at least 2 for the group-relative advantage {self.name}, got {self.group_size}; raise groupSize or use reinforce_plus_plus"
            )

    @rule
    def _dynamic_sampling_compares(self) -> Iterator[str]:
        if self.dynamic_sampling.enabled and self.group_size == 1:
            yield "dynamicSampling needs groupSize of at least 2, as one reward cannot differ, got 1; raise groupSize or disable it"

    @rule
    def _bounds_on_the_ratio(self) -> Iterator[str]:
        bounds = {"maxPolicyRatio": self.max_policy_ratio, "maxPolicyKl": self.max_policy_kl}
        unheard = [field for field, bound in bounds.items() if bound is not None]
        if unheard and self.loss.name == "reinforce":
            yield f"{listed(unheard)} needs a loss with a policy ratio, got reinforce; remove it or choose ppo_clip"

    @rule
    def _recompute(self) -> Iterator[str]:
        needs = {
            "importance": self.importance is not None,
            "sequenceErrorThreshold": self.sequence_error_threshold is not None,
            "allowTruncatedSampling": self.allow_truncated_sampling,
        }
        wanting = [field for field, used in needs.items() if used]
        if wanting and not self.recompute_log_probs:
            yield (f"{listed(wanting)} needs recomputeLogProbs: true, got false; set it or remove the field")
        if self.allow_truncated_sampling and self.importance is not None:
            yield ("importance weights are wrong under truncated sampling; remove importance or allowTruncatedSampling")

    @rule
    def _whiten_once(self) -> Iterator[str]:
        if self.whiten and self.name in PER_TOKEN:
            yield (f"whiten must be false for {self.name}, which already whitens, got true; remove it")
