"""Streams a verified version from the memory of a receiver to other receivers (`weights.fanout`).

The engine serves from the same memory at the same time. The memory is written only for the next version, and the streams end before that.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from rl_core.api.errors import InfrastructureError
from rl_core.messages.weights import StreamSource
from rl_core.transports.bulk import BulkSender, SharedTags
from rl_core.transports.curve import KeyRing
from rl_core.weights.bucket import Layout
from rl_core.weights.manifest import WeightManifest


class Relay:
    """Opens streams of one version at a time. `host`: address at which others reach this process; `keys`: for encrypted streams."""

    def __init__(self, host: str, keys: KeyRing | None) -> None:
        self._host, self._keys = host, keys
        self._bulk: dict[bool, BulkSender] = {}
        """Senders by whether they encrypt."""
        self._digest = ""
        self._share = SharedTags()
        """Key and tags shared by all streams of the version."""

    def stream(
        self, manifest: WeightManifest, layout: Layout, memory: Mapping[str, np.ndarray], *, encrypted: bool
    ) -> StreamSource:
        """Return a stream of `manifest` for one receiver. `memory` holds the bytes (uint8) of each tensor by name."""
        if encrypted not in self._bulk:
            self._bulk[encrypted] = BulkSender(f"tcp://{self._host}:0", self._keys if encrypted else None)
        if self._digest != manifest.digest:
            self._digest, self._share = manifest.digest, SharedTags()
        buffers = self._buffers(manifest, layout, memory)
        return StreamSource(ticket=self._bulk[encrypted].offer(buffers, share=self._share), encrypted=encrypted)

    def withdraw(self) -> None:
        """Stop offering the version, because its memory is about to be overwritten; streams in progress fail.

        If a chunk changes while it is sent, the receiver rejects it, because its authentication tag does not match.
        """
        self._digest = ""

    def _buffers(
        self, manifest: WeightManifest, layout: Layout, memory: Mapping[str, np.ndarray]
    ) -> Iterator[np.ndarray]:
        """Yield the bytes in the layout of the publisher's host copy."""
        end = 0
        for index, start in layout.starts.items():
            if self._digest != manifest.digest:
                raise InfrastructureError("the version is being replaced at the receiver that gave it")
            data = memory[manifest.entries[index].name]
            yield np.zeros(start - end, np.uint8)
            yield data
            end = start + data.size

    def close(self) -> None:
        """End the streams and their thread."""
        for bulk in self._bulk.values():
            bulk.close()
