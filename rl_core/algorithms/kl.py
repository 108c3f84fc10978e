"""KL(policy || reference) per token from samples of the policy, and its aggregated loss. One direction everywhere.

Legend: B rows, T tokens.
"""

import torch
from torch import Tensor

from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.arguments import require_bool, require_choice, require_float32, require_same_shape
from rl_core.algorithms.losses.types import LossResult, weighted_aggregate
from rl_core.algorithms.stats import mean_stat

ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+")
_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl_penalty(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    *,
    estimator: str = "k3",
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
) -> Tensor:
    """Return the estimate of KL(policy || reference) per token, shape and float32 of `log_probs`.

    With d = ref_log_probs - log_probs, limited to +-`input_clamp`: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d and
    abs = |d|; the result is limited to +-`output_clamp`; the gradient is 0 outside either limit and None lifts it. `k1+` and `k3+`
    have k2's gradient. `kl`, `mse`, `low_var_kl` are k1, k2, k3. Gradients flow into `log_probs` only.
    Source: Schulman, "Approximating KL divergence" (2020).
    """
    return _estimate(log_probs, ref_log_probs, estimator, input_clamp, output_clamp)[0]


def kl_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    *,
    estimator: str = "k3",
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
    weights: Tensor | None = None,
    aggregation: str = "token-mean",
    normalizers: LossNormalizers | None = None,
    max_tokens: int | None = None,
) -> LossResult:
    """Return the aggregated KL over the trainable tokens of `mask` [B, T].

    Metrics: `kl` (unweighted mean), `kl_clamp_fraction` (tokens outside a limit). Errors as in `aggregate`.
    """
    require_bool(mask=mask)
    require_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs, mask=mask)
    policy, reference = (torch.where(mask, values, 0.0) for values in (log_probs, ref_log_probs))
    values, clamped = _estimate(policy, reference, estimator, input_clamp, output_clamp)
    loss = weighted_aggregate(values, mask, weights, aggregation, normalizers, max_tokens)
    count = mask.sum()
    return LossResult(
        loss, {"kl": mean_stat(values, mask, count), "kl_clamp_fraction": mean_stat(clamped, mask, count)}
    )


def _estimate(
    log_probs: Tensor, ref_log_probs: Tensor, estimator: str, input_clamp: float | None, output_clamp: float | None
) -> tuple[Tensor, Tensor]:
    """Return (estimate, bool: a limit was reached) per token."""
    estimator = _ALIASES.get(estimator, estimator)
    require_choice("KL estimator", estimator, ESTIMATORS)
    require_float32(log_probs=log_probs, ref_log_probs=ref_log_probs)
    require_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs)
    for name, bound in (("input_clamp", input_clamp), ("output_clamp", output_clamp)):
        if bound is not None and bound <= 0:
            raise ValueError(f"{name} must be positive, got {bound}; use None for no clamp")
    difference = ref_log_probs.detach() - log_probs
    limited = difference if input_clamp is None else difference.clamp(-input_clamp, input_clamp)
    raw = _formula(limited, estimator.removesuffix("+"))
    value = raw if output_clamp is None else raw.clamp(-output_clamp, output_clamp)
    clamped = (limited != difference) | (value != raw)
    if estimator.endswith("+"):
        gradient = limited**2 / 2
        value = value.detach() + torch.where(value == raw, gradient - gradient.detach(), 0.0)
    return value, clamped


def _formula(d: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d**2 / 2
    return d.abs() if estimator == "abs" else torch.expm1(d) - d
