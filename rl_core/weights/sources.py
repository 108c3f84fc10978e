"""Where a receiver's bytes come from: one opener per kind of source, all giving pieces of the publisher's host copy.

`source` is what the publisher wrote into TRANSFER: {"kind": "shared", segment, nbytes} on one host, what `StreamServer.open`
returned across hosts.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from rl_core.api.errors import ConfigError
from rl_core.api.identity import Identity
from rl_core.transports.curve import KeyRing
from rl_core.transports.shared_memory import SegmentReader
from rl_core.weights.assembly import Piece
from rl_core.weights.bucket import Layout
from rl_core.weights.manifest import WeightManifest
from rl_core.weights.stream import StreamClient


class Sources:
    """What a receiver keeps between syncs: mapped segments. `open` is used in one thread, the rest from any."""

    def __init__(self, *, identity: Identity | None, keys: KeyRing | None) -> None:
        self._identity, self._keys = identity, keys
        self._segments = SegmentReader()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def open(
        self, source: Mapping[str, Any], manifest: WeightManifest, layout: Layout
    ) -> AbstractContextManager[Iterable[Piece]]:
        """Return the pieces of `source` inside a `with`. Raises ConfigError for an unknown kind."""
        openers = {"shared": self._shared, "stream": self._stream}
        opener = openers.get(source["kind"])
        if opener is None:
            raise ConfigError(f"source of weights must be one of {', '.join(openers)}, got {source['kind']!r}")
        return opener(source)

    @contextlib.contextmanager
    def _shared(self, source: Mapping[str, Any]) -> Iterator[Iterable[Piece]]:
        view = self._segments.view(source["segment"], 0, source["nbytes"])
        yield [(0, np.frombuffer(view, np.uint8))]

    @contextlib.contextmanager
    def _stream(self, source: Mapping[str, Any]) -> Iterator[Iterable[Piece]]:
        with contextlib.closing(StreamClient(source, self._keys, self._wake)) as client:
            yield client.pieces()

    def interrupt(self) -> None:
        """End the wait for pieces, if there is one."""
        os.eventfd_write(self._wake, 1)

    def ready(self) -> None:
        """Forget interrupts of the past; before a transfer."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def close(self) -> None:
        """Free what is kept; nothing may be open."""
        os.close(self._wake)
