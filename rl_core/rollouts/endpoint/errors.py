"""`EndpointError`: a refused call, in the form that OpenAI clients read."""

from __future__ import annotations

from typing import Any


class EndpointError(Exception):
    """A refused call. `status` is that of HTTP, `kind` and `code` are the `type` and `code` of the answer."""

    def __init__(self, status: int, kind: str, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code

    def body(self) -> dict[str, Any]:
        """Return the answer."""
        return {"error": {"message": str(self), "type": self.kind, "code": self.code, "param": None}}


def bad_request(message: str, *, code: str | None = None) -> EndpointError:
    """Return the refusal of a call that can never succeed."""
    return EndpointError(400, "invalid_request_error", message, code=code)


def not_permitted(message: str, *, code: str) -> EndpointError:
    """Return the refusal of a call without the key of a live session."""
    return EndpointError(401, "authentication_error", message, code=code)
