"""What a receiver of weights needs from the engine: rollout workers implement it, `receiver` calls it.

    prepare -> load -> resume          a sync that is committed
    prepare -> load (or nothing)       a sync that is not committed: the engine stays paused until the next one

Between `prepare` and `resume` the engine serves nothing. `load` runs in a thread, the other methods on the worker's event loop.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from rl_core.messages.weights import DeviceSource, GroupSource, SharedSource
    from rl_core.weights.assembly import Assembly


class WeightTarget(Protocol):
    """An engine whose weights can be replaced. Implemented by rollout workers."""

    async def prepare(self, deadline: float) -> None:
        """Accept no new requests and wait for those in flight. Raises DeadlineExceeded after `deadline` seconds."""
        ...

    def names_and_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return name -> (shape, dtype such as "float32") of every tensor that the engine must be given. Tied names may be absent."""
        ...

    def load(self, tensors: Iterator[tuple[str, "torch.Tensor"]], version: int) -> None:
        """Take every (name, tensor) of the iterator. Each tensor is verified and valid until this returns.

        Names are those of `names_and_shapes`. Errors of the iterator must be propagated. After an error the weights have no version until
        the next `load`.
        """
        ...

    async def resume(self, version: int, digest: str) -> None:
        """Serve `version`, whose bytes are verified and committed."""
        ...


@runtime_checkable
class InPlaceTarget(Protocol):
    """A target whose parameters the receiver writes directly: they are verified while they are copied, in one pass over memory instead of two.

    Its `load` must not wait for the event loop, because a small model is loaded on the loop.
    """

    def destinations(self) -> Mapping[str, "torch.Tensor"]:
        """Return name -> contiguous CPU tensor to write to. These names are not passed to `load`, which is called nevertheless.

        The tensors must keep their memory from one sync to the next, or be returned anew each time. A patch is applied to what the previous sync
        left in them: an engine that frees the memory in between must call `forget` of the receiver.
        """
        ...


@runtime_checkable
class RankTarget(Protocol):
    """A target whose engine has its own processes, the ranks, which read a version directly from the memory or group of the publisher.

    The bytes of such a version do not pass through the process of the receiver.
    """

    @property
    def ranks(self) -> int:
        """Return the number of processes."""
        ...

    @property
    def group(self) -> str:
        """Return the key of the process group that all ranks are in and that is usable; "" if there is none."""
        ...

    @property
    def group_ended(self) -> bool:
        """Return whether the last `load_source` failed at every failed rank because of the process group or the mapping.

        The version can then be offered in another way.
        """
        ...

    @property
    def opened(self) -> tuple[int, ...]:
        """Return which ranks have opened their handle in the last `load_source`, of a `DeviceSource`."""
        ...

    def load_source(self, source: "SharedSource | DeviceSource | GroupSource", assembly: "Assembly") -> None:
        """Let each rank read the version of `assembly` from `source`, verify and load it.

        Called instead of `load`. The names of tensors whose checksum differs are added to `assembly.bad`. After an error the weights have
        no version until the next `load` or `load_source`.
        """
        ...
