"""Checks the scores that user code returns: one finite number or None per row; anything else is an error and never becomes 0."""

from collections.abc import Sequence
from typing import Any

from rl_core.api.errors import RolloutDataFailure, shown
from rl_core.api.rewards import TOTAL, has_parts, read_reward

LARGEST = 3.4028234663852886e38
"""Largest float32 number; rewards are float32."""


def check_scores(scores: Any, rows: int, *, what: str) -> list[float | None]:
    """Return `scores` as numbers or None, length `rows`. Raises RolloutDataFailure naming `what`, row and value."""
    return [_score(value, row_name(what, row, rows)) for row, value in enumerate(_values(scores, rows, what))]


def check_rewards(scores: Any, rows: int, *, what: str) -> list[float | None] | dict[str, list[float | None]]:
    """Return the checked rewards of `rows` rows: one list, as `check_scores` does, or one list per name if a row gives its reward in parts.

    With parts, the list `reward` has the rewards, and the list of a part has None for rows without this part. Raises RolloutDataFailure
    naming `what`, row and value.
    """
    values = _values(scores, rows, what)
    if not any(map(has_parts, values)):
        return check_scores(values, rows, what=what)
    rewards_and_parts = [_reward_in_parts(value, row_name(what, row, rows)) for row, value in enumerate(values)]
    names = dict.fromkeys(name for _, parts in rewards_and_parts for name in parts)
    return {TOTAL: [reward for reward, _ in rewards_and_parts]} | {
        name: [parts.get(name) for _, parts in rewards_and_parts] for name in names
    }


def row_name(what: str, row: int, rows: int) -> str:
    """Return the text by which errors name the result of one row: `what`, with the index of the row if there are several."""
    return what if rows == 1 else f"{what}, row {row}"


def _reward_in_parts(value: Any, place: str) -> tuple[float | None, dict[str, float]]:
    if not has_parts(value):
        return _score(value, place), {}
    try:
        return read_reward(value)
    except ValueError as error:
        raise RolloutDataFailure(f"{place}: {error}") from error


def _values(scores: Any, rows: int, label: str) -> Sequence[Any]:
    values = scores.tolist() if hasattr(scores, "tolist") else scores
    if not isinstance(values, list | tuple):
        raise RolloutDataFailure(
            f"{label} must return a list of {rows} scores, got {type(scores).__name__}; return one per row"
        )
    if len(values) != rows:
        raise RolloutDataFailure(
            f"{label} must return one score per completion ({rows}), got {len(values)}; return one per row"
        )
    return values


def _score(value: Any, place: str) -> float | None:
    if value is None:
        return None
    is_text = isinstance(value, str | bytes | bytearray)  # A text is not a score, although float() would accept "1".
    try:
        number = float(None if is_text else value)  # type: ignore[arg-type]
    except Exception as error:  # float() raises OverflowError, and a class of the user may raise anything.
        raise RolloutDataFailure(f"{place}: a score must be a number or None, got {shown(value)}") from error
    if not abs(number) <= LARGEST:
        raise RolloutDataFailure(f"{place}: a score must be finite, got {number}; return None where it does not apply")
    return number
