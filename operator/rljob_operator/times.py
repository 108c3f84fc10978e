"""RFC 3339 text and seconds since 1970, both ways; statuses hold whole seconds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


def to_text(seconds: float) -> str:
    """Return `seconds` since 1970 as RFC 3339 in UTC, whole seconds, as the API server writes times."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def to_seconds(text: Any) -> float | None:
    """Return seconds since 1970 of RFC 3339 text; None for anything else."""
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
