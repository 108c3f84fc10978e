"""Several small messages in one frame.

ZeroMQ and the changes of threads take more processor time for a small message than its content does. While several calls are in flight,
client and server therefore send small messages together. A frame with one message begins with the version byte of `frames`, a frame with
several begins with BATCH.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import msgpack

BATCH = 2
"""First byte of a frame with several messages. The rest of the frame is a msgpack list of them, each as bytes."""
SMALL_BYTES = 4096
"""Size in bytes of the largest message that shares a frame."""
MOST_MESSAGES = 64
"""Largest number of messages in one frame."""


def is_small(message: Sequence[Any]) -> bool:
    """Return whether `message`, a list of parts, may share a frame: it has one part of at most SMALL_BYTES."""
    return len(message) == 1 and len(message[0]) <= SMALL_BYTES


def batched(messages: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """Yield what to send for `messages`, each a list of parts, in their order.

    Consecutive small messages become one, which `unbatched` divides.
    """
    for small, group in groupby(messages, is_small):
        consecutive = list(group)
        for start in range(0, len(consecutive), MOST_MESSAGES) if small else ():
            heads = [message[0] for message in consecutive[start : start + MOST_MESSAGES]]
            yield heads if len(heads) == 1 else [bytes((BATCH,)) + msgpack.packb(heads)]
        if not small:
            yield from consecutive


def unbatched(frames: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the messages that were received as `frames`, each as a list of parts: several if `frames` is a batch, otherwise `frames` itself.

    A malformed batch is returned as it is: `frames.read_header` refuses it.
    """
    raw = memoryview(frames[0].buffer if frames else b"")
    if raw.nbytes == 0 or raw[0] != BATCH:
        return [frames]
    try:
        heads = msgpack.unpackb(raw[1:], max_array_len=MOST_MESSAGES, max_bin_len=SMALL_BYTES)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        return [frames]
    is_batch = type(heads) is list and all(type(head) is bytes for head in heads)
    return [[head] for head in heads] if is_batch else [frames]
