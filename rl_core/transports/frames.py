"""The wire format of messages: frame 0 is a version byte and a msgpack header, the other frames are raw bytes.

Header keys: `k` kind, `e` epoch, `i` request id, `s` sender, `m` method, `p` skeleton, `t` table of [dtype, shape,
nbytes, crc or nil] and, where not empty, `o` options of the RPC. `encode` and `decode` handle one object, with one frame per array.
`encode_message` is for sockets, which refuse a frame over FRAME_BYTES before they know the sender. A skeleton over SKELETON_BYTES is sent
after the header, and `p` is then its size; an array larger than a frame is split into several.

The skeleton is packed into bytes before it enters the header, so a router reads the header without decoding the body. Decoded arrays are
views of the received memory and must not be written to. Arrays that arrive in several frames are copied into one buffer.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import msgpack

from rl_core.api.errors import FrameError
from rl_core.messages.registry import register_record
from rl_core.transports import dtypes
from rl_core.transports.codec import TUPLE, Decoder, Encoder, Frame

__all__ = [
    "LIMITS",
    "FrameHeader",
    "FrameMessage",
    "Limits",
    "decode",
    "decode_message",
    "encode",
    "encode_message",
    "read_body",
    "read_header",
    "register_record",
]

VERSION = 1
FRAME_BYTES = 4 * 2**20
"""Largest frame on a socket. A stranger can make a process hold one of them per connection, for the time of a handshake."""
SKELETON_BYTES = 64 * 1024
"""Largest skeleton inside the header of a message for a socket."""
Part = Any
"""bytes, memoryview or a zmq.Frame: whatever shows its memory through the buffer protocol."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Size limits of one message. A larger one raises ValueError at the sender and FrameError at the receiver."""

    header_bytes: int = 64 * 2**20
    """Size of header and skeleton."""
    tensors: int = 65_536
    """Number of arrays."""
    tensor_bytes: int = 4 * 2**30
    """Size of one array."""


LIMITS = Limits()


@dataclass(slots=True)
class FrameHeader:
    """The validated header of a message. The skeleton is not unpacked yet."""

    kind: str
    epoch: int | None
    request_id: Any
    sender: Any
    method: str | None
    skeleton: bytes | int
    """Size of the skeleton if it is sent after the header."""
    table: list[tuple[int, tuple[int, ...], int, int | None]]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FrameMessage:
    """A decoded message."""

    kind: str
    obj: Any
    epoch: int | None
    request_id: Any
    sender: Any
    method: str | None


def encode(obj: Any, *, limits: Limits = LIMITS, checksum: bool = False) -> list[Part]:
    """Return `obj` as message parts. Arrays are not copied and must not be written to until the parts are sent.

    `checksum` adds a CRC32C per array. Raises TypeError for a type that cannot be encoded, and ValueError for an array that is not
    contiguous, an integer out of range, nesting deeper than 64, a cycle, or a message over `limits`. The error names the path of the value.
    """
    header, buffers = _packed("data", obj, limits, checksum)
    return [_head(header, limits.header_bytes), *buffers]


def encode_message(
    kind: str,
    obj: Any,
    *,
    epoch: int | None,
    request_id: Any,
    sender: Any = None,
    method: str | None = None,
    options: dict[str, Any] | None = None,
) -> list[Part]:
    """Return a message as parts of at most FRAME_BYTES for a socket. Raises as `encode`."""
    header, buffers = _packed(kind, obj, LIMITS, False)
    header["e"], header["i"], header["s"], header["m"] = epoch, request_id, sender, method
    if options:
        header["o"] = options
    if len(header["p"]) > SKELETON_BYTES:
        buffers.insert(0, memoryview(header["p"]))
        header["p"] = len(header["p"])
    head = _head(header, FRAME_BYTES)
    return [head, *(piece for buffer in buffers for piece in _pieces(buffer))] if buffers else [head]


