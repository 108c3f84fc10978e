"""`spec.algorithm`: the objective, the size of a step, and how samples are filtered."""

from collections.abc import Collection, Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rl_core.api.base import Spec, rule
from rl_core.api.bounds import listed
from rl_core.api.cel import Cel, literal
from rl_core.api.critic import CriticSpec
from rl_core.api.distillation import DistillationSpec
from rl_core.api.loss import Aggregation, ImportanceSpec, LossSpec, one_of_or_function

ADVANTAGES = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gae",
    "gdpo",
    "raw",
    "distill",
)
ADVANTAGE_ALIASES = {"reinforce++": "reinforce_plus_plus", "ppo": "gae"}
"""Other spellings that a job may use -> the name of the estimator."""
GROUP_RELATIVE: frozenset[str] = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "gdpo"})
"""Advantages that compare the samples of one prompt and therefore need at least two."""
PER_TOKEN: frozenset[str] = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"})
"""Advantages with rewards per token."""
SELF_WHITENING = PER_TOKEN - {"gae"} | {"gdpo"}
"""Advantages that are whitened by their own definition."""


NEEDING_RECOMPUTE = (
    "((has(self.inference) ? ['inference'] : []) + (has(self.importance) ? ['importance'] : []) + (has(self.sequenceErrorThreshold) ? ['sequenceErrorThreshold'] : [])"
    " + ($allowTruncatedSampling ? ['allowTruncatedSampling'] : []))"
)
RATIO_BOUNDS = "((has(self.maxPolicyRatio) ? ['maxPolicyRatio'] : []) + (has(self.maxPolicyKl) ? ['maxPolicyKl'] : []))"
SHAPING = (
    "((has(self.rewardScale) ? ['rewardScale'] : []) + (self.?overlong.?buffer.hasValue() ? ['overlong.buffer'] : [])"
    " + (self.?overlong.?stopProperlyCoefficient.hasValue() ? ['overlong.stopProperlyCoefficient'] : []))"
)
"""CEL lists of the given fields that need another setting."""


def is_named(names: Collection[str], name: str = "$name") -> str:
    """Return the CEL expression that is true when `name` is one of the estimators `names`, in any spelling."""
    spellings = [*names, *(alias for alias, meant in ADVANTAGE_ALIASES.items() if meant in names)]
    return f"{name} in {literal(sorted(spellings))}"


def _named(name: Any) -> Any:
    return ADVANTAGE_ALIASES.get(name, name) if isinstance(name, str) else name


RECIPES = (
    ("dapo", "DAPO is grpo with loss.clipHigh, dynamicSampling and overlong: docs/algorithms.md"),
    ("ppo", "PPO is name: gae, and its loss ppo_clip: docs/algorithms.md"),
    ("cispo", "CISPO is name: grpo with loss.name: cispo: docs/algorithms.md"),
    ("gspo", "GSPO is name: grpo with loss.name: gspo: docs/algorithms.md"),
)
"""Names of algorithms that are written as several fields."""
AdvantageName = Annotated[
    str,
    Field(max_length=253),
    BeforeValidator(_named),
    one_of_or_function(*ADVANTAGES, *ADVANTAGE_ALIASES, recipes=RECIPES),
]


class DynamicSamplingSpec(Spec):
    """Dynamic sampling (DAPO): groups whose completions all have the same reward are replaced by other prompts."""

    enabled: bool = False
    """Replace groups whose rewards do not differ."""
    min_std: float = Field(0.0, ge=0)
    """Smallest standard deviation of the raw rewards of a group that is trained on; needs enabled."""

    @rule(
        Cel(
            holds="$enabled || $minStd == 0.0",
            refusal="minStd needs enabled: true, got minStd %s without it; set enabled or remove minStd",
            values=("$minStd",),
            field="minStd",
        )
    )
    def _bound_is_used(self) -> Iterator[str]:
        if self.min_std and not self.enabled:
            yield f"minStd needs enabled: true, got minStd {self.min_std:g} without it; set enabled or remove minStd"


