"""A small HTTP/1.1 server with a bounded number of connections, a deadline per exchange, and a check of the headers before the body is
read.

Used by the runner's control port and by the supervisor's probes. Written over asyncio because aiohttp's server, which nothing else in
these processes imports (0.3 s and 18 MiB in every pod), bounds neither the number of connections nor the time of a body, and the
standard library's takes a thread per connection: either would need the bounds of this file around it.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus

from rl_core.api.errors import ConfigError

logger = logging.getLogger(__name__)
HEAD_BYTES = 16 * 1024
BODY_BYTES = 1 << 20
EXCHANGE_SECONDS = 5.0
"""Limit of one exchange, from the connection to the last byte of the answer, also for a client that sends very slowly."""
CONNECTIONS = 64
"""Largest number of connections. A further one ends the oldest, which is likely to be one that sends nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request. The body is empty while `gate` checks the headers."""

    method: str
    path: str
    """Without the query."""
    headers: Mapping[str, str]
    """Names in lower case."""
    query: str = ""
    """The text after the `?` of the request target, undecoded."""
    body: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One response. The connection is closed after it."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers."""

    def encode(self, *, head_only: bool) -> bytes:
        """Return the bytes on the wire."""
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\nContent-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\nConnection: close\r\n"
            + "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
            + "\r\n"
        )
        return head.encode() + (b"" if head_only else self.body)


class BadRequest(ValueError):
    """A malformed request. `status` is the HTTP status of the response."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpServer:
    """Serves HTTP on the event loop on which it was started."""

    def __init__(
        self,
        answer: Callable[[Request], Response],
        *,
        refuse: Callable[[BadRequest], Response],
        gate: Callable[[Request], Response | None] = lambda request: None,
        seconds: float = EXCHANGE_SECONDS,
    ) -> None:
        """`answer` returns the response to a request.

        `gate` is called first, with the headers only, and may return a response that refuses the request. `refuse` returns the response to
        a malformed request. None of the three may block.
        """
        self._answer, self._refuse, self._gate, self._seconds = answer, refuse, gate, seconds
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}
        """Connections, oldest first."""
        self.port = 0
        """The bound port."""

    async def start(self, host: str, port: int, *, what: str) -> None:
        """Listen. Raises ConfigError when the port is in use; the message names the server by `what`."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=HEAD_BYTES)
        except OSError as error:
            raise ConfigError(
                f"{what} port {port} on {host} must be free, got: {error.strerror}; end the process that holds it"
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Stop listening and end all connections."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()  # its own task ends with it
        try:
            async with asyncio.timeout(self._seconds):
                await self._exchange(reader, writer)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            logger.debug("a connection ended before its request was whole")
        except asyncio.CancelledError:
            # The cancellation ends here, because asyncio logs a handler that ends cancelled as a failure.
            logger.debug("a connection was open when the loop ended")
        finally:
            self._open.pop(writer, None)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head_only = False
        try:
            request = _parse(await reader.readuntil(b"\r\n\r\n"))
            head_only = request.method == "HEAD"
            response = self._gate(request)
            if response is None:
                body = await reader.readexactly(_length(request))
                response = self._answer(replace(request, body=body))
        except asyncio.LimitOverrunError:
            response = self._refuse(BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head is too long"))
        except BadRequest as error:
            response = self._refuse(error)
        writer.write(response.encode(head_only=head_only))
        await writer.drain()


class HttpThread:
    """An HttpServer with a thread and an event loop of its own."""

    def __init__(self, server: HttpServer, host: str, port: int, *, what: str) -> None:
        """Serve. Raises ConfigError when the port is in use."""
        self._server, self._loop = server, asyncio.new_event_loop()
        try:
            self._loop.run_until_complete(server.start(host, port, what=what))
        except ConfigError:
            self._loop.close()
            raise
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._server.close()
        self._loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(self._loop)))
        self._loop.close()

    def close(self) -> None:
        """Stop serving."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _parse(head: bytes) -> Request:
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise BadRequest(HTTPStatus.BAD_REQUEST, f"the first line must be METHOD PATH HTTP/1.1, got {first[:80]!r}")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    path, _, query = words[1].partition("?")
    return Request(method=words[0], path=path, headers=headers, query=query)


def _length(request: Request) -> int:
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        raise BadRequest(HTTPStatus.BAD_REQUEST, f"Content-Length must be a number of bytes, got {length!r}")
    if len(length) > 12 or int(length) > BODY_BYTES:
        raise BadRequest(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body must be at most {BODY_BYTES} bytes, got {length[:20]}"
        )
    return int(length)
