"""GDPO: several named rewards, each compared within its group before they are added. Legend: B rows, T tokens."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_core.algorithms.advantages.group_relative import broadcast_to_tokens, grpo_advantages
from rl_core.algorithms.advantages.types import AdvantageResult, Reduce
from rl_core.algorithms.advantages.whitening import whiten
from rl_core.algorithms.arguments import require_bool, require_rows
from rl_core.algorithms.stats import Stat
from rl_core.api.errors import ConfigError

_GROUP_METRICS = ("groups/total", "groups/degenerate", "rows/total", "rows/invalid")


def gdpo_advantages(
    reward_components: Mapping[str, Tensor],
    group_ids: Tensor,
    mask: Tensor,
    *,
    weights: Mapping[str, float] | None = None,
    valid: Tensor | None = None,
    eps: float = 1e-6,
    reduce: Reduce | None = None,
) -> AdvantageResult:
    """Return the weighted sum of each component's group-relative advantage, whitened over valid rows, [B, T] float32.

    `reward_components` are at least two named [B] rewards and `weights` their factors (None = 1 each). Row values are
    whitened once over the valid rows of all ranks, then copied to the trainable tokens.
    Source: NVIDIA, "GDPO" (2026). Raises ConfigError for one component, ValueError for weights with other names. Without rows, as on a rank
    left without groups, no component is looked for.
    """
    factors = _factors(reward_components, weights) if group_ids.numel() else {}
    require_bool(mask=mask, valid=valid)
    require_rows("group_ids", group_ids, mask=mask, valid=valid)
    one_column = torch.ones_like(group_ids, dtype=torch.bool).unsqueeze(1)
    row = torch.zeros(group_ids.shape, dtype=torch.float32, device=mask.device)
    metrics: dict[str, Stat] = {}
    for name, factor in factors.items():
        component = grpo_advantages(reward_components[name], group_ids, one_column, valid=valid, eps=eps)
        row = row + factor * component.advantages.squeeze(1)
        metrics |= {key: component.metrics[key] for key in _GROUP_METRICS}
        metrics |= {
            f"{key}/{name}": stat
            for key, stat in component.metrics.items()
            if key.startswith(("rewards/", "groups/zero"))
        }
    usable = one_column.squeeze(1) if valid is None else valid
    advantages = broadcast_to_tokens(whiten(row, usable, reduce=reduce), mask)
    return AdvantageResult(advantages, None, metrics)


def _factors(components: Mapping[str, Tensor], weights: Mapping[str, float] | None) -> dict[str, float]:
    if len(components) < 2:
        raise ConfigError(
            f"gdpo needs an environment that gives at least two rewards by name, got {sorted(components)}; use grpo for one"
        )
    if weights is None:
        return dict.fromkeys(components, 1.0)
    if set(weights) != set(components):
        raise ValueError(
            f"weights must have the names of reward_components {sorted(components)}, got {sorted(weights)}"
        )
    return dict(weights)
