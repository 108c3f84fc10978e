"""Call a policy loss by its registered name."""

from typing import Any

from rl_core.algorithms.binding import require_options
from rl_core.algorithms.losses.types import LossInputs, LossResult
from rl_core.algorithms.registry import resolve


def compute_policy_loss(name: str, inputs: LossInputs, **options: Any) -> LossResult:
    """Return the loss of the registered policy loss `name`.

    Raises ValueError for an unknown name, an option it does not honour, or a missing input.
    """
    function = resolve("loss", name)
    require_options("loss", name, function, options)
    result: LossResult = function(inputs, **options)
    return result