def _packed(kind: str, obj: Any, limits: Limits, checksum: bool) -> tuple[dict[str, Any], list[memoryview]]:
    """Return the header of a message and its arrays."""
    encoder = Encoder(obj)
    if len(encoder.frames) > limits.tensors:
        raise ValueError(
            f"message must hold at most {limits.tensors} tensors, got {len(encoder.frames)}; send it in pieces"
        )
    if len(encoder.skeleton) > limits.header_bytes:
        raise ValueError(
            f"header must have at most {limits.header_bytes} bytes, got {len(encoder.skeleton)}; send large data as arrays"
        )
    table = []
    for index, (code, shape, buffer) in enumerate(encoder.frames):
        if buffer.nbytes > limits.tensor_bytes:
            raise ValueError(
                f"tensor {index} must have at most {limits.tensor_bytes} bytes, got {buffer.nbytes}; split it"
            )
        table.append([code, list(shape), buffer.nbytes, _crc32c(buffer) if checksum else None])
    header = {"k": kind, "e": None, "i": None, "s": None, "m": None, "p": encoder.skeleton, "t": table}
    return header, [buffer for _, _, buffer in encoder.frames] if table else []


def _head(header: dict[str, Any], max_bytes: int) -> bytes:
    head = b"\x01" + _pack_header(header)
    if len(head) > max_bytes:
        raise ValueError(f"header must have at most {max_bytes} bytes, got {len(head)}; send fewer and larger arrays")
    return head


def _pieces(buffer: memoryview) -> list[memoryview]:
    if buffer.nbytes <= FRAME_BYTES:
        return [buffer]
    return [buffer[start : start + FRAME_BYTES] for start in range(0, buffer.nbytes, FRAME_BYTES)]


_local = threading.local()
"""The packer of each thread: a new one allocates a large buffer."""


def _pack_header(value: Any) -> bytes:
    packer = getattr(_local, "packer", None)
    if packer is None:
        packer = _local.packer = msgpack.Packer(strict_types=True, default=_plain)
    try:
        packed: bytes = packer.pack(value)
    except BaseException:
        del _local.packer  # it holds half a value
        raise
    return packed


def _plain(value: Any) -> Any:
    """Return `value` in a form that msgpack accepts: instances of subclasses of plain types are converted to the plain type."""
    if type(value) is tuple:
        # with a packer of its own: that of the thread is at work
        return msgpack.ExtType(TUPLE, msgpack.packb(list(value), strict_types=True, default=_plain))
    if isinstance(value, str):
        return str.__str__(value)
    kinds: tuple[Any, ...] = (int, float, bytes, list, dict)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"header fields must be plain values, got {type(value).__name__}")


def _header_extension(code: int, data: bytes) -> Any:
    if code != TUPLE:
        raise FrameError(f"extension type {code} has no place in a header")
    return tuple(msgpack.unpackb(data, ext_hook=_header_extension))


def decode(parts: Sequence[Part], *, copy: bool = False) -> Any:
    """Return the object that was given to `encode`. Arrays are views of `parts` and must not be written to, unless `copy` is set.

    Raises FrameError for malformed parts.
    """
    return decode_message(parts, copy=copy).obj


def decode_message(parts: Sequence[Part], *, copy: bool = False) -> FrameMessage:
    """Return the message that was given to `encode_message`. Raises FrameError for malformed parts."""
    if not parts:
        raise FrameError("message has no frames")
    header = read_header(parts[0])
    obj = read_body(header, parts[1:], copy=copy)
    return FrameMessage(header.kind, obj, header.epoch, header.request_id, header.sender, header.method)


def read_header(part: Part, *, limits: Limits = LIMITS) -> FrameHeader:
    """Return the header in frame 0. Raises FrameError for another version, a header over `limits`, or malformed fields."""
    raw = memoryview(part)
    if raw.nbytes == 0 or raw.nbytes > limits.header_bytes:
        raise FrameError(f"header must have 1 to {limits.header_bytes} bytes, got {raw.nbytes}")
    if raw[0] != VERSION:
        raise FrameError(f"wire version must be {VERSION}, got {raw[0]}; sender and receiver run different versions")
    try:
        header = msgpack.unpackb(raw[1:], use_list=True, ext_hook=_header_extension)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, MemoryError) as error:
        raise FrameError(f"header is malformed: {error}") from error
    try:
        return _checked_header(header, limits)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise FrameError(f"header does not hold: {error!r}") from error


