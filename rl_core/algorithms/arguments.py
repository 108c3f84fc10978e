"""Argument checks shared by the public functions: one wording, the argument's name first."""

import torch
from torch import Tensor


def require_float32(**tensors: Tensor | None) -> None:
    """Raise TypeError naming the first given tensor that is not float32."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {tensor.dtype}; convert it with .float()")


def require_bool(**tensors: Tensor | None) -> None:
    """Raise TypeError naming the first given tensor that is not bool."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != torch.bool:
            raise TypeError(f"{name} must be bool, got {tensor.dtype}; convert it with .bool()")


def require_int64(**tensors: Tensor | None) -> None:
    """Raise TypeError naming the first given tensor that is not int64."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != torch.int64:
            raise TypeError(f"{name} must be int64, got {tensor.dtype}; convert it with .long()")


def require_same_shape(**tensors: Tensor | None) -> None:
    """Raise ValueError naming two given tensors whose shapes differ."""
    shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors.items() if tensor is not None]
    first_name, first_shape = shapes[0]
    for name, other_shape in shapes[1:]:
        if other_shape != first_shape:
            raise ValueError(f"{first_name} and {name} must have equal shapes, got {first_shape} and {other_shape}")


def require_token_mask(mask: Tensor) -> None:
    """Raise TypeError unless `mask` is bool, ValueError unless it is [B, T]."""
    require_bool(mask=mask)
    if mask.dim() != 2:
        raise ValueError(f"mask must have shape [B, T], got {tuple(mask.shape)}")


def require_rows(name: str, tensor: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError unless `tensor` is [B] and every given other tensor has B rows."""
    if tensor.dim() != 1:
        raise ValueError(f"{name} must have shape [B], got {tuple(tensor.shape)}")
    for other_name, other in others.items():
        if other is not None and (other.dim() == 0 or other.shape[0] != tensor.shape[0]):
            raise ValueError(
                f"{name} and {other_name} must have equally many rows, "
                f"got shapes {tuple(tensor.shape)} and {tuple(other.shape)}"
            )


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
