"""Messages between a worker and its child process, in the format of `transports.frames`, over a socket pair.

On the stream: number of parts (u32), length of each part (u64), the parts; little-endian. Nothing is pickled. Either end reads with
`receive` on an event loop, or with `receive_blocking`.
"""

import asyncio
import socket
import struct
from typing import Any

from rl_core.api.errors import FrameError
from rl_core.transports import frames

MAX_PARTS = 65_537
MAX_BYTES = 2**31
"""Size of the largest message in bytes. Messages are rows of text and numbers; large arrays are not sent by pipes."""


def pack(message: Any) -> bytes:
    """Return the encoded message. Raises TypeError or ValueError with the path of a value that cannot be encoded."""
    parts = [bytes(part) for part in frames.encode(message)]
    return struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts)) + b"".join(parts)


def _sizes(raw: bytes) -> list[int]:
    sizes = [size for (size,) in struct.iter_unpack("<Q", raw)]
    if sum(sizes) > MAX_BYTES:
        raise FrameError(
            f"a message between a worker and its child must have at most {MAX_BYTES} bytes, got {sum(sizes)}"
        )
    return sizes


def _count(raw: bytes) -> int:
    count: int = struct.unpack("<I", raw)[0]
    if not 1 <= count <= MAX_PARTS:
        raise FrameError(f"a message between a worker and its child must have 1 to {MAX_PARTS} parts, got {count}")
    return count


def _unpack(body: bytes, sizes: list[int]) -> Any:
    parts, start, view = [], 0, memoryview(body)
    for size in sizes:
        parts.append(view[start : start + size])
        start += size
    return frames.decode(parts, copy=True)


async def receive(reader: asyncio.StreamReader) -> Any:
    """Return the next message. Raises IncompleteReadError at the end of the stream, FrameError for a malformed one."""
    sizes = _sizes(await reader.readexactly(8 * _count(await reader.readexactly(4))))
    return _unpack(await reader.readexactly(sum(sizes)), sizes)


def receive_blocking(sock: socket.socket) -> Any:
    """Return the next message. Raises EOFError at the end of the stream."""
    sizes = _sizes(_exactly(sock, 8 * _count(_exactly(sock, 4))))
    return _unpack(_exactly(sock, sum(sizes)), sizes)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = sock.recv(min(count - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)