class OverlongSpec(Spec):
    """Treatment of completions that were truncated at the length limit."""

    filter: bool = False
    """Exclude truncated completions from the loss and from the statistics of their group."""
    keep_in_baseline: bool = False
    """Keep the rewards of excluded completions in the baseline of the group; needs filter."""
    buffer: int | None = Field(None, ge=1, lt=2**31)
    """Length penalty: number of tokens before maxNewTokens over which the penalty grows from 0; null = no penalty."""
    penalty: float = Field(1.0, ge=0)
    """Penalty at maxNewTokens; needs buffer."""
    penalty_cap: float | None = Field(None, ge=0)
    """Largest penalty; null = unbounded; needs buffer."""
    stop_properly_coefficient: float | None = Field(None, ge=0, le=1)
    """Factor on the positive rewards of truncated completions; null = off."""

    @rule(
        Cel(
            holds="$filter || !$keepInBaseline",
            refusal="keepInBaseline needs filter: true, got filter false; set filter or remove keepInBaseline",
            field="keepInBaseline",
        )
    )
    def _baseline_is_used(self) -> Iterator[str]:
        if self.keep_in_baseline and not self.filter:
            yield "keepInBaseline needs filter: true, got filter false; set filter or remove keepInBaseline"

    @rule(
        Cel(
            holds="has(self.buffer) || $penalty == 1.0",
            refusal="penalty needs buffer, got penalty %s without one; set buffer or remove penalty",
            values=("$penalty",),
            field="penalty",
        ),
        Cel(
            holds="has(self.buffer) || !has(self.penaltyCap)",
            refusal="penaltyCap needs buffer, got penaltyCap %s without one; set buffer or remove penaltyCap",
            values=("self.penaltyCap",),
            field="penaltyCap",
        ),
    )
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

    @rule(
        Cel(
            holds="self.sourceMax > self.sourceMin",
            refusal="sourceMax must be greater than sourceMin, got %s and %s; swap or widen them",
            values=("self.sourceMin", "self.sourceMax"),
            field="sourceMax",
        )
    )
    def _range(self) -> Iterator[str]:
        if self.source_max <= self.source_min:
            yield (
                f"sourceMax must be greater than sourceMin, got {self.source_min:g} and {self.source_max:g}; swap or widen them"
            )


