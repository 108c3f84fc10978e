"""The name by which a worker process can import a class, also for a class of the script that runs."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from rl_core.api.errors import ConfigError


def import_path(cls: type[Any]) -> str:
    """Return `module:Class` for a class. A class of the script that runs is found in the module of the script's name.

    Raises ConfigError for a class inside a function, and for one in `__main__` that no other process can import: one of a notebook, of
    standard input, or of a file that is not found under its name on `sys.path`.
    """
    if "<locals>" in cls.__qualname__:
        raise _refused(cls, "it is defined in a function; move it to the top of a module")
    module = cls.__module__ if cls.__module__ != "__main__" else _module_of_script(cls)
    return f"{module}:{cls.__qualname__}"


def _module_of_script(cls: type[Any]) -> str:
    main = sys.modules["__main__"]
    if getattr(main, cls.__qualname__.partition(".")[0], None) is None:
        raise _refused(cls, "the script does not define it; move it to a module")
    if main.__spec__ is not None:  # The script was started as `python -m package.module`.
        return main.__spec__.name
    file = getattr(main, "__file__", None)
    if file is None:
        raise _refused(cls, "it has no file; write it into a module, for example own.py, and import it from there")
    name = Path(file).stem
    module_spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if module_spec is None or module_spec.origin is None or not Path(module_spec.origin).samefile(file):
        problem = (
            f"`import {name}` finds {module_spec.origin}"
            if module_spec is not None
            else f"`import {name}` finds nothing"
        )
        raise _refused(
            cls,
            f"{problem}; give {file} a name that is no other module's, run it from its own folder, or move the class",
        )
    return name


def _refused(cls: type[Any], reason: str) -> ConfigError:
    return ConfigError(f"a worker class must be importable by name, got {cls.__module__}.{cls.__qualname__}: {reason}")
