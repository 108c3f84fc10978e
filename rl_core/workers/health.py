"""The supervisor's HTTP face: /healthz, /readyz, /metrics for the kubelet and Prometheus.

Written over asyncio and not over aiohttp, which has no part in what a supervisor does otherwise: importing it would make the start
of a supervisor five times as long (0.07 to 0.4 s) and its memory nearly twice as large (20 to 38 MiB), in every pod.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from rl_core.api.errors import ConfigError

logger = logging.getLogger(__name__)

Answer = tuple[int, str]
"""Status code and text."""
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
_REQUEST_SECONDS = 5.0
_REQUEST_BYTES = 16 * 1024


class HealthServer:
    """Answers GET requests from functions by path, on the supervisor's event loop."""

    def __init__(self, pages: Mapping[str, Callable[[], Answer]]) -> None:
        self._pages = pages
        self._server: asyncio.Server | None = None
        self.port = 0
        """The bound port."""

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises ConfigError when the port is in use."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=_REQUEST_BYTES)
        except OSError as error:
            raise ConfigError(
                f"health port {port} on {host} must be free, got: {error.strerror}; end the process that holds it"
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _REQUEST_SECONDS)
            writer.write(self._answer(request))
            await asyncio.wait_for(writer.drain(), _REQUEST_SECONDS)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return  # a probe that went away or sent nonsense
        finally:
            writer.close()

    def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
        page = self._pages.get(path)
        if method not in (b"GET", b"HEAD"):
            code, text = 405, "only GET\n"
        elif page is None:
            code, text = 404, f"known: {', '.join(self._pages)}\n"
        else:
            code, text = page()
        body = text.encode()
        head = f"HTTP/1.1 {code} {_REASONS[code]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        return head.encode() + (b"" if method == b"HEAD" else body)
