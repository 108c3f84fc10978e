"""The runner's HTTP face: `/status` and the control calls (protocol.md 3). Callers show the job's bearer token.

Called by the operator, the local launcher and `rljob status|top`. Handlers only read the status or set flags that the loop
honours at a step boundary, so a caller can never block or break a step.
"""

import hmac
import json
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from rl_core.transports.http_server import EXCHANGE_SECONDS, HttpServer, HttpThread, Request, Response

logger = logging.getLogger(__name__)


class ControlServer:
    """Serves status and control on one port from a thread."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str | None,
        status: Callable[[], Any],
        actions: Mapping[str, Callable[[Any], Any]],
        seconds: float = EXCHANGE_SECONDS,
    ) -> None:
        """Bind; `actions` maps `METHOD /path` to a function of the decoded body, `seconds` bounds one exchange.

        Raises ConfigError for a port in use.
        """
        self._token, self._status, self._actions = token, status, actions
        self.host = host
        self.server = HttpServer(
            self._answer,
            gate=self._gate,
            refuse=lambda error: _response(error.status, {"error": str(error)}),
            seconds=seconds,
        )
        self._thread = HttpThread(self.server, host, port, what="control")
        self.port = self.server.port

    def close(self) -> None:
        """Stop serving."""
        self._thread.close()

    def _gate(self, request: Request) -> Response | None:
        """Refuse strangers and unknown calls before a body is read."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._token is not None and not hmac.compare_digest(given.encode(), self._token.encode()):
            return _response(HTTPStatus.UNAUTHORIZED, {"error": "a bearer token of this job is required"})
        call, known = f"{request.method} {request.path}", ["GET /status", *self._actions]
        if call not in known:
            return _response(HTTPStatus.NOT_FOUND, {"error": f"{call} is not known; known: {', '.join(known)}"})
        return None

    def _answer(self, request: Request) -> Response:
        call = f"{request.method} {request.path}"
        try:
            if call == "GET /status":
                return _response(HTTPStatus.OK, self._status())
            return _response(HTTPStatus.OK, self._actions[call](json.loads(request.body) if request.body else None))
        except (ValueError, RecursionError) as error:
            return _response(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except Exception as error:  # whatever an action raises, its caller must hear of it
            logger.exception("%s failed", call)
            return _response(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"})


def _response(status: HTTPStatus, value: Any) -> Response:
    return Response(status=status, body=json.dumps(value).encode(), content_type="application/json")
