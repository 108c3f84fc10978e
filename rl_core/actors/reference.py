"""The reference policy: a host copy of the initial or of later weights, which takes their place in the model for a forward pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from rl_core.actors.slices import Slices
from rl_core.weights.offload import distinct_storages


class ReferencePolicy:
    """The reference policy's weights that this rank stores, kept in host memory in the dtype in which the model computes."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        dtype: torch.dtype,
        make_room: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Copy the current values of `tensors`, the parameters that this rank stores. Tensors that share a storage are copied once.

        `dtype` is the type in which the model computes. It may be narrower than the type of `tensors` if the model casts them for each pass.
        `make_room` returns a context manager that frees device memory for a second copy of the weights.
        """
        self._make_room = make_room
        self._live = [_elements_of(tensor) for tensor in distinct_storages(tensors)]
        self._held = [_host_copy(tensor, dtype) for tensor in self._live]
        self.is_renewed = False
        """Whether the weights may be others than at construction."""

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Replace the model's weights by those of the reference policy inside the block.

        Meanwhile the trained weights are kept on the device, so each element is moved to the device once, and none to the host. Afterwards
        they are back, bit for bit.
        """
        with self._make_room(), self._exchanged():
            yield

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        trained = [live.clone() for live in self._live]
        try:
            for live, held in zip(self._live, self._held, strict=True):
                # The tensor is moved before it is cast. Otherwise torch would cast it on the host.
                live.copy_(held.to(live.device, non_blocking=True))
            yield
        finally:
            for live, saved in zip(self._live, trained, strict=True):
                live.copy_(saved)

    def renew(self) -> None:
        """Copy the model's present weights."""
        for live, held in zip(self._live, self._held, strict=True):
            held.copy_(live.to(held.dtype))
        self.is_renewed = True

    def slices(self, weights: Slices) -> Slices:
        """Return the reference policy's values of `weights`, which are parts of the model's weights, in float32; none of buffers.

        They share memory with this object where the model computes in float32.
        """
        return {
            name: [replace(part, tensor=part.tensor.float()) for part in parts]
            for name, parts in self._views(weights).items()
        }

    def restore(self, weights: Slices, values: Slices) -> None:
        """Set the reference policy's values of `weights` to `values`, which have the layout of the result of `slices`."""
        for name, parts in self._views(weights).items():
            for part, saved in zip(parts, values[name], strict=True):
                part.tensor.copy_(saved.tensor)
        self.is_renewed = True

    def _views(self, weights: Slices) -> Slices:
        """Return views of this object's memory, in the places that `weights` have in the model's."""
        held_of = {live.untyped_storage()._cdata: held for live, held in zip(self._live, self._held, strict=True)}
        return {
            name: [
                replace(part, tensor=_same_place(part.tensor, held_of[part.tensor.untyped_storage()._cdata]))
                for part in parts
            ]
            for name, parts in weights.items()
            if all(part.tensor.untyped_storage()._cdata in held_of for part in parts)
        }


def _elements_of(tensor: Tensor) -> Tensor:
    """Return all elements of the tensor's storage, one-dimensional, sharing memory."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, 0, (storage.nbytes() // tensor.element_size(),)
    )


def _host_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of type `dtype` in host memory, which is page-locked where an accelerator copies from it."""
    return torch.empty_like(tensor, dtype=dtype, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)


def _same_place(tensor: Tensor, held: Tensor) -> Tensor:
    """Return a view of `held` with the place and shape that `tensor` has in its own storage."""
    return held.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
