"""What a receiver of weights needs from the engine it feeds; rollout workers implement it, `receiver` calls it.

    prepare -> load -> resume          a sync that was committed
    prepare -> load (or nothing)       a sync that was not: the engine stays paused until the next one

Between `prepare` and `resume` the engine serves nothing. `load` runs in a thread, the others on the worker's event loop.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


class WeightTarget(Protocol):
    """An engine whose weights can be replaced. Implemented by rollout workers."""

    async def prepare(self, deadline: float) -> None:
        """Admit no request and wait for those in flight, at most `deadline` seconds (then raise DeadlineExceeded)."""
        ...

    def names_and_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return name -> (shape, dtype such as "float32") of every tensor it must be given; tied names may be absent."""
        ...

    def load(self, tensors: Iterator[tuple[str, "torch.Tensor"]], version: int) -> None:
        """Take every (name, tensor) of the iterator; each is verified, and valid until this returns. It may raise: let it.

        Names are those of `names_and_shapes`. After an error the weights are of no version until the next `load`.
        """
        ...

    async def resume(self, version: int, digest: str) -> None:
        """Serve `version`: its bytes are proven and committed."""
        ...


@runtime_checkable
class InPlaceTarget(Protocol):
    """A target whose parameters the receiver may write itself: verified while copied, one pass over memory instead of two.

    Its `load` must not wait for the event loop: a small model is loaded on it.
    """

    def destinations(self) -> Mapping[str, "torch.Tensor"]:
        """Return name -> contiguous CPU tensor to write; these names are not given to `load`, which is called all the same.

        The tensors must stay the same memory from one sync to the next or be returned anew each time. A patch is written over
        what the sync before left there: who gives that memory up in between has the receiver `forget`.
        """
        ...
