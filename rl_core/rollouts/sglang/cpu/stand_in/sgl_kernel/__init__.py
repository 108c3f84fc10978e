"""Stand-in for the package `sgl_kernel` on machines without an accelerator: its names exist, each fails when it is called."""

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0+cpu"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"the CPU stand-in of sgl_kernel has no {name}")

    def operation(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"the CPU stand-in of sgl_kernel has no code, and {name} was called; use a GPU")

    operation.__name__ = name
    return operation
