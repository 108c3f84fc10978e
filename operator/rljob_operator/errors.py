"""Exceptions for refusals of the API server, by their meaning; `error_of` converts an answer to one of them."""

from __future__ import annotations

import json

WEBHOOK = "failed calling webhook"
"""Words of the API server's message about an admission webhook that failed (k8s.io/apiserver, webhook/errors)."""
LONGEST_MESSAGE = 1000
"""Characters that are kept of a message of the API server, which can list every field of an object."""


class ApiError(Exception):
    """The API server refused a call or did not answer; `message` is its message."""

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
    """409 other than AlreadyExists: the object has changed, or the name belongs to another uid."""


class AlreadyExists(ApiError):
    """409 for a create: the name is in use."""


class Forbidden(ApiError):
    """403: a missing permission, a quota, an admission rule, or the namespace is being deleted."""


class WebhookFailed(Forbidden):
    """500 because an admission webhook failed. This says nothing about the object; the call fails until the webhook is repaired."""


class Invalid(ApiError):
    """400 or 422: the object breaks the schema."""


class Expired(ApiError):
    """410: the snapshot of a list or watch has expired."""


class TooManyRequests(ApiError):
    """429: too many requests; try again later."""


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
    """Return the exception for an answer of 400 or above. A 401 counts as transient, because tokens are renewed on disk."""
    message, reason, seconds = _status_of(text)
    if retry_after is not None and retry_after.isdigit():
        seconds = float(retry_after)
    if status == 409:
        kind: type[ApiError] = AlreadyExists if reason == "AlreadyExists" else Conflict
    else:
        kind = _BY_STATUS.get(status, Unavailable if status >= 500 else ApiError)
    if status == 500 and WEBHOOK in message:
        kind = WebhookFailed
    return kind(_short(message or f"HTTP {status}"), reason=reason, retry_after=seconds)


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
    seconds = (body.get("details") or {}).get("retryAfterSeconds")
    return str(body.get("message", "")), str(body.get("reason", "")), float(seconds) if seconds else None
