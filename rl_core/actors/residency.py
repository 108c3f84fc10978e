"""Moves weights, gradients and optimizer state between the compute device and host memory, so that others can use the device.

`ModelManager.residency` is an OffloadManager. Its methods are local to the rank, may be called in any order, and do nothing when called
twice.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rl_core.weights.offload import Offloader, empty_device_cache


class ResidentState(ABC):
    """The training state that an OffloadManager moves. Each backend's `ModelManager` implements it. No method is collective."""

    @abstractmethod
    def weight_tensors(self) -> Iterable[Tensor]:
        """Return the parameters and buffers that this rank stores. Several tensors may be views of one storage."""

    @abstractmethod
    def moment_tensors(self) -> Iterable[Tensor]:
        """Return the optimizer state that this rank stores, without the step counters."""

    @abstractmethod
    def wait_for_readers(self) -> None:
        """Wait until a background save has copied weights and moments. Must be called before they are changed or moved."""

    @abstractmethod
    def has_gradients(self) -> bool:
        """Return whether memory for gradients is allocated."""

    @abstractmethod
    def has_pending_gradients(self) -> bool:
        """Return whether there are gradients that no optimizer step has applied."""

    @abstractmethod
    def release_gradients(self) -> None:
        """Free the memory of the gradients. A second call does nothing."""

    @abstractmethod
    def allocate_gradients(self) -> None:
        """Allocate gradients that are all zero."""


class OffloadManager:
    """Moves the parts of a model's training state between device and host, and tracks where each part is."""

    def __init__(self, state: ResidentState, device: torch.device) -> None:
        """Track `state`, which is on the compute device `device`.

        Offloaded tensors go to page-locked host memory when the device is a CUDA device.
        """
        self._state, self._device = state, device
        pin = device.type == "cuda"
        self._weights, self._moments = Offloader(pin=pin), Offloader(pin=pin)
        self._moved: dict[str, float] = {}
        """`offload/{bytes,seconds}` and `onload/{bytes,seconds}`, summed since the last call of `occupy`."""
        self.has_model = False
        """Whether the model is built. `occupy` does nothing before."""
        self.gradients_offloaded = False
        """Whether the gradients are released."""
        self.metrics: dict[str, float] = {}
        """`offload/{bytes,seconds}` and `onload/{bytes,seconds}` of the last offload and the last onload."""

    @property
    def weights_offloaded(self) -> bool:
        """Whether the weights are in host memory."""
        return self._weights.is_offloaded

    @property
    def optimizer_offloaded(self) -> bool:
        """Whether the optimizer's moments are in host memory. Step counters always stay on the device."""
        return self._moments.is_offloaded

    def offload_weights(self) -> None:
        """Move the weights to host memory."""
        if not self.weights_offloaded:
            self._state.wait_for_readers()
            self._weights.offload(self._state.weight_tensors())
            self._report("offload", self._weights)

    def load_weights(self) -> None:
        """Move the weights back to the device: the same tensor objects with bit-equal values."""
        if self.weights_offloaded:
            self._weights.reload()
            self._report("onload", self._weights)

    def offload_gradients(self) -> None:
        """Drop the gradients and free their memory. Raises RuntimeError between a backward pass and its optimizer step."""
        if self._state.has_pending_gradients():
            raise RuntimeError("offload_grad must not be asked for between backward and optimizer_step; step first")
        self._state.release_gradients()
        self.gradients_offloaded = True

    def load_gradients(self) -> None:
        """Allocate the gradients again, all zero, if they were released."""
        if self.gradients_offloaded:
            self._state.allocate_gradients()
            self.gradients_offloaded = False

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Free the memory of the gradients inside the block. If there were any, they are allocated again afterwards, all zero.

        Raises RuntimeError between a backward pass and its optimizer step.
        """
        if not self._state.has_gradients():
            yield
            return
        self.offload_gradients()
        try:
            yield
        finally:
            self.load_gradients()

    def offload_optimizer(self) -> None:
        """Move the optimizer's moments to host memory."""
        if not self.optimizer_offloaded:
            self._state.wait_for_readers()
            self._moments.offload(self._state.moment_tensors())
            self._report("offload", self._moments)

    def load_optimizer(self) -> None:
        """Move the moments back to the device, bit-equal."""
        if self.optimizer_offloaded:
            self._moments.reload()
            self._report("onload", self._moments)

    def occupy(self, parts: Collection[str]) -> dict[str, float]:
        """Keep exactly `parts` ("weights", "gradients", "optimizer") on the device.

        The other parts are offloaded first, then these are loaded. Returns `offload/{bytes,seconds}` and `onload/{bytes,seconds}` of
        everything that was moved since the last call, also by other methods. Raises RuntimeError when gradients that no optimizer step has
        applied would be dropped. Before the model is built it does nothing and returns {}.
        """
        if not self.has_model:
            return {}
        if "optimizer" not in parts:
            self.offload_optimizer()
        if "gradients" not in parts:
            self.offload_gradients()
        if "weights" not in parts:
            self.offload_weights()
        if "offload/bytes" in self._moved:
            empty_device_cache(self._device)
        if "weights" in parts:
            self.load_weights()
            if "gradients" in parts:
                self.load_gradients()
        if "optimizer" in parts:
            self.load_optimizer()
        moved, self._moved = self._moved, {}
        return moved

    @contextmanager
    def loaded(self, *, moments: bool = True) -> Iterator[None]:
        """Keep the weights, and with `moments` the optimizer state, on the device inside the block.

        Afterwards what was offloaded before is offloaded again.
        """
        weights_were_offloaded = self.weights_offloaded
        moments_were_offloaded = moments and self.optimizer_offloaded
        self.load_weights()
        if moments_were_offloaded:
            self.load_optimizer()
        try:
            yield
        finally:
            if moments_were_offloaded:
                self.offload_optimizer()
            if weights_were_offloaded:
                self.offload_weights()

    def require_loaded(self, action: str, *, moments: bool = False) -> None:
        """Raise RuntimeError naming `action` when the weights, or with `moments` the optimizer state, are offloaded."""
        if self.weights_offloaded:
            raise RuntimeError(f"{action} needs the weights, which are offloaded; call load_param_and_grad first")
        if moments and self.optimizer_offloaded:
            raise RuntimeError(f"{action} needs the moments, which are offloaded; call load_optimizer first")

    def _report(self, verb: str, offloader: Offloader) -> None:
        moved = {f"{verb}/bytes": float(offloader.bytes), f"{verb}/seconds": offloader.seconds}
        self.metrics |= moved
        self._moved |= {name: self._moved.get(name, 0.0) + value for name, value in moved.items()}