class AlgorithmSpec(Spec):
    """The algorithm and the size of a step."""

    name: AdvantageName = "grpo"
    """Advantage estimator: a registered name, or your own function as `module:function`."""
    prompts_per_step: int = Field(32, ge=1, le=65536)
    """Prompts per training step; each gives one group of completions."""
    group_size: int = Field(8, ge=1, le=1024)
    """Completions per prompt."""
    steps: int = Field(200, ge=1, lt=2**31)
    """Training steps of the run."""
    loss: LossSpec = LossSpec()
    """The policy loss."""
    critic: CriticSpec | None = None
    """The critic, for gae; null = a value head on the policy. Other estimators have none."""
    max_staleness: int = Field(0, ge=0, le=64)
    """Largest number of policy versions by which a trained token may be older than the policy. 0 = on policy; above 0 rollouts generate while the
    actor trains (docs/asynchronous.md)."""
    straggler_seconds: float | None = Field(None, gt=0)
    """Asynchronous runs: seconds that the trainer waits for older groups that are still being generated; then they are generated again. null =
    it waits until they end."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of data order, sampling and shuffling."""
    optimizer_steps_per_batch: int = Field(1, ge=1, lt=2**31)
    """Optimizer steps per training step: the rows of the step are split into this many mini-batches."""
    update_epochs: int = Field(1, ge=1, lt=2**31)
    """Passes over the rows of a training step (PPO epochs)."""
    recompute_log_probs: bool = False
    """Where the old log-probabilities of the policy ratio come from. true: the trainer computes them before the update; false: the rollout's."""
    inference: str | None = Field(None, max_length=15)
    """Group of spec.groups that computes the old log-probabilities in place of the trainer; needs recomputeLogProbs."""
    importance: ImportanceSpec | None = None
    """Importance weights that correct the difference between rollout and trainer; needs recomputeLogProbs."""
    sequence_error_threshold: float | None = Field(None, gt=1)
    """Rows whose mean of exp(|rollout - old log-probability|) exceeds this are excluded from the loss; null = off; needs recomputeLogProbs."""
    advantage_clip: float | None = Field(None, gt=0)
    """Advantages are clamped to [-advantageClip, advantageClip]; null = off."""
    whiten: bool = False
    """Whiten the advantages over the tokens of the step; not for estimators that do it themselves."""
    reward_kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the KL penalty in the rewards: KL(policy || reference) per token, estimator k1. Only with gae, reinforce_plus_plus and
    reinforce_plus_plus_baseline."""
    reference_update_steps: int | None = Field(None, ge=1, lt=2**31)
    """Training steps after which the reference policy of the KL becomes the present policy; null = it stays the initial model."""
    distillation: DistillationSpec | None = None
    """Teachers of on-policy distillation; for name distill."""
    reward_scale: RewardScaleSpec | None = None
    """Linear map applied to the rewards before advantages are computed; null = raw rewards."""
    keep_per_group: int | None = Field(None, ge=2, le=1024)
    """Completions of a group that are trained on: the subset with the largest variance of rewards (PODS). The others are excluded from the
    statistics too. null = all."""
    dynamic_sampling: DynamicSamplingSpec = DynamicSamplingSpec()
    """Dynamic sampling."""
    overlong: OverlongSpec = OverlongSpec()
    """Treatment of truncated completions."""
    max_generation_batches: int = Field(3, ge=1, lt=2**31)
    """Dynamic sampling: rounds of promptsPerStep groups that a step may generate before the run fails."""
    max_policy_ratio: float | None = Field(None, gt=1)
    """Skip the remaining mini-batches of a step when the mean policy ratio exceeds this; null = off."""
    max_policy_kl: float | None = Field(None, gt=0)
    """Skip the remaining mini-batches of a step when approx_kl exceeds this; null = off."""
    allow_truncated_sampling: bool = False
    """Accept top-p and top-k in training rollouts although they bias the policy ratio; needs recomputeLogProbs."""
    on_drop: Literal["replace", "shrink"] = "replace"
    """What happens when a group fails for good. replace: the next prompt takes its place; shrink: the step trains with fewer groups."""
    min_batch_fraction: float = Field(0.9, gt=0, le=1)
    """Smallest share of promptsPerStep that a step may train with; for onDrop shrink."""
    max_dropped_groups: int = Field(0, ge=0, lt=2**31)
    """Groups that may fail for good in the whole run; one more ends the run."""
    max_consecutive_drops: int = Field(0, ge=0, lt=2**31)
    """Groups in a row that may fail for good before the run ends; 0 = only maxDroppedGroups bounds them."""

    @property
    def aggregation(self) -> Aggregation:
        """Return the loss aggregation: the given one, else the default of the estimator."""
        if self.loss.aggregation is not None:
            return self.loss.aggregation
        return "seq-mean-token-sum-norm" if self.name == "dr_grpo" else "token-mean"

    @property
    def needs_ages(self) -> bool:
        """Return whether the loss uses the policy version that sampled each token."""
        return self.max_staleness > 0 or self.loss.name == "decoupled_ppo"

    @property
    def trusted_ratios(self) -> tuple[float, float]:
        """(low, high), the bounds of the probability ratio of trainer to rollout per token.

        They are those of `importance` if it is set, else those of the clipping of the loss.
        """
        if self.importance is not None:
            return self.importance.bounds
        low, high = self.loss.clip
        return 1.0 - low, 1.0 + high

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss or the rewards use the log-probabilities of a reference policy."""
        return self.loss.kl_coefficient > 0 or self.reward_kl_coefficient > 0

    @property
    def critic_in_use(self) -> CriticSpec | None:
        """Return the settings of the critic, None for an estimator without one."""
        return (self.critic or CriticSpec()) if self.name == "gae" else None

    @property
    def critic_of_actor(self) -> CriticSpec | None:
        """Return the settings of the critic that the actor holds, None where a group does or there is none."""
        critic = self.critic_in_use
        return None if critic is None or critic.group is not None else critic

    @property
    def critic_group(self) -> str | None:
        """Return the name of the group that holds the critic, None where the actor does or there is none."""
        critic = self.critic_in_use
        return None if critic is None else critic.group

    @property
    def needs_scoring(self) -> bool:
        """Whether log-probabilities or values of the step's completions are computed before training, by trainer or teachers."""
        used_otherwise = self.needs_reference or self.critic_in_use is not None or self.distillation is not None
        return self.recompute_log_probs or used_otherwise

    @rule(
        Cel(
            holds="($name == 'distill') == has(self.distillation)",
            refusal="distillation must be given exactly with name distill, got name %s; set both or neither",
            values=("$name",),
            field="distillation",
        )
    )
    def _distills_from_a_teacher(self) -> Iterator[str]:
        if (self.name == "distill") != (self.distillation is not None):
            yield f"distillation must be given exactly with name distill, got name {self.name}; set both or neither"

    @rule(
        Cel(
            holds=f"!has(self.critic) || {is_named(['gae'])}",
            refusal="critic needs name gae, got %s; choose it or remove critic",
            values=("$name",),
            field="critic",
        )
    )
    def _critic_is_used(self) -> Iterator[str]:
        if self.critic is not None and self.name != "gae":
            yield f"critic needs name gae, got {self.name}; choose it or remove critic"

    @rule(
        Cel(
            holds=f"$name != 'gdpo' || {SHAPING}.size() == 0",
            refusal="%s needs one reward per row, got name gdpo, which takes several as they are; remove it",
            values=(SHAPING,),
            field="name",
        )
    )
    def _several_rewards(self) -> Iterator[str]:
        values = {
            "rewardScale": self.reward_scale,
            "overlong.buffer": self.overlong.buffer,
            "overlong.stopProperlyCoefficient": self.overlong.stop_properly_coefficient,
        }
        shaping = [field for field, value in values.items() if value is not None]
        if shaping and self.name == "gdpo":
            yield f"{listed(shaping)} needs one reward per row, got name gdpo, which takes several as they are; remove it"

    @rule(
        Cel(
            holds=f"$rewardKlCoefficient == 0.0 || {is_named(PER_TOKEN)}",
            refusal="rewardKlCoefficient needs rewards per token, got %s; use loss.klCoefficient or reinforce_plus_plus",
            values=("$name",),
            field="rewardKlCoefficient",
        ),
        Cel(
            holds="$rewardKlCoefficient == 0.0 || $loss.klCoefficient == 0.0",
            refusal="rewardKlCoefficient must be 0 beside loss.klCoefficient, which counts the same KL, got %s and %s; remove one",
            values=("$rewardKlCoefficient", "$loss.klCoefficient"),
            field="rewardKlCoefficient",
        ),
    )
    def _kl_once(self) -> Iterator[str]:
        if self.reward_kl_coefficient > 0 and self.name not in PER_TOKEN:
            yield f"rewardKlCoefficient needs rewards per token, got {self.name}; use loss.klCoefficient or reinforce_plus_plus"
        if self.reward_kl_coefficient > 0 and self.loss.kl_coefficient > 0:
            yield (
                f"rewardKlCoefficient must be 0 beside loss.klCoefficient, which counts the same KL, got {self.reward_kl_coefficient:g} and "
                f"{self.loss.kl_coefficient:g}; remove one"
            )

    @rule(
        Cel(
            holds="!has(self.stragglerSeconds) || $maxStaleness > 0",
            refusal="stragglerSeconds needs maxStaleness above 0, got 0; remove it",
            field="stragglerSeconds",
        )
    )
    def _older_groups_are_waited_for(self) -> Iterator[str]:
        if self.straggler_seconds is not None and not self.max_staleness:
            yield "stragglerSeconds needs maxStaleness above 0, got 0; remove it"

    @rule(
        Cel(
            holds=f"$groupSize >= 2 || !($name in {literal(sorted(GROUP_RELATIVE))})",
            refusal=(
                "groupSize must be at least 2 for the group-relative advantage %s, got %d"
                "; raise groupSize or use reinforce_plus_plus"
            ),
            values=("$name", "$groupSize"),
            field="groupSize",
        )
    )
    def _group_size(self) -> Iterator[str]:
        if self.group_size < 2 and self.name in GROUP_RELATIVE:
            yield (
                f"groupSize must be at least 2 for the group-relative advantage {self.name}, got {self.group_size}; raise groupSize or use reinforce_plus_plus"
            )

    @rule(
        Cel(
            holds="!$dynamicSampling.enabled || $groupSize >= 2",
            refusal=(
                "dynamicSampling needs groupSize of at least 2, as one reward cannot differ, got 1"
                "; raise groupSize or disable it"
            ),
            field="groupSize",
        )
    )
    def _dynamic_sampling_compares(self) -> Iterator[str]:
        if self.dynamic_sampling.enabled and self.group_size == 1:
            yield "dynamicSampling needs groupSize of at least 2, as one reward cannot differ, got 1; raise groupSize or disable it"

    @rule(
        Cel(
            holds=f"$loss.name != 'reinforce' || {RATIO_BOUNDS}.size() == 0",
            refusal="%s needs a loss with a policy ratio, got reinforce; remove it or choose ppo_clip",
            values=(RATIO_BOUNDS,),
            field="loss.name",
        )
    )
    def _bounds_on_the_ratio(self) -> Iterator[str]:
        bounds = {"maxPolicyRatio": self.max_policy_ratio, "maxPolicyKl": self.max_policy_kl}
        set_fields = [field for field, value in bounds.items() if value is not None]
        if set_fields and self.loss.name == "reinforce":
            yield f"{listed(set_fields)} needs a loss with a policy ratio, got reinforce; remove it or choose ppo_clip"

    @rule(
        Cel(
            holds=f"$recomputeLogProbs || {NEEDING_RECOMPUTE}.size() == 0",
            refusal="%s needs recomputeLogProbs: true, got false; set it or remove the field",
            values=(f"{NEEDING_RECOMPUTE}",),
            field="recomputeLogProbs",
        ),
        Cel(
            holds="!has(self.importance) || $loss.name != 'decoupled_ppo'",
            refusal="importance must be left out with decoupled_ppo, which corrects by itself; remove one",
            field="importance",
        ),
        Cel(
            holds="!($allowTruncatedSampling && has(self.importance))",
            refusal=(
                "importance weights are wrong under truncated sampling; remove importance or allowTruncatedSampling"
            ),
            field="importance",
        ),
    )
    def _recompute(self) -> Iterator[str]:
        users = {
            "inference": self.inference is not None,
            "importance": self.importance is not None,
            "sequenceErrorThreshold": self.sequence_error_threshold is not None,
            "allowTruncatedSampling": self.allow_truncated_sampling,
        }
        needing = [field for field, used in users.items() if used]
        if needing and not self.recompute_log_probs:
            yield (f"{listed(needing)} needs recomputeLogProbs: true, got false; set it or remove the field")
        if self.importance is not None and self.loss.name == "decoupled_ppo":
            yield "importance must be left out with decoupled_ppo, which corrects by itself; remove one"
        if self.allow_truncated_sampling and self.importance is not None:
            yield ("importance weights are wrong under truncated sampling; remove importance or allowTruncatedSampling")

    @rule(
        Cel(
            holds=f"!($whiten && {is_named(SELF_WHITENING)})",
            refusal="whiten must be false for %s, which already whitens, got true; remove it",
            values=("$name",),
            field="whiten",
        )
    )
    def _whiten_once(self) -> Iterator[str]:
        if self.whiten and self.name in SELF_WHITENING:
            yield (f"whiten must be false for {self.name}, which already whitens, got true; remove it")
