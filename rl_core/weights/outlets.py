"""What the publisher writes into offers: the OFFER of a host copy, and where a receiver finds its bytes.

A receiver of the publisher's host maps the segment; every other one gets a stream of its own.
"""

import logging

from rl_core.messages.weights import MessageSource, PatchSource, SharedSource, StreamSource, WeightOffer, WeightSource
from rl_core.transports import tokens
from rl_core.transports.bulk import BulkSender
from rl_core.transports.curve import KeyRing
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.host_copy import HostCopy, PatchCopy

MESSAGE_BYTES = 1 << 20
"""Patches up to this size travel in the offer."""

logger = logging.getLogger(__name__)


class Outlets:
    """Opens sources for receivers. The stream's socket is made with the first receiver that needs it."""

    def __init__(self, host: str, *, keys: KeyRing | None, encrypt: bool, host_token: str | None) -> None:
        """`host`: the address receivers reach this process at. `host_token` None = this host's."""
        self._host, self._encrypt = host, encrypt
        self._keys = keys if encrypt else None
        self.host_token = host_token if host_token is not None else tokens.host_token()
        self._bulk: BulkSender | None = None

    def maps(self, copy: HostCopy | PatchCopy, host_token: str) -> bool:
        """Return whether a process with that token can map `copy`."""
        memory = copy.memory
        if host_token != self.host_token or memory.segment is None:
            return False
        if memory.is_there():
            return True
        if not memory.told:
            memory.told = True
            logger.warning(
                "segment %s with %s of the weights was removed by somebody: receivers of this host get a stream until the next "
                "version, which gets a segment of its own",
                memory.segment,
                f"version {copy.manifest.version}" if isinstance(copy, HostCopy) else "a patch",
            )
        return False

    def is_near(self, copy: HostCopy, host_token: str, have: str) -> bool:
        """Return whether that process, which serves the digest `have`, needs no stream of the whole version."""
        return self.maps(copy, host_token) or (copy.patch is not None and copy.patch.base == have)

    def source(self, copy: HostCopy, host_token: str, have: str = "") -> WeightSource:
        """Return where that process gets the bytes of `copy`, of its patch where `have` (the digest it serves) is the patch's base."""
        if copy.patch is not None and copy.patch.base == have:
            return self.patch_source(copy.patch, host_token)
        return self._place(copy, host_token)

    def patch_source(self, patch: PatchCopy, host_token: str) -> PatchSource:
        """Return where that process gets `patch`."""
        data: SharedSource | StreamSource | MessageSource
        if patch.nbytes <= MESSAGE_BYTES and not self.maps(patch, host_token):
            data = MessageSource(data=patch.memory.data[: patch.nbytes])
        else:
            data = self._place(patch, host_token)
        return PatchSource(base=patch.base, tensors=patch.tensors, data=data, verify=patch.verify)

    def _place(self, copy: HostCopy | PatchCopy, host_token: str) -> SharedSource | StreamSource:
        """Return where the bytes are; a stream is good for one receiver."""
        segment = copy.memory.segment
        if segment is not None and self.maps(copy, host_token):
            return SharedSource(segment=segment, nbytes=copy.nbytes)
        if self._bulk is None:
            self._bulk = BulkSender(f"tcp://{self._host}:0", self._keys)
        ticket = self._bulk.offer([copy.memory.data[: copy.nbytes]], share=copy.share)
        return StreamSource(ticket=ticket, encrypted=self._encrypt)

    def close(self) -> None:
        """End the streams."""
        if self._bulk is not None:
            self._bulk.close()


def offer_of(
    copy: HostCopy, source: WeightSource | None, deadlines: Deadlines, patch: PatchSource | None = None
) -> WeightOffer:
    """Return OFFER of `copy`; with `source` the receiver loads at once, from `patch` where it serves the base of that."""
    manifest = copy.manifest
    return WeightOffer(
        digest=manifest.digest,
        manifest=manifest.packed,
        bucket_bytes=copy.layout.bucket_bytes,
        deadline=deadlines.total(manifest.total_bytes),
        source=source,
        patch=patch,
        keep=copy.chained,
    )
