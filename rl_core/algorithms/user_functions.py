"""Calls of a user's estimators and losses: once on example rows for `rljob validate`, in a child process, and in training.

An exception in them is an error of the job: no restart can repair it, so it is a ConfigError with the file and line.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.errors import ConfigError, RLJobError
from rl_core.api.user_code import IMPORT_SECONDS, check_in_child, describe

TRIAL = "rl_core.algorithms.function_trial"
Result = TypeVar("Result")


def call(kind: str, name: str, function: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """Return `function(*args, **options)`. For a `module:function` of the user any exception becomes a ConfigError.

    Running out of memory is passed on unchanged, because it depends on the device and not only on the code.
    """
    if ":" not in name:
        return function(*args, **options)
    try:
        return function(*args, **options)
    except (RLJobError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        raise ConfigError(f"{kind} {name!r} must not fail, it raised {describe(error)}; correct it") from error


def check_functions(algorithm: AlgorithmSpec, *, search_path: str, seconds: float = IMPORT_SECONDS) -> Iterator[str]:
    """Yield one problem per `module:function` that cannot be used, as `path: rule, got value; way out`.

    Each is imported and called on example rows in a child process. `search_path`: the folder with user code (the job file's).
    """
    named = {"algorithm.name": ("advantage", algorithm.name), "algorithm.loss.name": ("loss", algorithm.loss.name)}
    for field, (kind, name) in named.items():
        if ":" not in name:
            continue
        algorithm_json = algorithm.model_dump_json(by_alias=True)
        if problem := check_in_child(
            TRIAL, kind, name=name, given=algorithm_json, search_path=search_path, seconds=seconds
        ):
            yield f"spec.{field}: {problem}"


def require_stats(kind: str, name: str, metrics: Mapping[str, Any], stat: type) -> None:
    """Raise ConfigError unless all metrics that a function returned are Stats, which add up over micro-batches and ranks."""
    wrong = next((key for key, value in metrics.items() if not isinstance(value, stat)), None)
    if wrong is not None:
        raise ConfigError(
            f"{kind} {name!r} must return Stats as metrics, got {type(metrics[wrong]).__name__} for {wrong!r}; "
            "make it with mean_stat(values, mask) or sum_stat(total) of rl_core.algorithms.stats"
        )
