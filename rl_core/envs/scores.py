"""Checks the scores that user code returns: one finite number or None per row; anything else is an error and never becomes 0."""

from typing import Any

from rl_core.api.errors import RolloutDataFailure, shown

LARGEST = 3.4028234663852886e38
"""Largest float32 number; rewards are float32."""


def check_scores(scores: Any, rows: int, *, what: str) -> list[float | None]:
    """Return `scores` as numbers or None, length `rows`. Raises RolloutDataFailure naming `what`, row and value."""
    values = scores.tolist() if hasattr(scores, "tolist") else scores
    if not isinstance(values, list | tuple):
        raise RolloutDataFailure(
            f"{what} must return a list of {rows} scores, got {type(scores).__name__}; return one per row"
        )
    if len(values) != rows:
        raise RolloutDataFailure(
            f"{what} must return one score per completion ({rows}), got {len(values)}; return one per row"
        )
    return [_score(value, row, what) for row, value in enumerate(values)]


def _score(value: Any, row: int, what: str) -> float | None:
    if value is None:
        return None
    is_text = isinstance(value, str | bytes | bytearray)  # text is no score, although float() would accept "1"
    try:
        number = float(None if is_text else value)  # type: ignore[arg-type]
    except Exception as error:  # OverflowError, or any exception of a class of the user
        raise RolloutDataFailure(f"{what}, row {row}: a score must be a number or None, got {shown(value)}") from error
    if not abs(number) <= LARGEST:
        raise RolloutDataFailure(
            f"{what}, row {row}: a score must be finite, got {number}; return None where it does not apply"
        )
    return number
