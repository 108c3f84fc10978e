"""The memory of tensors that workers send to each other: its accelerator, its bytes, and the operations that are queued on it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def accelerator_of(tensor: Any) -> str:
    """Return the UUID of the accelerator of a dense torch tensor; "" for anything else."""
    if not getattr(tensor, "is_cuda", False):
        return ""
    import torch

    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return str(torch.cuda.get_device_properties(tensor.device).uuid) if is_plain else ""


def check_tensor(target: Any, found: Any, sender: str) -> None:
    """Raise ValueError unless `found` is a tensor or array, or the header of one, of the shape and dtype of `target`."""
    shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
    if shape is None or tuple(shape) != tuple(target.shape) or str(dtype) != str(target.dtype):
        got = f"{tuple(shape)} of {dtype}" if shape is not None else f"an object of type {type(found).__name__}"
        raise ValueError(
            f"the message of {sender} must be a tensor of shape {tuple(target.shape)} and type {target.dtype}, got {got}; "
            "it is lost: send it again, to a tensor of its shape and type or with send and recv"
        )


def row_major(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return `tensor` with its elements in memory in row-major order: itself if they are, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flat_bytes(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return a view, as uint8 [nbytes], of a tensor that `row_major` has returned."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def after_queued(tensor: Any) -> Callable[[], None]:
    """Return a function that waits for the operations on `tensor` that the present thread has queued so far."""
    if not getattr(tensor, "is_cuda", False):
        return lambda: None
    import torch

    wait_for_event: Callable[[], None] = torch.cuda.current_stream(tensor.device).record_event().synchronize
    return wait_for_event
