"""What an API server's refusal means, as exception classes; `error_of` reads an answer into one."""

from __future__ import annotations

import json

LONGEST_MESSAGE = 1000
"""Characters kept of the API server's words, which can list every field of an object."""


class ApiError(Exception):
    """The API server refused, or did not answer; `message` holds its own words."""

    def __init__(self, message: str, *, reason: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        """The Status' reason, e.g. AlreadyExists."""
        self.retry_after = retry_after
        """Seconds the server asks us to wait; None = it does not say."""


class NotFound(ApiError):
    """404: no such object, or no such kind."""


class Conflict(ApiError):
    """409 other than AlreadyExists: the object moved, or the name has another uid."""


class AlreadyExists(ApiError):
    """409 at a create: the name is taken."""


class Forbidden(ApiError):
    """403: no right, a quota, an admission rule, or the namespace is being deleted."""


class Invalid(ApiError):
    """400 or 422: the object breaks the schema."""


class Expired(ApiError):
    """410: the list's or watch's snapshot is gone."""


class TooManyRequests(ApiError):
    """429: later."""


class Unavailable(ApiError):
    """5xx, no connection or no answer in time."""


_BY_STATUS: dict[int, type[ApiError]] = {
    400: Invalid,
    401: Unavailable,
    403: Forbidden,
    404: NotFound,
    410: Expired,
    422: Invalid,
    429: TooManyRequests,
}


def error_of(status: int, text: bytes, *, retry_after: str | None) -> ApiError:
    """Return the exception for an answer of 400 or above; 401 passes, as tokens are renewed on disk."""
    message, reason, asked = _status_of(text)
    if retry_after is not None and retry_after.isdigit():
        asked = float(retry_after)
    if status == 409:
        kind: type[ApiError] = AlreadyExists if reason == "AlreadyExists" else Conflict
    else:
        kind = _BY_STATUS.get(status, Unavailable if status >= 500 else ApiError)
    return kind(_short(message or f"HTTP {status}"), reason=reason, retry_after=asked)


def _short(message: str) -> str:
    return message if len(message) <= LONGEST_MESSAGE else message[:LONGEST_MESSAGE] + " ..."


def _status_of(text: bytes) -> tuple[str, str, float | None]:
    """Return (message, reason, seconds to wait) of a `Status` object; a proxy's page is its own message."""
    try:
        body = json.loads(text)
    except ValueError:
        return text[:300].decode(errors="replace"), "", None
    if not isinstance(body, dict):
        return str(body)[:300], "", None
    asked = (body.get("details") or {}).get("retryAfterSeconds")
    return str(body.get("message", "")), str(body.get("reason", "")), float(asked) if asked else None
