"""Where a receiver's bytes come from: one opener per kind of source, all giving pieces of the publisher's host copy.

`source` is what the publisher wrote into TRANSFER: {"kind": "shared", segment, nbytes} on one host.
"""

import contextlib
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


class Sources:
    """What a receiver keeps between syncs: mapped segments."""

    def __init__(self, *, identity: Identity | None, keys: KeyRing | None) -> None:
        self._identity, self._keys = identity, keys
        self._segments = SegmentReader()

    def open(
        self, source: Mapping[str, Any], manifest: WeightManifest, layout: Layout
    ) -> AbstractContextManager[Iterable[Piece]]:
        """Return the pieces of `source` inside a `with`. Raises ConfigError for an unknown kind."""
        if source["kind"] == "shared":
            return self._shared(source)
        raise ConfigError(f"source of weights must be shared, got {source['kind']!r}")

    @contextlib.contextmanager
    def _shared(self, source: Mapping[str, Any]) -> Iterator[Iterable[Piece]]:
        view = self._segments.view(source["segment"], 0, source["nbytes"])
        yield [(0, np.frombuffer(view, np.uint8))]

    def interrupt(self) -> None:
        """End a wait for pieces, from any thread."""

    def close(self) -> None:
        """Free what is kept."""
