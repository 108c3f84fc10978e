"""The source that the publisher writes into an offer: where a receiver finds the bytes of a version.

A receiver on the publisher's host maps the shared-memory segment; every other receiver gets a stream of its own.
"""

import logging

from rl_core.messages.weights import MessageSource, PatchSource, SharedSource, StreamSource, WeightOffer, WeightSource
from rl_core.transports import tokens
from rl_core.transports.bulk import BulkSender
from rl_core.transports.curve import KeyRing
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.host_copy import HostCopy, PatchCopy

MESSAGE_BYTES = 1 << 20
"""Patches up to this size, bytes, are part of the offer itself."""

logger = logging.getLogger(__name__)


class SourceFactory:
    """Creates sources for receivers. The socket for streams is opened for the first receiver that needs one."""

    def __init__(self, host: str, *, keys: KeyRing | None, encrypt: bool, host_token: str | None) -> None:
        """`host`: address at which receivers reach this process. `host_token`: identifies the host; None for the token of this host."""
        self._host, self._encrypt = host, encrypt
        self._keys = keys if encrypt else None
        self.host_token = host_token if host_token is not None else tokens.host_token()
        self._bulk: BulkSender | None = None

    def maps(self, copy: HostCopy | PatchCopy, host_token: str) -> bool:
        """Return whether a process with `host_token` can map the memory of `copy`."""
        memory = copy.memory
        if host_token != self.host_token or memory.segment is None:
            return False
        if memory.exists():
            return True
        if not memory.removal_logged:
            memory.removal_logged = True
            logger.warning(
                "segment %s with %s of the weights was removed by somebody: receivers of this host get a stream until the next "
                "version, which gets a segment of its own",
                memory.segment,
                f"version {copy.manifest.version}" if isinstance(copy, HostCopy) else "a patch",
            )
        return False

    def needs_no_relay(self, copy: HostCopy, host_token: str, have: str) -> bool:
        """Return whether a receiver needs no stream of the whole version.

        This is so if the process can map the memory of `copy`, or if a patch applies to the version with digest `have` that it serves.
        """
        return self.maps(copy, host_token) or (copy.patch is not None and copy.patch.base == have)

    def source(self, copy: HostCopy, host_token: str, have: str = "") -> WeightSource:
        """Return the source of `copy` for a process on the host with `host_token`.

        It is the source of the patch if `have`, the digest of the version that the process serves, is the base of the patch.
        """
        if copy.patch is not None and copy.patch.base == have:
            return self.patch_source(copy.patch, host_token)
        return self._data_source(copy, host_token)

    def patch_source(self, patch: PatchCopy, host_token: str) -> PatchSource:
        """Return the source of `patch` for a process on the host with `host_token`."""
        data: SharedSource | StreamSource | MessageSource
        if patch.nbytes <= MESSAGE_BYTES and not self.maps(patch, host_token):
            data = MessageSource(data=patch.memory.data[: patch.nbytes])
        else:
            data = self._data_source(patch, host_token)
        return PatchSource(base=patch.base, tensors=patch.tensors, data=data, verify=patch.verify)

    def _data_source(self, copy: HostCopy | PatchCopy, host_token: str) -> SharedSource | StreamSource:
        """Return the source of bytes in host memory: shared memory or a new stream. A stream can be read by one receiver only."""
        segment = copy.memory.segment
        if segment is not None and self.maps(copy, host_token):
            return SharedSource(segment=segment, nbytes=copy.nbytes)
        if self._bulk is None:
            self._bulk = BulkSender(f"tcp://{self._host}:0", self._keys)
        ticket = self._bulk.offer([copy.memory.data[: copy.nbytes]], share=copy.share)
        return StreamSource(ticket=ticket, encrypted=self._encrypt)

    def close(self) -> None:
        """Close the socket and end all streams."""
        if self._bulk is not None:
            self._bulk.close()


def make_offer(
    copy: HostCopy, source: WeightSource | None, deadlines: Deadlines, patch: PatchSource | None = None
) -> WeightOffer:
    """Return the OFFER of `copy`. A receiver that serves the base of `patch` loads the patch at once; any other loads `source`, if given."""
    manifest = copy.manifest
    return WeightOffer(
        digest=manifest.digest,
        manifest=manifest.packed,
        bucket_bytes=copy.layout.bucket_bytes,
        deadline=deadlines.total(manifest.total_bytes),
        source=source,
        patch=patch,
        keep=copy.patches_follow,
    )