def _checked_header(header: dict[str, Any], limits: Limits) -> FrameHeader:
    kind, method, skeleton, table = header["k"], header["m"], header["p"], header["t"]
    if type(kind) is not str or type(skeleton) not in (bytes, int) or type(method) not in (str, type(None)):
        raise FrameError("header fields k, m and p must be text, text or nil, and bytes or their number")
    if type(skeleton) is int and not 0 < skeleton <= limits.header_bytes:
        raise FrameError(f"skeleton must have 1 to {limits.header_bytes} bytes, got {skeleton}")
    if type(header["e"]) not in (int, type(None)) or type(table) is not list or len(table) > limits.tensors:
        raise FrameError(f"header fields e and t must be an integer and a list of at most {limits.tensors} entries")
    options = header.get("o", {})
    if type(options) is not dict:
        raise FrameError("header field o must be a map")
    checked = [_checked_entry(entry, limits) for entry in table]
    return FrameHeader(kind, header["e"], header["i"], header["s"], method, skeleton, checked, options)


def _checked_entry(entry: list[Any], limits: Limits) -> tuple[int, tuple[int, ...], int, int | None]:
    code, shape, nbytes, crc = entry
    if type(code) is not int or not 0 <= code < len(dtypes.NAMES):
        raise FrameError(f"dtype code must be 0 to {len(dtypes.NAMES) - 1}, got {code!r}")
    if len(shape) > 64 or any(type(size) is not int or size < 0 for size in shape):
        raise FrameError(f"shape must be at most 64 non-negative integers, got {shape!r}")
    expected = prod(shape) * dtypes.ITEMSIZES[code]
    if nbytes != expected or expected > limits.tensor_bytes:
        raise FrameError(
            f"array of shape {shape} and {dtypes.NAMES[code]} must have {expected} bytes, header says {nbytes!r}"
        )
    if type(crc) not in (int, type(None)):
        raise FrameError(f"checksum must be an integer or nil, got {crc!r}")
    return code, tuple(shape), nbytes, crc


def _crc32c(buffer: memoryview) -> int:
    from crc32c import crc32c  # loads command-line and e-mail parsers, which a message without arrays does not need

    checksum: int = crc32c(buffer)
    return checksum


def read_body(header: FrameHeader, parts: Sequence[Part], *, copy: bool = False) -> Any:
    """Return the object in the body of a message, given its header and all its frames. Raises FrameError."""
    frames = iter(parts)
    skeleton = header.skeleton if isinstance(header.skeleton, bytes) else _joined(frames, header.skeleton, "skeleton")
    arrays: list[Frame] = []
    for index, (code, shape, nbytes, crc) in enumerate(header.table):
        buffer = _joined(frames, nbytes, f"array {index}")
        if crc is not None and _crc32c(buffer) != crc:
            raise FrameError(f"array {index} is damaged: its CRC32C differs from the header's")
        arrays.append((code, shape, buffer))
    if next(frames, None) is not None:
        raise FrameError("message has more frames than its header tells")
    return Decoder(arrays, copy=copy).value(skeleton)


def _joined(frames: Iterator[Part], nbytes: int, what: str) -> memoryview:
    """Return the next `nbytes` bytes: one frame as it is, or several copied together."""
    pieces: list[memoryview] = []
    size = 0
    while not pieces or size < nbytes:
        frame = next(frames, None)
        if frame is None:
            raise FrameError(f"{what} must have {nbytes} bytes, got {size}")
        pieces.append(memoryview(frame).cast("B"))
        size += pieces[-1].nbytes
    if size != nbytes:
        raise FrameError(f"{what} must have {nbytes} bytes, got {size}")
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
