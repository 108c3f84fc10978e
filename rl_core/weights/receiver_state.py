"""The state of a weight receiver: which version its memory holds, which one is offered, and whether the engine may serve."""

import enum
from collections.abc import Callable

import numpy as np

from rl_core.weights.bucket import DEFAULT_BUCKET_BYTES, Layout
from rl_core.weights.manifest import WeightManifest

NO_VERSION = (-1, "")
"""`current()` of a receiver that has no committed version."""


class ReceiverState(enum.Enum):
    """UNVERSIONED -> READY -> APPLIED -> SERVING -> READY ...; an abandoned sync leads to PAUSED or DIRTY, then to READY."""

    UNVERSIONED = "unversioned"
    """No version was loaded yet, or the epoch changed."""
    READY = "ready"
    """A version is offered. The engine is paused; the data is being loaded or is yet to come."""
    APPLIED = "applied"
    """The version is loaded and verified and waits for COMMIT."""
    SERVING = "serving"
    """The version is committed. The engine serves in this state only."""
    PAUSED = "paused"
    """A sync was abandoned before it changed memory. The previous version is intact but not served."""
    DIRTY = "dirty"
    """A sync was abandoned or failed after it changed memory. No version is committed."""


class VersionStates:
    """State machine of one receiver. Each method is one event; `on_change(state, version, digest)` runs when the state changes.

    Methods are called on the receiver's event loop; `current` may be called from any thread.
    """

    def __init__(self, on_change: Callable[[ReceiverState, int, str], None] | None) -> None:
        self.state = ReceiverState.UNVERSIONED
        self.loaded: WeightManifest | None = None
        """The version whose bytes are verified to be in memory."""
        self.committed = False
        """Whether `loaded` was committed."""
        self.offered: WeightManifest | None = None
        """The version that is offered and not committed yet."""
        self.layout: Layout | None = None
        """Layout of the offered version."""
        self.bucket_bytes = DEFAULT_BUCKET_BYTES
        """Bucket size of the version that was offered last."""
        self.retained: dict[str, np.ndarray] | None = None
        """Bytes of the loaded tensors that cannot be read back from the engine, for later patches; None if no patches are sent."""
        self._on_change = on_change

    def current(self) -> tuple[int, str]:
        """Return (version, digest) of the committed version in memory; `NO_VERSION` if there is none."""
        loaded = self.loaded
        return (loaded.version, loaded.digest) if loaded is not None and self.committed else NO_VERSION

    def newest(self) -> tuple[int, int] | None:
        """Return (epoch, version) of the newest version that is loaded or offered; None if there is none."""
        manifests = (manifest for manifest in (self.loaded, self.offered) if manifest is not None)
        return max(((manifest.epoch, manifest.version) for manifest in manifests), default=None)

    def serves(self, digest: str) -> bool:
        """Return whether the version with `digest` is being served."""
        return self.state is ReceiverState.SERVING and self.current()[1] == digest

    @property
    def base(self) -> str:
        """Digest of the base below the adapters of the committed version; "" if there is none."""
        return self.loaded.base_digest if self.loaded is not None and self.committed else ""

    def accepts(self, base: str) -> bool:
        """Return whether a patch to `base`, the digest of a version or of the base below adapters, applies to the committed version."""
        return bool(base) and base in (self.current()[1], self.base)

    def offer(self, manifest: WeightManifest, layout: Layout, *, retain: bool) -> None:
        """Record the offered version; `retain`: whether later versions may be sent as patches."""
        self.offered, self.layout, self.bucket_bytes = manifest, layout, layout.bucket_bytes
        self.retained = (self.retained or {}) if retain else None

    def await_data(self) -> None:
        """The engine is being paused and the data of the offered version is to be loaded."""
        self._enter(ReceiverState.READY)

    def already_loaded(self) -> None:
        """The offered version was loaded by an earlier sync and only needs COMMIT."""
        self._enter(ReceiverState.APPLIED)

    def apply(self, manifest: WeightManifest) -> None:
        """The bytes of `manifest` were loaded and verified."""
        self.loaded, self.committed = manifest, False
        self._enter(ReceiverState.APPLIED)

    def commit(self) -> None:
        """The loaded version is served from now on."""
        self.committed = True
        self.clear_offer()
        self._enter(ReceiverState.SERVING)

    def patch_failed(self) -> None:
        """A patch failed verification. The memory holds no version, and the whole offered version is needed."""
        self.loaded = None
        self._enter(ReceiverState.DIRTY)
        self._enter(ReceiverState.READY)

    def abandon(self, *, touched: bool) -> None:
        """The sync ended without COMMIT; `touched`: whether it may have changed memory."""
        if touched:
            self.loaded = None
        self.clear_offer()
        if touched or (self.loaded is not None and not self.committed):
            self._enter(ReceiverState.DIRTY)
        else:
            self._enter(ReceiverState.PAUSED if self.loaded is not None else ReceiverState.UNVERSIONED)

    def reset(self) -> None:
        """The memory holds no usable version: the epoch changed, or the engine lost its memory."""
        self.clear_offer()
        self.loaded = None
        self._enter(ReceiverState.UNVERSIONED)

    def clear_offer(self) -> None:
        """Forget the offered version."""
        self.offered = self.layout = None

    def _enter(self, state: ReceiverState) -> None:
        if state is not self.state:
            self.state = state
            if self._on_change is not None:
                self._on_change(state, *self.current())
