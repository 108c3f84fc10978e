"""`CallRequest`: the fields that requests of all paths share, and how a body is read."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl_core.rollouts.endpoint.errors import bad_request

MOST_CHOICES = 64
MOST_STOPS = 16
MOST_STOP_CHARACTERS = 256


class CallRequest(BaseModel):
    """The fields of a request that are read; others are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stream: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @classmethod
    def read(cls, body: Any) -> Self:
        """Return `body` as a request. Raises EndpointError for fields that are wrong or that this endpoint does not offer."""
        try:
            request = cls.model_validate(body)
        except ValidationError as error:
            details = error.errors(include_url=False)[0]
            raise bad_request(f"{'.'.join(map(str, details['loc'])) or 'the body'}: {details['msg']}") from error
        if len(request.stops) > MOST_STOPS or any(not 0 < len(stop) <= MOST_STOP_CHARACTERS for stop in request.stops):
            raise bad_request(f"stop must be at most {MOST_STOPS} texts of 1 to {MOST_STOP_CHARACTERS} characters")
        request.check_offered()
        return request

    def check_offered(self) -> None:
        """Check that the endpoint offers what the request asks for. Raises EndpointError."""

    @property
    def stops(self) -> list[str]:
        """Return the stop strings of the request."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
