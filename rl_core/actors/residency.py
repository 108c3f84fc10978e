"""Where weights, gradients and optimizer state are: on the compute device or offloaded (trainers.md 5)."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rl_core.weights.offload import Offloader, give_back


class Residency(ABC):
    """The offload verbs of a manager: idempotent, local to the rank, legal in any order."""

    compute_device: torch.device

    def __init__(self) -> None:
        pin = self.compute_device.type == "cuda"
        self._weights, self._moments = Offloader(pin=pin), Offloader(pin=pin)
        self._moved: dict[str, float] = {}
        """`offload/{bytes,seconds}` and `onload/{bytes,seconds}` since the last `occupy`."""
        self.is_set_up = False
        """Whether there is a model, of which parts can be away."""
        self.is_grad_offloaded = False
        self.offload_metrics: dict[str, float] = {}
        """`offload/{bytes,seconds}` and `onload/{bytes,seconds}` of the last verb of each kind."""

    # What the backend's manager answers -----------------------------------------------------------------------------

    @abstractmethod
    def _weight_tensors(self) -> Iterable[Tensor]:
        """Return what this rank stores of parameters and buffers; views of one storage may repeat."""

    @abstractmethod
    def _moment_tensors(self) -> Iterable[Tensor]:
        """Return what this rank stores of the optimizer's state, step counters aside."""

    @abstractmethod
    def _release_state(self) -> None:
        """Wait until nobody else reads weights and moments: they are about to change or to go away."""

    @abstractmethod
    def _grads_wait(self) -> bool:
        """Return whether there are gradients that no optimizer step has applied."""

    @abstractmethod
    def _release_gradients(self) -> None:
        """Give up the gradients and their memory; a second call does nothing."""

    @abstractmethod
    def _zero_gradients(self) -> None:
        """Have gradients again, all zero."""

    # The verbs --------------------------------------------------------------------------------------------------------

    @property
    def is_weight_offloaded(self) -> bool:
        """Return whether the weights are away."""
        return self._weights.is_offloaded

    @property
    def is_optimizer_offloaded(self) -> bool:
        """Return whether the moments are away; step counters never are."""
        return self._moments.is_offloaded

    def offload_param_and_grad(self, offload_grad: bool = False) -> None:
        """Take the weights away; with `offload_grad` drop the gradients too.

        Raises RuntimeError when gradients wait for their optimizer step.
        """
        if offload_grad:
            self._give_up_gradients()
        if not self.is_weight_offloaded:
            self._release_state()
            self._weights.offload(self._weight_tensors())
            self._report("offload", self._weights)

    def load_param_and_grad(self, device_id: int, load_grad: bool = False) -> None:
        """Bring the weights back, bit-equal in the same objects; with `load_grad` gradients start from zero.

        `device_id`: the rank's accelerator, ignored on CPU; ValueError when there is none of that number.
        """
        self._check_device(device_id)
        if self.is_weight_offloaded:
            self._weights.reload()
            self._report("onload", self._weights)
        if load_grad and self.is_grad_offloaded:
            self._zero_gradients()
            self.is_grad_offloaded = False

    def offload_optimizer(self) -> None:
        """Take the moments away."""
        if not self.is_optimizer_offloaded:
            self._release_state()
            self._moments.offload(self._moment_tensors())
            self._report("offload", self._moments)

    def load_optimizer(self, device_id: int) -> None:
        """Bring the moments back, bit-equal."""
        self._check_device(device_id)
        if self.is_optimizer_offloaded:
            self._moments.reload()
            self._report("onload", self._moments)

    def occupy(self, parts: Collection[str]) -> dict[str, float]:
        """Have `parts` of weights, gradients, optimizer on the device and no others. Away they go in the reverse order, back in this one.

        Returns `offload/{bytes,seconds}` and `onload/{bytes,seconds}` of all that moved since the last call, here or for another verb.
        Raises RuntimeError when gradients would go that wait for their optimizer step.
        """
        if not self.is_set_up:
            return {}
        index = self.compute_device.index or 0
        if "optimizer" not in parts:
            self.offload_optimizer()
        if "gradients" not in parts:
            self._give_up_gradients()
        if "weights" not in parts:
            self.offload_param_and_grad()
        if "offload/bytes" in self._moved:
            give_back(self.compute_device)
        if "weights" in parts:
            self.load_param_and_grad(index, load_grad="gradients" in parts)
        if "optimizer" in parts:
            self.load_optimizer(index)
        moved, self._moved = self._moved, {}
        return moved

    @contextmanager
    def loaded(self, *, moments: bool = True) -> Iterator[None]:
        """Have weights, and with `moments` these too, present inside the block, and afterwards where they were."""
        weights, moments = self.is_weight_offloaded, moments and self.is_optimizer_offloaded
        index = self.compute_device.index or 0
        self.load_param_and_grad(index)
        if moments:
            self.load_optimizer(index)
        try:
            yield
        finally:
            if moments:
                self.offload_optimizer()
            if weights:
                self.offload_param_and_grad()

    def _give_up_gradients(self) -> None:
        if self._grads_wait():
            raise RuntimeError("offload_grad must not be asked for between backward and optimizer_step; step first")
        self._release_gradients()
        self.is_grad_offloaded = True

    def _require_loaded(self, doing: str, *, moments: bool = False) -> None:
        if self.is_weight_offloaded:
            raise RuntimeError(f"{doing} needs the weights, which are offloaded; call load_param_and_grad first")
        if moments and self.is_optimizer_offloaded:
            raise RuntimeError(f"{doing} needs the moments, which are offloaded; call load_optimizer first")

    def _check_device(self, device_id: int) -> None:
        if self.compute_device.type == "cuda" and not 0 <= device_id < torch.cuda.device_count():
            raise ValueError(
                f"device_id must be in [0, {torch.cuda.device_count()}), got {device_id}; use the rank's accelerator"
            )

    def _report(self, verb: str, offloader: Offloader) -> None:
        taken = {f"{verb}/bytes": float(offloader.bytes), f"{verb}/seconds": offloader.seconds}
        self.offload_metrics |= taken
        self._moved |= {name: self._moved.get(name, 0.0) + value for name, value in taken.items()}
