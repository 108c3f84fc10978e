"""The reference policy: a host copy of the initial weights, which is swapped into the model for a forward pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rl_core.weights.offload import bytes_of, distinct_storages


class ReferencePolicy:
    """This rank's part of the initial weights, in host memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Copy the present values of `tensors`, the parameters that this rank stores. Each storage is copied once."""
        self._live = [bytes_of(tensor.untyped_storage()) for tensor in distinct_storages(tensors)]
        self._held = [tensor.to("cpu", copy=True) for tensor in self._live]

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Exchange the model's weights with the initial ones inside the block.

        Afterwards the trained weights are back, bit for bit.
        """
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
