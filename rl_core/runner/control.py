"""The runner's HTTP face: `/status` and the control calls (protocol.md 3). Calls and answers are signed (plan/signatures.py).

Called by the operator, the local launcher and `rljob status|top`. Handlers only read the status or set flags that the loop
honours at a step boundary, so a caller can never block or break a step.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from rl_core.plan.signatures import Guard, Peer
from rl_core.transports.http_server import EXCHANGE_SECONDS, HttpServer, HttpThread, Request, Response

logger = logging.getLogger(__name__)


class ControlServer:
    """Serves status and control on one port from a thread."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        peer: Peer | None,
        status: Callable[[], Any],
        actions: Mapping[str, Callable[[Any], Any]],
        seconds: float = EXCHANGE_SECONDS,
    ) -> None:
        """Bind; `peer` is who we are to callers, None = anybody may call.

        `actions` maps `METHOD /path` to a function of the decoded body, `seconds` bounds one exchange.

        Raises ConfigError for a port in use.
        """
        self._guard = Guard(peer) if peer is not None else None
        self._status, self._actions = status, actions
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
        refusal = self._guard.refuse(request.method, request.path, request.headers) if self._guard is not None else None
        if refusal is not None:
            return self._signed(request, refusal.status, {"error": refusal.message})
        call, known = f"{request.method} {request.path}", ["GET /status", *self._actions]
        if call not in known:
            text = f"{call} is not known; known: {', '.join(known)}"
            return self._signed(request, HTTPStatus.NOT_FOUND, {"error": text})
        return None

    def _answer(self, request: Request) -> Response:
        if self._guard is not None and not self._guard.holds(request.headers, request.body):
            return self._signed(request, HTTPStatus.UNAUTHORIZED, {"error": "the body must be the one that was signed"})
        call = f"{request.method} {request.path}"
        try:
            if call == "GET /status":
                return self._signed(request, HTTPStatus.OK, self._status())
            given = json.loads(request.body) if request.body else None
            return self._signed(request, HTTPStatus.OK, self._actions[call](given))
        except (ValueError, RecursionError) as error:
            return self._signed(request, HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except Exception as error:  # whatever an action raises, its caller must hear of it
            logger.exception("%s failed", call)
            text = f"{type(error).__name__}: {error}"
            return self._signed(request, HTTPStatus.INTERNAL_SERVER_ERROR, {"error": text})

    def _signed(self, request: Request, status: HTTPStatus, value: Any) -> Response:
        plain = _response(status, value)
        if self._guard is None:
            return plain
        return replace(plain, headers=self._guard.sign_answer(request.method, request.headers, status, plain.body))


def _response(status: HTTPStatus, value: Any) -> Response:
    return Response(status=status, body=json.dumps(value).encode(), content_type="application/json")
