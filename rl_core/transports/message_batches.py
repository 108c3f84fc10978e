"""Several small messages in one frame.

With many calls in flight, the calls of ZeroMQ and the changes of threads that a message of its own costs take longer than what it carries.
A frame with one message begins with the version byte of `frames`, one with several begins with BATCH.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import msgpack

BATCH = 2
"""First byte of a frame that has several messages, as a msgpack list of bytes."""
SMALL_BYTES = 4096
"""Largest message that shares a frame."""
MOST_MESSAGES = 64
"""Most messages of a frame."""


def is_small(message: Sequence[Any]) -> bool:
    """Return whether `message`, a list of parts, may share a frame: it has one part of at most SMALL_BYTES."""
    return len(message) == 1 and len(message[0]) <= SMALL_BYTES


def batched(messages: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """Yield `messages`, each a list of parts, in their order; consecutive small ones as one message, which `unbatched` divides."""
    for small, group in groupby(messages, is_small):
        found = list(group)
        for start in range(0, len(found), MOST_MESSAGES) if small else ():
            heads = [message[0] for message in found[start : start + MOST_MESSAGES]]
            yield heads if len(heads) == 1 else [bytes((BATCH,)) + msgpack.packb(heads)]
        if not small:
            yield from found


def unbatched(frames: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the messages, each a list of parts, in the received `frames` of one.

    A malformed batch is returned as it is: `frames.read_header` refuses it.
    """
    raw = memoryview(frames[0].buffer)
    if raw.nbytes == 0 or raw[0] != BATCH:
        return [frames]
    try:
        heads = msgpack.unpackb(raw[1:], max_array_len=MOST_MESSAGES, max_bin_len=SMALL_BYTES)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        return [frames]
    is_batch = type(heads) is list and all(type(head) is bytes for head in heads)
    return [[head] for head in heads] if is_batch else [frames]
