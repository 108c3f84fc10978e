"""Built-in rewards and reward shaping. Imports no torch, so that environment processes can use it without.

A registered reward is `fn(prompts, completions, **columns) -> list[float | None]`, one entry per completion; None means
"not applicable" and makes the row invalid. A reward that fails is a DataError, never a 0.
Order of shaping: raw reward, `scale_rewards`, `shape_overlong`, `shape_stop_properly`, then advantages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from rl_core.algorithms.math_answers import extract_answer, same_answer
from rl_core.api.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


def math_reward(response: str, answer: str, *, correct: float = 1.0, incorrect: float = 0.0) -> float:
    r"""Return `correct` when the final answer in `response` equals `answer`, else `incorrect`.

    The final answer is the last balanced `\boxed{...}`, else the text after the last `####`, else the last number.
    Fractions and decimals are compared exactly, other answers as case-folded text.
    """
    found_answer = extract_answer(response)
    return correct if found_answer is not None and same_answer(found_answer, answer) else incorrect


def exact_reward(response: str, answer: str, *, correct: float = 1.0, incorrect: float = 0.0) -> float:
    """Return `correct` when `response` is `answer` up to surrounding white space, else `incorrect`."""
    return correct if response.strip() == answer.strip() else incorrect


def format_reward(response: str, *, pattern: str, correct: float = 1.0, incorrect: float = 0.0) -> float:
    r"""Return `correct` when the regular expression `pattern` is found in `response`, else `incorrect`.

    `.` matches line ends too; anchor with `\A` and `\Z` to match the whole. ValueError for an invalid pattern.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern must be a regular expression, got {pattern!r} ({error})") from error
    return correct if compiled.search(response) else incorrect


def math_rewards(
    prompts: list[str], completions: list[str], *, answer: Sequence[str | None] | None = None, **columns: Any
) -> list[float]:
    """Return `math_reward` of every completion against the column `answer`."""
    return _against_answers(math_reward, completions, answer, columns)


def exact_rewards(
    prompts: list[str], completions: list[str], *, answer: Sequence[str | None] | None = None, **columns: Any
) -> list[float]:
    """Return `exact_reward` of every completion against the column `answer`."""
    return _against_answers(exact_reward, completions, answer, columns)


def format_rewards(prompts: list[str], completions: list[str], *, pattern: str, **columns: Any) -> list[float]:
    """Return `format_reward` of every completion."""
    return [format_reward(text, pattern=pattern, **_scores(columns)) for text in completions]


def scale_rewards(
    rewards: Tensor, *, source_min: float, source_max: float, target_min: float, target_max: float
) -> Tensor:
    """Return `rewards` [B] limited to the source range and mapped linearly onto the target range, float32.

    Raises ValueError for an empty source range.
    """
    if not source_max > source_min:
        raise ValueError(
            f"source_max must be greater than source_min, got {source_max} and {source_min}; widen the range"
        )
    share = (rewards.double().clamp(source_min, source_max) - source_min) / (source_max - source_min)
    return (target_min + share * (target_max - target_min)).float()


def shape_overlong(
    rewards: Tensor, lengths: Tensor, *, max_length: int, buffer: int, penalty: float, cap: float | None = None
) -> Tensor:
    """Return `rewards` [B] minus a penalty that grows over the last `buffer` tokens before `max_length`, float32.

    `lengths` [B] are all trainable tokens of each completion. Beyond `max_length` the penalty goes on growing, up to
    `cap` when given. Source: Yu et al., "DAPO" (2025), section 3.4. Raises ValueError for buffer <= 0.
    """
    from rl_core.algorithms.arguments import require_same_shape  # torch stays out of env processes

    if buffer <= 0:
        raise ValueError(f"buffer must be at least 1 token, got {buffer}")
    require_same_shape(rewards=rewards, lengths=lengths)
    excess = lengths.double() - (max_length - buffer)
    penalties = (-excess / buffer * penalty).clamp(max=0.0)
    if cap is not None:
        penalties = penalties.clamp(min=-cap)
    return (rewards.double() + penalties).float()


def shape_stop_properly(rewards: Tensor, truncated: Tensor, *, coefficient: float) -> Tensor:
    """Return `rewards` [B] with the positive ones of `truncated` [B] bool rows multiplied by `coefficient`, float32.

    Negative rewards stay: shrinking them would reward truncation. ValueError for a coefficient outside [0, 1].
    """
    from rl_core.algorithms.arguments import require_bool, require_same_shape  # torch stays out of env processes

    if not 0 <= coefficient <= 1:
        raise ValueError(f"coefficient must be in [0, 1], got {coefficient}")
    require_bool(truncated=truncated)
    require_same_shape(rewards=rewards, truncated=truncated)
    rewards = rewards.float()
    return (rewards * coefficient).where(truncated & (rewards > 0), rewards)


def _against_answers(
    score: Callable[..., float], completions: list[str], answers: Sequence[str | None] | None, columns: dict[str, Any]
) -> list[float]:
    if answers is None:
        raise DataError("the column 'answer' must be given, got None; name it with data.answerKey")
    if isinstance(answers, str) or len(answers) != len(completions):
        raise DataError(f"the column 'answer' must have {len(completions)} entries, got {len(answers)}")
    options = _scores(columns)
    scored = []
    for row, (text, answer) in enumerate(zip(completions, answers, strict=True)):
        if answer is None:
            raise DataError(f"the column 'answer' must be text, got None in row {row}; drop the row or fill it in")
        scored.append(score(text, str(answer), **options))
    return scored


def _scores(columns: dict[str, Any]) -> dict[str, float]:
    """Return the options among the columns; data columns that the reward does not use are ignored."""
    return {name: columns[name] for name in ("correct", "incorrect") if isinstance(columns.get(name), Real)}
