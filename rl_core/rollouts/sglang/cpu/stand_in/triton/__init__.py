"""Stand-in for the package `triton` on machines without an accelerator: what defines kernels can be imported, each fails when it is started.

SGLang's modules name triton when they are imported. The package itself is 0.9 GB of compiler, which without an accelerator compiles nothing.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.0.0+cpu"


class Name:
    """Whatever a module asks for while it is imported: a type in an annotation, a constant, a setting, a base class."""

    def __getattr__(self, name: str) -> "Name":
        if name.startswith("__"):
            raise AttributeError(name)
        return Name()

    def __call__(self, *args: Any, **kwargs: Any) -> "Name":
        """Return a name: a call at import makes a type, a constant or a setting."""
        return Name()

    def __or__(self, other: Any) -> "Name":
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[()]:
        return ()

    def __instancecheck__(self, instance: Any) -> bool:
        return False


class Kernel:
    """A function that triton would compile."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn, self.__name__, self.__module__ = function, function.__name__, function.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to start."""
        raise NotImplementedError(
            f"the CPU stand-in of triton compiles nothing, and {self.__name__} was started; use a GPU"
        )

    __getitem__ = __call__


def jit(function: Callable[..., Any] | None = None, **settings: Any) -> Any:
    """Return the kernel, or what decorates it."""
    return Kernel if function is None else Kernel(function)


def _unchanged(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda kernel: kernel


autotune = heuristics = _unchanged


def cdiv(number: int, by: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def __getattr__(name: str) -> Name:
    return getattr(Name(), name)  # type: ignore[no-any-return]


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Name:
        return getattr(Name(), name)  # type: ignore[no-any-return]


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of `triton`."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("triton.") else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are created when they are looked up."""


sys.meta_path.append(_Modules())
importlib.import_module("triton.runtime")  # SGLang looks it up by its name.
