"""The reference policy: a host copy of the initial or of later weights, which is swapped into the model for a forward pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from rl_core.actors.slices import Slices
from rl_core.weights.offload import bytes_of, distinct_storages


class ReferencePolicy:
    """This rank's part of the weights of the reference policy, in host memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Copy the present values of `tensors`, the parameters that this rank stores. Each storage is copied once."""
        self._live = [bytes_of(tensor.untyped_storage()) for tensor in distinct_storages(tensors)]
        self._held = [_host_copy(tensor) for tensor in self._live]
        self.is_renewed = False
        """Whether the weights may be others than at construction."""

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Exchange the model's weights with those of the reference policy inside the block.

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
            passing = _host_copy(max(self._live, key=len)) if self._live else None
            for live, held in zip(self._live, self._held, strict=True):
                assert passing is not None
                passing[: len(live)].copy_(live)
                live.copy_(held)
                held.copy_(passing[: len(live)])

    def renew(self) -> None:
        """Copy the model's present weights."""
        for live, held in zip(self._live, self._held, strict=True):
            held.copy_(live)
        self.is_renewed = True

    def slices(self, weights: Slices) -> Slices:
        """Return the reference policy's values of `weights`, which are parts of the model's weights, in float32; none of buffers.

        They share memory with this object where the model's weights are float32.
        """
        return {
            name: [replace(part, tensor=part.tensor.float()) for part in parts]
            for name, parts in self._views(weights).items()
        }

    def restore(self, weights: Slices, values: Slices) -> None:
        """Set the reference policy's values of `weights` to `values`, which have the layout of the result of `slices`."""
        for name, parts in self._views(weights).items():
            for part, read in zip(parts, values[name], strict=True):
                part.tensor.copy_(read.tensor)
        self.is_renewed = True

    def _views(self, weights: Slices) -> Slices:
        """Return views of this object's memory, in the places that `weights` have in the model's."""
        held_of = {
            live.untyped_storage()._cdata: held.untyped_storage()
            for live, held in zip(self._live, self._held, strict=True)
        }
        return {
            name: [
                replace(part, tensor=_same_place(part.tensor, held_of[part.tensor.untyped_storage()._cdata]))
                for part in parts
            ]
            for name, parts in weights.items()
            if all(part.tensor.untyped_storage()._cdata in held_of for part in parts)
        }


def _host_copy(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, which is page-locked where an accelerator copies from and to it."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)


def _same_place(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return a view of `storage` with the type, place and shape that `tensor` has in its own storage."""
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
