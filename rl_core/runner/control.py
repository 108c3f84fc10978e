"""The runner's HTTP face: `/status` and the control calls (protocol.md 3). Callers show the job's bearer token.

Called by the operator, the local launcher and `rljob status|top`. Handlers only read the status or set flags that the loop
honours at a step boundary, so a caller can never block or break a step.
"""

import hmac
import json
import logging
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rl_core.api.errors import ConfigError

logger = logging.getLogger(__name__)
MAX_BODY = 1 << 20


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
    ) -> None:
        """Bind; `actions` maps `METHOD /path` to a function of the decoded body. Raises ConfigError for a port in use."""
        handler = _make_handler(token, status, actions)
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as error:
            raise ConfigError(
                f"control port {port} on {host} must be free, got: {error.strerror}; end the process that holds it"
            ) from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="control", daemon=True, kwargs={"poll_interval": 0.2}
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _make_handler(
    token: str | None, status: Callable[[], Any], actions: Mapping[str, Callable[[Any], Any]]
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """One request."""

        def _answer(self, code: HTTPStatus, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _handle(self) -> None:
            given = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
                self._answer(HTTPStatus.UNAUTHORIZED, {"error": "a bearer token of this job is required"})
            elif self.command == "GET" and self.path == "/status":
                self._answer(HTTPStatus.OK, status())
            elif (action := actions.get(f"{self.command} {self.path}")) is None:
                known = ["GET /status", *actions]
                self._answer(
                    HTTPStatus.NOT_FOUND,
                    {"error": f"{self.command} {self.path} is not known; known: {', '.join(known)}"},
                )
            else:
                self._act(action)

        def _act(self, action: Callable[[Any], Any]) -> None:
            told = self.headers.get("Content-Length") or "0"
            length = int(told) if told.isascii() and told.isdigit() else -1
            if length > MAX_BODY:
                self._answer(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    {"error": f"the body must be at most {MAX_BODY} bytes, got {length}"},
                )
                return
            try:
                if length < 0:
                    raise ValueError(f"Content-Length must be a number of bytes, got {told!r}")
                code, answer = HTTPStatus.OK, action(json.loads(self.rfile.read(length)) if length else None)
            except (ValueError, RecursionError) as error:
                code, answer = HTTPStatus.BAD_REQUEST, {"error": str(error)}
            except Exception as error:  # whatever an action raises, its caller must hear of it
                logger.exception("%s %s failed", self.command, self.path)
                code, answer = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"}
            self._answer(code, answer)

        do_GET = do_POST = do_PUT = _handle  # noqa: N815 - names of http.server

        def log_message(self, format: str, *args: Any) -> None:
            logger.debug(format, *args)

    return Handler
