"""Messages of arrays by name whose layout repeats, such as the observations of one step after the other.

A message is a head, a layout (names, types and shapes) and the bytes of the arrays. Sender and receiver keep the layouts that they have
seen, so that a message of a known layout costs a copy of its bytes and little more. Nothing is pickled.
"""

import math
import struct
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from rl_core.api.errors import FrameError

HEAD = struct.Struct("<QII")
"""Bytes of the message behind the head, of the key and of the layout."""
MAX_BYTES = 2**31
MOST_LAYOUTS = 256
"""Layouts that one end keeps; then it begins anew."""
KINDS = "buif"
"""Kinds of NumPy types that may be sent: truth values, integers and floating-point numbers."""
Named = Mapping[str, np.ndarray]


class ArrayCodec:
    """One end of a stream of messages. Not thread-safe."""

    def __init__(self) -> None:
        self._packed: dict[tuple[Any, ...], bytes] = {}
        self._layouts: dict[bytes, list[tuple[str, np.dtype[Any], tuple[int, ...], int]]] = {}

    def pack(self, key: str, arrays: Named) -> bytes:
        """Return a message. Arrays that are not contiguous are copied. Raises TypeError for one without numbers, FrameError beyond MAX_BYTES."""
        layout_key = tuple((name, array.dtype.str, array.shape) for name, array in arrays.items())
        layout = self._packed.get(layout_key)
        if layout is None:
            for name, array in arrays.items():
                if array.dtype.kind not in KINDS:
                    raise TypeError(f"array {name} must have numbers, got {array.dtype}; convert it")
            if len(self._packed) >= MOST_LAYOUTS:
                self._packed.clear()
            layout = self._packed[layout_key] = msgpack.packb(layout_key)
        encoded_key = key.encode()
        parts = [b"", encoded_key, layout, *(array.tobytes() for array in arrays.values())]
        if (size := sum(map(len, parts))) > MAX_BYTES:
            raise FrameError(f"a message of arrays must have at most {MAX_BYTES} bytes, got {size}")
        parts[0] = HEAD.pack(size, len(encoded_key), len(layout))
        return b"".join(parts)

    def unpack(self, body: Any, key_bytes: int, layout_bytes: int) -> tuple[str, dict[str, np.ndarray]]:
        """Return key and arrays of the message behind a head. The arrays view `body`. Raises FrameError when it is malformed."""
        begin = key_bytes + layout_bytes
        try:
            key, packed = str(body[:key_bytes], "utf-8"), bytes(body[key_bytes:begin])
            layout = self._layouts.get(packed)
            if layout is None:
                layout = self._remember(packed)
            arrays = {}
            for name, dtype, shape, size in layout:
                arrays[name] = np.ndarray(shape, dtype, body, begin)
                begin += size * dtype.itemsize
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
            raise FrameError(f"a message of arrays is malformed: {error}") from error
        if begin != len(body):
            raise FrameError(f"a message of arrays must have {begin} bytes, got {len(body)}")
        return key, arrays

    def _remember(self, packed: bytes) -> list[tuple[str, np.dtype[Any], tuple[int, ...], int]]:
        layout = []
        for name, code, shape in msgpack.unpackb(packed):
            dtype = np.dtype(code)
            if dtype.kind not in KINDS or any(type(size) is not int or size < 0 for size in shape):
                raise FrameError(f"array {name} must have numbers and a shape, got {code} {shape}")
            layout.append((str(name), dtype, tuple(shape), math.prod(shape)))
        if len(self._layouts) >= MOST_LAYOUTS:
            self._layouts.clear()
        self._layouts[packed] = layout
        return layout
