"""What `rljob validate` asks about estimators and losses of the user: can they be imported? Tried in a child process."""

import os
import subprocess
import sys
from collections.abc import Iterator

from rl_core.algorithms.registry import resolve
from rl_core.api.algorithm import AlgorithmSpec

SECONDS = 120.0
"""An import may load torch for the first time."""


def check_functions(algorithm: AlgorithmSpec, *, search_path: str) -> Iterator[str]:
    """Yield one problem per `module:function` that cannot be used, as `path: rule, got value; way out`.

    `search_path`: the folder with user code (the job file's).
    """
    named = {"algorithm.name": ("advantage", algorithm.name), "algorithm.loss.name": ("loss", algorithm.loss.name)}
    for field, (kind, name) in named.items():
        if ":" in name and (problem := _try(kind, name, search_path)):
            yield f"spec.{field}: {problem}"


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
        resolve(*sys.argv[1:])
    except ValueError as error:
        sys.exit(" ".join(str(error).split()))
