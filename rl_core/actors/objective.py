"""The loss of a micro-batch: policy loss, KL to the reference policy and the teacher, entropy bonus and the critic's loss.

Legend: B rows of the micro-batch, T width of the longest.
"""

from dataclasses import replace
from typing import Any

from pydantic.alias_generators import to_camel

from rl_core.actors.backend import Scores
from rl_core.actors.rows import Columns
from rl_core.algorithms.aggregation import LossNormalizers, aggregate
from rl_core.algorithms.kl import kl_loss
from rl_core.algorithms.losses import (
    LossInputs,
    LossResult,
    combine_losses,
    compute_policy_loss,
    critic_loss,
    entropy_term,
    top_k_distillation_loss,
)
from rl_core.algorithms.mismatch import mismatch_stats
from rl_core.algorithms.registry import option_names, resolve
from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.critic import CriticSpec
from rl_core.api.errors import ConfigError


class ValueObjective:
    """The value loss of a critic that is trained alone, in a worker group of its own, as a callable."""

    def __init__(self, critic: CriticSpec, algorithm: AlgorithmSpec, *, max_tokens: int) -> None:
        """Prepare the loss. `max_tokens` is the response limit, by which `seq-mean-token-sum-norm` divides."""
        self._critic = critic
        self._aggregation: dict[str, Any] = {"aggregation": algorithm.aggregation, "max_tokens": max_tokens}

    def __call__(self, scores: Scores, columns: Columns, normalizers: LossNormalizers) -> LossResult:
        """Return this micro-batch's share of the step's loss; `columns` [B, T] on the device of the scores."""
        result = critic_loss(
            scores.values,
            columns.returns,
            columns.loss_mask,
            old_values=columns.values,
            value_clip=self._critic.value_clip,
            normalizers=normalizers,
            **self._aggregation,
        )
        return replace(result, loss=self._critic.coefficient * result.loss)


class PolicyObjective:
    """The loss that `algorithm.loss` configures, as a callable."""

    def __init__(self, algorithm: AlgorithmSpec, *, max_tokens: int) -> None:
        """Prepare the loss. `max_tokens` is the response limit, by which `seq-mean-token-sum-norm` divides."""
        self._spec, self._critic = algorithm.loss, algorithm.critic_of_actor
        self._options = _policy_options(algorithm)
        self._bounds, self._max_age = algorithm.trusted_ratios, algorithm.max_staleness
        self.version = 0
        """Version of the weights in training."""
        self._aggregation: dict[str, Any] = {"aggregation": algorithm.aggregation, "max_tokens": max_tokens}

    def __call__(self, scores: Scores, columns: Columns, normalizers: LossNormalizers) -> LossResult:
        """Return this micro-batch's share of the step's loss; `columns` [B, T] on the scores' device."""
        mask, shared = columns.loss_mask, self._aggregation | {"normalizers": normalizers}
        inputs = LossInputs(
            log_probs=scores.log_probs,
            old_log_probs=columns.old_log_probs,
            advantages=columns.advantages,
            mask=mask,
            weights=columns.weights,
            proximal_log_probs=columns.proximal_log_probs,
            behavior_versions=None if columns.ages is None else self.version - columns.ages.long(),
            current_version=None if columns.ages is None else self.version,
            **shared,
        )
        kl, estimator = None, self._spec.kl_estimator
        if self._spec.kl_coefficient > 0:
            kl = kl_loss(scores.log_probs, columns.ref_log_probs, mask, estimator=estimator, **shared)
        value, value_coefficient = None, 1.0
        if self._critic is not None and scores.values is not None:
            clip, value_coefficient = self._critic.value_clip, self._critic.coefficient
            value = critic_loss(
                scores.values, columns.returns, mask, old_values=columns.values, value_clip=clip, **shared
            )
        distillation = None
        if scores.candidates is not None:
            distillation = top_k_distillation_loss(scores.candidates, columns.teacher_log_probs, mask, **shared)
        return combine_losses(
            self._policy_loss(inputs),
            kl=kl,
            kl_coefficient=self._spec.kl_coefficient,
            # Entropy is always reported; without a coefficient it gets no gradient.
            entropy=entropy_term(scores.entropy, mask, **shared),
            entropy_coefficient=self._spec.entropy_coefficient,
            value=value,
            value_coefficient=value_coefficient,
            distillation=distillation,
        )

    def with_mismatch_metrics(self, scores: Scores, columns: Columns, normalizers: LossNormalizers) -> LossResult:
        """Return the loss, with metrics of the mismatch between trainer and rollout added.

        It is used in the first mini-batch of a step, where the weights are still those of the previous step.
        """
        result = self(scores, columns, normalizers)
        mismatch = mismatch_stats(
            scores.log_probs,
            columns.old_log_probs if columns.rollout_log_probs is None else columns.rollout_log_probs,
            columns.loss_mask,
            bounds=self._bounds,
            ages=columns.ages,
            max_age=self._max_age,
        )
        return replace(result, metrics=result.metrics | mismatch)

    def _policy_loss(self, inputs: LossInputs) -> LossResult:
        """Return the policy loss; a function of the user never sees a micro-batch in which no token trains."""
        if ":" in self._spec.name and not inputs.mask.any():
            return LossResult(aggregate(inputs.log_probs, inputs.mask))
        return compute_policy_loss(self._spec.name, inputs, **self._options)


def _policy_options(algorithm: AlgorithmSpec) -> dict[str, Any]:
    """Return the options the chosen policy loss honours: those it has a parameter for.

    Raises ConfigError for a bound that a loss of the user has no parameter for.
    """
    loss = algorithm.loss
    accepted, _ = option_names(resolve("loss", loss.name))
    bounds = {"dual_clip": loss.dual_clip, "behavior_weight_max": loss.behavior_weight_max}
    for name, bound in bounds.items():
        if bound is not None and name not in accepted:
            raise ConfigError(
                f"algorithm.loss.{to_camel(name)} needs a loss with a parameter {name}, got {loss.name} without; remove it or take it there"
            )
    clip_low, clip_high = loss.clip
    options = {"clip_low": clip_low, "clip_high": clip_high, **bounds}
    return {name: value for name, value in options.items() if name in accepted}
