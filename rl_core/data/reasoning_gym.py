"""Problems and scores of the procedural tasks of the reasoning-gym package. Imports no torch.

The runner generates the problems (`reasoning-gym://task?size=N&seed=S`), and an env process scores the answers. The row's metadata has all
that scoring needs: the task, its configuration and the entry, as plain values. Tuples stay tuples, because some tasks compare them and
would score a right answer with a list as wrong.

Problems are generated in a process with a fixed hash seed: some tasks iterate over sets or use the global random generators, and a
resumed run must get the same prompts.
"""

import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from rl_core.api.errors import ConfigError, DataError
from rl_core.transports import frames

Entry = dict[str, Any]
Scorer = Callable[[str | None, Entry], float]

GENERATION_SECONDS = 600.0
"""Deadline for generating a data set; the slowest tasks generate about 5 problems per second."""


def generate_entries(task: str, size: int, seed: int, config: Mapping[str, Any] | None = None) -> list[Entry]:
    """Return `size` problems as {question, answer, metadata}, generated in a child process; equal arguments give equal problems.

    `config` holds fields of the task's configuration. `metadata` is {task, config, entry}. Raises ConfigError for an
    unknown task or a field or value the task refuses, DataError when the task fails while it generates.
    """
    request = json.dumps({"task": task, "size": size, "seed": seed, "config": dict(config or {})})
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", "rl_core.data.reasoning_gym"],
            input=request.encode(),
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            timeout=GENERATION_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(
            f"reasoning-gym://{task} must generate {size} problems within {GENERATION_SECONDS:g} s; ask for fewer"
        ) from error
    if process.returncode != 0:
        last_line = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise DataError(
            f"reasoning-gym://{task} failed while it generated {size} problems: {last_line}; choose another task"
        )
    answer = frames.decode([process.stdout])
    if "error" in answer:
        raise ConfigError(answer["error"])
    entries: list[Entry] = answer["entries"]
    return entries


def make_entries(task: str, size: int, seed: int, config: Mapping[str, Any]) -> list[Entry]:
    """Generate the problems of `generate_entries` in this process; reseeds the global random generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    dataset = _dataset(task, json.dumps({**config, "size": size, "seed": seed}))
    entries = [plain(dataset[index]) for index in range(size)]
    metadata = {"task": task, "config": dict(config)}
    return [{"question": e["question"], "answer": e["answer"], "metadata": {**metadata, "entry": e}} for e in entries]


def scorer(task: str, config: Mapping[str, Any] | None = None) -> Scorer:
    """Return the scoring function of `task`: f(answer, entry) is a score in [0, 1]; answer None means no answer. Raises ConfigError."""
    score: Scorer = _dataset(task, json.dumps(dict(config or {}))).score_answer
    return score


def task_names() -> list[str]:
    """Return the names of all tasks. Raises ConfigError when the package is not installed."""
    _package()
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def _package() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # raised by a dependency when its bytecode is not cached
            import reasoning_gym
    except ImportError as error:
        raise ConfigError("reasoning-gym tasks need the package reasoning-gym: pip install 'rljob[env]'") from error
    return reasoning_gym


@lru_cache(maxsize=64)
def _dataset(task: str, config_json: str) -> Any:
    package, config = _package(), json.loads(config_json)
    if task not in task_names():
        raise ConfigError(
            f"reasoning-gym task must be one of its tasks, got {task!r}; known are {', '.join(task_names())}"
        )
    try:
        return package.create_dataset(task, **config)
    except (AssertionError, TypeError, ValueError) as error:
        from reasoning_gym.factory import DATASETS

        fields = ", ".join(sorted(DATASETS[task][1].__dataclass_fields__))
        raise ConfigError(f"reasoning-gym task {task} refuses {config}: {error}; its fields are {fields}") from error


def plain(value: Any) -> Any:
    """Return `value` with numpy scalars and subclasses of str, int and float as the plain types; tuples stay tuples."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value) if isinstance(value, str) else _number(value)


def _number(value: Any) -> int | float:
    return int(value) if isinstance(value, int) else float(value)


def main() -> int:
    """Answer the request of `generate_entries` on standard input; output of tasks goes to standard error."""
    answer_to, sys.stdout = sys.stdout, sys.stderr
    request = json.load(sys.stdin)
    answer: dict[str, Any]
    try:
        answer = {"entries": make_entries(request["task"], request["size"], request["seed"], request["config"])}
    except ConfigError as error:
        answer = {"error": str(error)}
    (message,) = frames.encode(answer)
    answer_to.buffer.write(message)
    answer_to.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
