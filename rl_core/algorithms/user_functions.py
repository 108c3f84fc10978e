"""Checks for `rljob validate` whether a user's estimators and losses can be imported and called. Runs them in a child process."""

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator

from rl_core.algorithms.registry import option_names, resolve
from rl_core.api.algorithm import AlgorithmSpec

SECONDS = 120.0
"""An import may load torch for the first time."""
OPTIONS = {"advantage": ("reduce",), "loss": ("clip_low", "clip_high", "dual_clip")}
"""What the functions of each kind get besides their inputs, as far as they have a parameter for it."""


def check_functions(algorithm: AlgorithmSpec, *, search_path: str) -> Iterator[str]:
    """Yield one problem per `module:function` that cannot be used, as `path: rule, got value; way out`.

    `search_path`: the folder with user code (the job file's).
    """
    named = {"algorithm.name": ("advantage", algorithm.name), "algorithm.loss.name": ("loss", algorithm.loss.name)}
    for field, (kind, name) in named.items():
        if ":" in name and (problem := _try(kind, name, search_path)):
            yield f"spec.{field}: {problem}"


def require_call(kind: str, name: str) -> None:
    """Raise ValueError unless the function `name` can be called with inputs and those of the options that it has parameters for."""
    function = resolve(kind, name)
    accepted, _ = option_names(function)
    try:
        inspect.signature(function).bind(None, **{option: None for option in OPTIONS[kind] if option in accepted})
    except TypeError as error:
        wanted = f"inputs and, where it has a parameter for them, {', '.join(OPTIONS[kind])}"
        raise ValueError(
            f"must be a function of {wanted}, got {name!r}: {error}; give its other parameters a default"
        ) from error


def _try(kind: str, name: str, search_path: str) -> str:
    """Return why the function cannot be used; empty when it can."""
    path = os.pathsep.join(filter(None, [search_path, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", __name__, kind, name]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"must be imported within {SECONDS:g} s, got {name}; do less when it is imported"
    return "" if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2] or f"{name} ended its process"


if __name__ == "__main__":
    try:
        require_call(*sys.argv[1:])
    except ValueError as error:
        sys.exit(" ".join(str(error).split()))
