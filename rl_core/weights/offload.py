"""Moves the bytes of tensors to host memory and back without replacing any object.

Storages are emptied in place, so views, tied tensors, the state of FSDP and the keys of optimizers stay valid. Offloading from CPU to
CPU makes a copy as well: the emptied storage makes the state observable in tests on any machine.
"""

import time
from collections.abc import Iterable

import torch
from torch import Tensor


class Offloader:
    """Keeps the bytes of the tensors given to `offload` until `reload`."""

    def __init__(self, target: str = "cpu", pin: bool = False) -> None:
        """`target`: device that keeps the bytes. `pin`: use page-locked memory, which an accelerator copies asynchronously."""
        self.target = torch.device(target)
        self.pin = pin
        self._offloaded: list[tuple[torch.UntypedStorage, Tensor]] = []
        self.bytes = 0
        """Number of bytes moved by the last call."""
        self.seconds = 0.0
        """Duration of the last call, seconds."""

    @property
    def is_offloaded(self) -> bool:
        """Return whether bytes are offloaded."""
        return bool(self._offloaded)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy each distinct storage to the target and empty it. Storages that are empty already are skipped."""
        started, self.bytes = time.perf_counter(), 0
        for storage in (tensor.untyped_storage() for tensor in distinct_storages(tensors)):
            if not storage.nbytes():
                continue
            source = bytes_of(storage)
            saved = torch.empty_like(source, device=self.target, pin_memory=self.pin)
            saved.copy_(source, non_blocking=self.pin)
            self._offloaded.append((storage, saved))
            self.bytes += storage.nbytes()
        _synchronize(self._offloaded)
        for storage, _ in self._offloaded:
            storage.resize_(0)
        self.seconds = time.perf_counter() - started

    def reload(self, device: torch.device | str | int | None = None) -> None:
        """Restore size and bytes of every emptied storage. `device`: if given, it must be the device of the storages.

        Raises ValueError for another device.
        """
        started, self.bytes = time.perf_counter(), 0
        for storage, saved in self._offloaded:
            if device is not None and _device(device) != storage.device:
                raise ValueError(
                    f"reload must go back to {storage.device}, got {device}; storages cannot change their device"
                )
            storage.resize_(saved.numel())
            bytes_of(storage).copy_(saved, non_blocking=self.pin)
            self.bytes += saved.numel()
        _synchronize(self._offloaded)
        self._offloaded.clear()
        self.seconds = time.perf_counter() - started


def distinct_storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return one tensor per storage, detached, so that views and tied tensors count once."""
    by_storage: dict[int, Tensor] = {}
    for tensor in tensors:
        by_storage.setdefault(tensor.untyped_storage()._cdata, tensor.detach())
    return list(by_storage.values())


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a view of a storage as uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _device(device: torch.device | str | int) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def empty_device_cache(device: torch.device) -> None:
    """Release the cached memory of torch's allocator on `device`, so that other processes on the device can use it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _synchronize(offloaded: list[tuple[torch.UntypedStorage, Tensor]]) -> None:
    # Each device is named, because the current device of the calling thread may be another one.
    for device in {storage.device for storage, _ in offloaded}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
