"""Serves the page on this machine. Samples are hostile input: the page may load and run nothing but its own files (CSP).

A page of another site could have a browser ask this server under a name that leads here (DNS rebinding); requests whose Host header is
not one of ours are refused.
"""

import json
import logging
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

from rl_core.transports.http_server import HttpServer, HttpThread, Request, Response
from rl_core.view.pages import NotFound, Pages

logger = logging.getLogger(__name__)
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
SITE = "Sec-Fetch-Site".lower()
"""Header in which browsers say whether a page of another site asks."""
ANSWER_SECONDS = 60.0
"""Time of one exchange."""


class ViewServer:
    """Serves the page of some runs from a thread."""

    def __init__(self, folders: Sequence[Path], *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Serve the output folders `folders` at `host`:`port` (0: any free port). Raises ConfigError when the port is in use."""
        self.pages = Pages(folders)
        self._names = {name.lower() for name in (*LOOPBACK, host, f"[{host}]" if ":" in host else host)}
        self._server = HttpServer(
            self._answer, gate=self._gate, refuse=lambda error: _error(error.status, str(error)), seconds=ANSWER_SECONDS
        )
        self._thread = HttpThread(self._server, host, port, what="view")
        self.port = self._server.port
        url_host = f"[{host}]" if ":" in host else host
        self.url = f"http://{url_host}:{self.port}/"

    def close(self) -> None:
        """Stop serving."""
        self._thread.close()

    def _gate(self, request: Request) -> Response | None:
        """Refuse other hosts, other methods and requests of other sites."""
        if request.method not in ("GET", "HEAD"):
            return _error(HTTPStatus.METHOD_NOT_ALLOWED, f"the page is read only, got {request.method[:20]}")
        host = request.headers.get("host", "").lower()
        name, _, port = host.rpartition(":")
        if name not in self._names or port != str(self.port):
            return _error(HTTPStatus.MISDIRECTED_REQUEST, f"Host must be the address of the page, got {host[:80]!r}")
        if request.headers.get(SITE) == "cross-site" and request.path != "/":
            return _error(HTTPStatus.FORBIDDEN, "requests of other sites are refused")
        return None

    def _answer(self, request: Request) -> Response:
        try:
            body, kind = self.pages.answer(request.path, request.query)
        except NotFound as error:
            return _error(HTTPStatus.NOT_FOUND, str(error))
        except ValueError as error:
            return _error(HTTPStatus.BAD_REQUEST, str(error))
        except Exception as error:
            logger.exception("%s failed", request.path)
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
        return Response(status=HTTPStatus.OK, body=body, content_type=kind, headers=HEADERS)


def _error(status: HTTPStatus, message: str) -> Response:
    body = json.dumps({"error": message}).encode()
    return Response(status=status, body=body, content_type="application/json", headers=HEADERS)
