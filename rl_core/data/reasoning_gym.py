"""Problems and scores of the reasoning-gym package, any of its procedural tasks by name. Imports no torch.

The runner generates the problems (`reasoning-gym://task?size=N&seed=S`), an env process scores the answers. What scoring
needs travels in the row's metadata: task, configuration and the whole entry, as plain values with tuples kept (some tasks
compare tuples, and a list in their place would score a right answer as wrong).
"""

import io
import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import lru_cache
from typing import Any

from rl_core.api.errors import ConfigError

Entry = dict[str, Any]
Scorer = Callable[[str | None, Entry], float]


def generate_entries(task: str, size: int, seed: int, config: Mapping[str, Any] | None = None) -> list[Entry]:
    """Return `size` problems as {question, answer, metadata}; equal arguments give equal problems.

    `config` holds fields of the task's configuration. `metadata` is {task, config, entry}. Raises ConfigError for an
    unknown task or a field or value the task refuses.
    """
    config = dict(config or {})
    with redirect_stdout(io.StringIO()):  # some tasks print while they generate
        dataset = _dataset(task, json.dumps({**config, "size": size, "seed": seed}))
        entries = [plain(dataset[index]) for index in range(size)]
    return [
        {
            "question": entry["question"],
            "answer": entry["answer"],
            "metadata": {"task": task, "config": config, "entry": entry},
        }
        for entry in entries
    ]


def scorer(task: str, config: Mapping[str, Any] | None = None) -> Scorer:
    """Return f(answer or None, entry) -> score in [0, 1] of `task`. Raises ConfigError as `generate_entries`."""
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
            warnings.simplefilter("ignore", SyntaxWarning)  # of a library it uses, each time nothing compiled is cached
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
