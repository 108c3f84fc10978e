"""The messages with which the runner constructs workers and calls their methods.

runner -> worker   construct(WorkerSpec)      execute(*args, **kwargs) of the target method -> MethodResult      retire()

Arguments and values are the user's own: plain values, arrays, tensors, records, and parts of the job as `PackedSpec`.
"""

from collections.abc import Mapping
from typing import Any

from rl_core.messages.registry import record


@record
class WorkerSpec:
    """The class and the arguments of the worker object that a process is to construct."""

    path: str
    """`module:Class`."""
    args: list[Any]
    """Positional arguments of its constructor."""
    kwargs: dict[str, Any]
    """Named arguments of its constructor."""
    max_concurrency: int | None = None
    """Most methods that run at a time, sync and async each; None = one sync method, 64 async ones."""


@record
class MethodResult:
    """The return value of a method and its duration."""

    value: Any
    durations: Mapping[str, float]
    """Seconds by timer tag, the method's own under its name."""


@record
class PackedSpec:
    """A part of the job schema as an argument."""

    schema: str
    """`module:Class` inside rl_core.api."""
    json: str
    """Its fields by alias."""
