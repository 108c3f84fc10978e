"""Loads code of the user by name (modules, `module:object`) and describes its errors. Loading runs that code; torch is not imported."""

import importlib
import os
import subprocess
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl_core.api.errors import ConfigError, text_of

RL_CORE = str(Path(__file__).parents[1])
LIBRARIES = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), RL_CORE, "<")
"""Beginnings of the file names of code that is not the user's: Python, installed packages, rl_core."""
MAX_CAUSE = 2048
"""Largest number of characters of an error in user code that another error quotes."""


MAX_FRAMES = 50
"""Innermost frames of a traceback that are shown."""
IMPORT_SECONDS = 120.0
"""Seconds of an import in `check_in_child`. It may load torch for the first time."""
CHECKED = "rljob: the check has ended"
"""Line that the child process of `check_in_child` writes to standard output if it found no problem."""


def check_in_child(
    module: str, *arguments: str, name: str, search_path: str, given: str = "", seconds: float = IMPORT_SECONDS
) -> str:
    """Check user code with `python -m module` and `arguments`. Return "" if that process called `report_checked`, otherwise the problem.

    It is a problem if the process takes longer than `seconds`. `name` is what the problem calls the user code, `given` is the standard input,
    and `search_path` is the folder of the job file, which holds the user code.
    """
    path = os.pathsep.join(filter(None, [search_path, os.environ.get("PYTHONPATH")]))
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", module, *arguments],
            input=given,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"must be imported and called within {seconds:g} s, got {name}; do less in it"
    if CHECKED in process.stdout.splitlines():
        return ""
    exit_text = f"must not end its process, got {name}, which ended it with code {process.returncode}; correct it"
    return process.stderr.strip().rpartition("\n")[2] or exit_text if process.returncode > 0 else exit_text


def report_checked() -> None:
    """Tell `check_in_child` in the parent process that no problem was found. This is not called if user code ends the process early."""
    sys.stdout.write(f"\n{CHECKED}\n")
    sys.stdout.flush()


def load_extensions(modules: Sequence[str]) -> None:
    """Import `spec.extensions` and call their `register()` where they have one. Raises ConfigError."""
    for name in modules:
        register = getattr(_import(name, field="extensions"), "register", None)
        if callable(register):
            try:
                register()
            except (Exception, SystemExit) as error:  # the user's code may raise anything
                raise ConfigError(
                    f"extensions: register() of {name!r} must not fail, got {describe(error)}; correct the module"
                ) from error


def import_reference(reference: str, *, field: str) -> Any:
    """Return the object `module:name` (dots in `name` step into it).

    Raises ConfigError naming `field`, the cause with the line of user code it came from, and what the module defines.
    """
    module_name, _, path = reference.partition(":")
    if not module_name or not path:
        raise ConfigError(f"{field}: must have the form module:name, got {reference!r}; correct it")
    if "/" in module_name or module_name.endswith(".py"):
        module = module_name.rpartition("/")[2].removesuffix(".py")
        raise ConfigError(
            f"{field}: must name a module and not a file, got {reference!r}; write {module}:{path}, with {module}.py beside the job file"
        )
    target: Any = _import(module_name, field=field)
    for part in path.split("."):
        if not hasattr(target, part):
            callables = sorted(
                name for name, value in vars(target).items() if callable(value) and not name.startswith("_")
            )
            names = ", ".join(callables) or "nothing that can be called"
            raise ConfigError(
                f"{field}: must exist, got {reference!r}: {module_name} has no {part!r}; it defines {names}"
            )
        target = getattr(target, part)
    return target


def import_function(reference: str, *, field: str) -> Callable[..., Any]:
    """Return the function `module:name`. Raises ConfigError as `import_reference`, and for an object that cannot be called."""
    function = import_reference(reference, field=field)
    if not callable(function):
        raise ConfigError(f"{field}: must name a function, got {reference!r}, which is a {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def _import(name: str, *, field: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{field}: must be importable, got {name!r}, which was not found; put {name.partition('.')[0]}.py beside "
                "the job file or install its package"
            ) from error
        raise ConfigError(
            f"{field}: must be importable, got {name!r}: {describe(error)}; install what it needs"
        ) from error
    except BaseException as error:  # the import runs user code, which may even exit
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(
            f"{field}: must be importable, got {name!r}: {describe(error)}; correct the module"
        ) from error


def own_frames(error: BaseException) -> str:
    """Return the traceback of `error` from the first line outside of Python, installed packages and rl_core; "" if it has none."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(LIBRARIES):
        trace = trace.tb_next
    return "" if trace is None else "".join(traceback.format_exception(type(error), error, trace, limit=-MAX_FRAMES))


def place_of_main_thread() -> str:
    """Return the line of the user's code that the main thread runs, as `own.py:28 in fault`; "" if it runs other code only."""
    frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
    frames_outside = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    return _place(frames_outside[-1]) if frames_outside else ""


def describe(error: BaseException) -> str:
    """Return type, text and place of `error`, as `ValueError: no digits (score.py:7 in score)`.

    The place is the last line outside of installed packages: where a library raised, the line that called it. An error of rl_core's call
    itself, such as a wrong number of arguments, has no place.
    """
    message = " ".join(text_of(error, limit=MAX_CAUSE).split())
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if isinstance(error, SyntaxError):
        return text
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    frames_outside = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    frames_of_user = [frame for frame in frames if not frame.filename.startswith(RL_CORE)]
    if not frames_of_user:
        return text
    last_frame = (frames_outside or frames_of_user)[-1]
    return f"{text} ({_place(last_frame)})"


def _place(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno} in {frame.name}"
