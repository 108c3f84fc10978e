"""Converts arrays and tensors to raw bytes and back, with the dtype codes 0-14 of the wire format, mostly without a copy.

Used by `codec` and by code that needs the dtype codes. NumPy and torch are imported only for an array and a tensor, because scripts and
channel servers may need neither. Functions do not copy unless they say so.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

NAMES = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
    "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64", "bool",
)  # fmt: skip
CODES = {name: code for code, name in enumerate(NAMES)}
ITEMSIZES = (1, 1, 2, 4, 8, 2, 2, 4, 8, 1, 1, 2, 4, 8, 1)
_TYPESTRS = ("|u1", "|i1", "<i2", "<i4", "<i8", "<f2", None, "<f4", "<f8", None, None, "<u2", "<u4", "<u8", "|b1")
"""How NumPy writes each dtype; None for those that only torch has."""


class _Memory:
    """A read-only buffer shown to numpy as writable: torch warns about read-only memory, and views are read-only by contract."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, owner: "np.ndarray", address: int, shape: tuple[int, ...], typestr: str) -> None:
        self._owner = owner
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": typestr, "version": 3}


def is_tensor(value: object) -> bool:
    """Return whether `value` is a torch tensor, without importing torch."""
    # While another thread imports torch, the module is there without its classes: nothing can be a tensor yet.
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def is_array(value: object) -> bool:
    """Return whether `value` is a NumPy array or memory map, and of no other subclass, without importing NumPy."""
    # While another thread imports NumPy, the module is there without its classes: nothing can be an array yet.
    numpy = sys.modules.get("numpy")
    return type(value) in (getattr(numpy, "ndarray", None), getattr(numpy, "memmap", None))


def is_scalar(value: object) -> bool:
    """Return whether `value` is a NumPy scalar, without importing NumPy."""
    generic = getattr(sys.modules.get("numpy"), "generic", None)
    return generic is not None and isinstance(value, generic)


def array_bytes(array: "np.ndarray") -> tuple[int, tuple[int, ...], memoryview]:
    """Return (dtype code, shape, bytes) of a numpy array without copying.

    Raises ValueError when the array is not contiguous, not little-endian, or of a dtype without a code. The message does not name the
    array.
    """
    if not array.flags.c_contiguous:
        raise ValueError("is not contiguous; call numpy.ascontiguousarray()")
    code = CODES.get(array.dtype.name)
    if code is None or array.dtype.hasobject:
        raise ValueError(f"has dtype {array.dtype}, which cannot travel; convert it to one of {', '.join(NAMES)}")
    if not array.dtype.isnative:
        raise ValueError(f"has byte order {array.dtype.byteorder!r}; convert it to little-endian")
    return code, array.shape, array.reshape(-1).view("uint8").data


def tensor_bytes(tensor: "torch.Tensor") -> tuple[int, tuple[int, ...], memoryview]:
    """Return (dtype code, shape, bytes) of a torch tensor. Host memory is not copied; device memory is copied to the host.

    Raises ValueError for a tensor that is a subclass, sparse, not contiguous, or of a dtype without a code. The message does not name the
    tensor.
    """
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise ValueError(
            f"is a {type(tensor).__name__}; send a plain tensor (for a DTensor: full_tensor() or to_local())"
        )
    if tensor.is_nested:
        raise ValueError("is nested; send the list of its tensors (unbind())")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise ValueError(f"has layout {tensor.layout} on {tensor.device}; only dense tensors with data travel")
    code = CODES.get(str(tensor.dtype).removeprefix("torch."))
    if code is None:
        raise ValueError(f"has dtype {tensor.dtype}, which cannot travel; convert it to one of {', '.join(NAMES)}")
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise ValueError("has no memory: it was freed, as FSDP does between uses; gather it first")
    if not tensor.is_contiguous() or tensor.is_neg():
        raise ValueError("is not contiguous; call .contiguous()")
    shape = tuple(tensor.shape)
    if tensor.numel() == 0:
        return code, shape, memoryview(b"")
    plain = tensor if tensor.is_cpu and not tensor.requires_grad else tensor.detach().cpu()
    if _TYPESTRS[code] is None:
        plain = plain.reshape(-1).view(torch.uint8)
    return code, shape, memoryview(plain.numpy()).cast("B")


def array_view(buffer: memoryview, code: int, shape: tuple[int, ...], *, copy: bool) -> "np.ndarray":
    """Return the numpy array of `shape` over `buffer`; with `copy`, over memory of its own.

    Raises ValueError for a dtype that numpy does not have, such as bfloat16.
    """
    import numpy as np

    dtype = _TYPESTRS[code]
    if dtype is None:
        raise ValueError(f"dtype {NAMES[code]} does not exist in numpy")
    array = np.frombuffer(buffer, dtype).reshape(shape)
    return array.copy() if copy else array


def tensor_view(buffer: memoryview, code: int, shape: tuple[int, ...], *, copy: bool) -> "torch.Tensor":
    """Return the torch tensor of `shape` over `buffer`.

    It has memory of its own with `copy`, or where `buffer` is not aligned for its dtype.
    """
    import numpy as np
    import torch

    if len(buffer) == 0:
        return torch.empty(shape, dtype=getattr(torch, NAMES[code]))
    owner = np.frombuffer(buffer, np.uint8)
    address: int = owner.__array_interface__["data"][0]
    typestr = _TYPESTRS[code]
    array = np.asarray(_Memory(owner, address, *((owner.shape, "|u1") if typestr is None else (shape, typestr))))
    if copy or address % ITEMSIZES[code]:
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor if typestr is not None else tensor.view(getattr(torch, NAMES[code])).reshape(shape)


def scalar_bytes(scalar: "np.generic") -> bytes:
    """Return a numpy scalar as one dtype code byte and its little-endian bytes. Raises ValueError for other dtypes."""
    code = CODES.get(scalar.dtype.name)
    if code is None:
        raise ValueError(f"has dtype {scalar.dtype}, which cannot travel")
    return bytes((code,)) + scalar.tobytes()


def scalar_from_bytes(data: bytes) -> "np.generic":
    """Return the numpy scalar of `scalar_bytes`. Raises ValueError when code and length do not fit."""
    import numpy as np

    dtype = _TYPESTRS[data[0]] if data and data[0] < len(NAMES) else None
    if dtype is None or len(data) != 1 + ITEMSIZES[data[0]]:
        raise ValueError(f"{len(data)} bytes are not a numpy scalar")
    scalar: np.generic = np.frombuffer(data, dtype, offset=1)[0]
    return scalar
