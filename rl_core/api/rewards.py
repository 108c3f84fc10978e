"""The reward of one sample: a number, None where none applies, or a reward with the parts that it is made of."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from rl_core.api.errors import RolloutConfigError, shown

TOTAL = "reward"
"""Among rewards by name, the name of the reward itself; the others are its parts, which are reported and need no weights."""
EXPLANATION = "explanation"
"""Key of the environment's metadata of a sample with the text that says why it got its reward; kept with the sample."""
EXPLANATION_CHARACTERS = 4000
"""Longest explanation; of a longer one beginning and end are kept."""
_MISSING = object()


def has_parts(returned: Any) -> bool:
    """Return whether user code returned a reward as a mapping or an object with `reward` and `parts`."""
    return isinstance(returned, Mapping) or hasattr(returned, TOTAL)


def explanation_of(returned: Any) -> str | None:
    """Return the text that a reward function gave as the reason of a reward, or None.

    `returned` is what the function returned for one completion. The text is its key or attribute `explanation`. A text longer than
    EXPLANATION_CHARACTERS loses its middle.
    """
    text = _explanation(returned)
    return bounded_explanation(text) if isinstance(text, str) else None


def bounded_explanation(text: str) -> str:
    """Return `text`, without its middle if it is longer than EXPLANATION_CHARACTERS."""
    if len(text) <= EXPLANATION_CHARACTERS:
        return text
    half = EXPLANATION_CHARACTERS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def read_reward(returned: Any) -> tuple[float | None, dict[str, float]]:
    """Return (reward, parts) of what user code returned for a sample. Raises ValueError for anything that is no reward."""
    if returned is None or isinstance(returned, Real):
        return _number(returned, "the reward"), {}
    if isinstance(returned, Mapping):
        reward, parts = returned.get(TOTAL, _MISSING), returned.get("parts")
    else:
        reward, parts = getattr(returned, TOTAL, _MISSING), getattr(returned, "parts", None)
    if reward is _MISSING:
        raise ValueError(
            "a reward must be a number, None, or a mapping or object with `reward` and, if you like, `parts` and `explanation`, "
            f"got {shown(returned)}; return one of these"
        )
    if parts is not None and not isinstance(parts, Mapping):
        raise ValueError(f"parts of a reward must be a mapping of names to numbers, got {type(parts).__name__}")
    text = _explanation(returned)
    if text is not None and not isinstance(text, str):
        raise ValueError(f"the {EXPLANATION} of a reward must be text or None, got {shown(text)}")
    numbers = {str(name): _number(value, f"part {name!r} of the reward") for name, value in (parts or {}).items()}
    if TOTAL in numbers:
        raise ValueError(f"a part of a reward must have another name than `{TOTAL}`, got parts {sorted(numbers)}")
    return _number(reward, "the reward"), {name: value for name, value in numbers.items() if value is not None}


def total_reward(
    rewards: Mapping[str, float | None], weights: Mapping[str, float]
) -> tuple[dict[str, float], float | None]:
    """Return (parts, reward) of one sample from its rewards by name, where None stands for one that does not apply.

    The reward is the one named `reward`, and otherwise the sum of all with `weights`; None if none applies. Raises RolloutConfigError if a
    weight is missing.
    """
    missing = sorted(set(rewards) - set(weights))
    parts = {name: value for name, value in rewards.items() if value is not None}
    if TOTAL in missing:
        parts.pop(TOTAL, None)
        return parts, rewards[TOTAL]
    if missing:
        raise RolloutConfigError(
            f"rewards by name need reward_weights on the environment's class, got none for {', '.join(missing)}; "
            f"set a weight per name there, or return their sum too, by the name `{TOTAL}`"
        )
    return parts, math.fsum(weights[name] * value for name, value in parts.items()) if parts else None


def _explanation(result: Any) -> Any:
    return result.get(EXPLANATION) if isinstance(result, Mapping) else getattr(result, EXPLANATION, None)


def _number(value: Any, label: str) -> float | None:
    if value is None:
        return None
    scalar = value.item() if getattr(value, "shape", None) == () else value
    number = float(scalar) if isinstance(scalar, Real) else math.nan
    if not math.isfinite(number):
        raise ValueError(f"{label} must be a finite number or None, got {shown(value)}")
    return number
