"""The HTTP server of a supervisor: /healthz and /readyz for the kubelet, /metrics for Prometheus."""

from collections.abc import Callable, Mapping
from http import HTTPStatus

from rl_core.transports.http_server import HttpServer, Request, Response

Answer = tuple[int, str]
"""HTTP status code and text."""


class HealthServer:
    """Answers GET and HEAD requests by path. It runs on the event loop of the supervisor."""

    def __init__(self, pages: Mapping[str, Callable[[], Answer]]) -> None:
        """Serve `pages`: for each path a function that returns status code and text. It must not block."""
        self._pages = pages
        self._server = HttpServer(self._answer, gate=self._gate, refuse=lambda error: _text(error.status, str(error)))

    async def start(self, host: str, port: int) -> None:
        """Listen on `host` and `port`; port 0 chooses a free one. Raises ConfigError when the port is in use."""
        await self._server.start(host, port, what="health")

    @property
    def port(self) -> int:
        """The bound port."""
        return self._server.port

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def _gate(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET")
        if request.path not in self._pages:
            return _text(HTTPStatus.NOT_FOUND, f"known: {', '.join(self._pages)}")
        return None

    def _answer(self, request: Request) -> Response:
        code, text = self._pages[request.path]()
        return Response(status=HTTPStatus(code), body=text.encode())


def _text(status: HTTPStatus, text: str) -> Response:
    return Response(status=status, body=f"{text}\n".encode())
