"""Call a policy loss by its registered name."""

from typing import Any

import torch

from rl_core.algorithms.losses.types import LossInputs, LossResult
from rl_core.algorithms.registry import require_options, resolve
from rl_core.algorithms.stats import Stat
from rl_core.algorithms.user_functions import call, require_stats
from rl_core.api.errors import ConfigError


def compute_policy_loss(name: str, inputs: LossInputs, **options: Any) -> LossResult:
    """Return the loss of the registered policy loss `name`.

    Raises ValueError for an unknown name, an option it does not honour, or a missing input, ConfigError when what the function returns
    is no loss that can be trained on.
    """
    function = resolve("loss", name)
    require_options("loss", name, function, options)
    result = call("loss", name, function, inputs, **options)
    if not isinstance(result, LossResult):
        raise ConfigError(f"loss {name!r} must return a LossResult, got {type(result).__name__}; wrap it")
    require_stats("loss", name, result.metrics, Stat)
    if not isinstance(result.loss, torch.Tensor):
        raise ConfigError(f"loss {name!r} must return a tensor, got {type(result.loss).__name__}; make one")
    if result.loss.dim():
        raise ConfigError(f"loss {name!r} must return one number, got shape {tuple(result.loss.shape)}; aggregate it")
    if inputs.log_probs.requires_grad and torch.is_grad_enabled() and not result.loss.requires_grad:
        raise ConfigError(
            f"loss {name!r} must be made of inputs.log_probs, got one without gradient; do not detach them"
        )
    return result
