"""The HTTP server of the runner: `/status` and the control calls. Calls and answers are signed (plan/signatures.py).

Its clients are the operator, the local launcher and `rljob status|top`. Handlers only read the status or store a request that the training
loop handles at the next step boundary, so a client cannot block or interrupt a step.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from rl_core.plan.signatures import Guard, Peer, ReceivedCall
from rl_core.transports.http_server import EXCHANGE_SECONDS, HttpServer, HttpThread, Request, Response

logger = logging.getLogger(__name__)


class ControlServer:
    """Serves `/status` and the control calls on one port, on a thread of its own."""

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
        """Listen on `host` and `port`, and start the thread. Raises ConfigError if the port is in use.

        - `peer`: token and identity with which calls are verified and answers are signed; None accepts all calls.
        - `status()`: returns the answer to `GET /status`, a JSON-able value.
        - `actions`: functions of the decoded JSON body by `METHOD /path`. They return the answer; a ValueError is answered with status 400.
        - `seconds`: longest duration of one call.
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
        """Return the refusal of a call without a valid signature or with an unknown path; None for others. The body is not read before."""
        call = ReceivedCall.read(request.method, request.path, request.headers)
        refusal = self._guard.check(call) if self._guard is not None else None
        if refusal is not None:
            return self._signed(call, refusal.status, {"error": refusal.message})
        name, routes = f"{call.method} {call.path}", ["GET /status", *self._actions]
        if name not in routes:
            text = f"{name} is not known; known: {', '.join(routes)}"
            return self._signed(call, HTTPStatus.NOT_FOUND, {"error": text})
        return None

    def _answer(self, request: Request) -> Response:
        call = ReceivedCall.read(request.method, request.path, request.headers)
        if self._guard is not None and not call.matches_body(request.body):
            return self._signed(call, HTTPStatus.UNAUTHORIZED, {"error": "the body must be the one that was signed"})
        name = f"{call.method} {call.path}"
        try:
            if name == "GET /status":
                return self._signed(call, HTTPStatus.OK, self._status())
            body = json.loads(request.body) if request.body else None
            return self._signed(call, HTTPStatus.OK, self._actions[name](body))
        except (ValueError, RecursionError) as error:
            return self._signed(call, HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except Exception as error:  # The caller must get an answer, whatever the action raises.
            logger.exception("%s failed", name)
            text = f"{type(error).__name__}: {error}"
            return self._signed(call, HTTPStatus.INTERNAL_SERVER_ERROR, {"error": text})

    def _signed(self, call: ReceivedCall, status: HTTPStatus, value: Any) -> Response:
        unsigned = _response(status, value)
        if self._guard is None:
            return unsigned
        return replace(unsigned, headers=self._guard.sign_answer(call, status, unsigned.body))


def _response(status: HTTPStatus, value: Any) -> Response:
    return Response(status=status, body=json.dumps(value).encode(), content_type="application/json")
