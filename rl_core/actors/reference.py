"""The reference policy: a host copy of the initial weights that is swapped in for a forward pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rl_core.weights.offload import bytes_of, distinct_storages


class ReferencePolicy:
    """This rank's part of the initial weights, in host memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Copy `tensors`, those this rank stores, as they are now: each storage once and whole, whatever views of it are given."""
        self._live = [bytes_of(tensor.untyped_storage()) for tensor in distinct_storages(tensors)]
        self._held = [tensor.to("cpu", copy=True) for tensor in self._live]

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Have the starting weights in the model inside the block; the trained ones are back afterwards, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        # One tensor at a time: the device never holds both policies.
        with torch.no_grad():
            for live, held in zip(self._live, self._held, strict=True):
                passing = live.to("cpu", copy=True)
                live.copy_(held)
                held.copy_(passing)
