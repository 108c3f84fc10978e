"""The messages of an environment's step, between rollout, env worker and the child processes of the env worker.

rollout -> env worker   step_rows([EnvRow]) -> [EnvAnswer | EnvFailure], one per row, in order
env worker -> child     EnvSettings, answered by EnvReady or EnvFailure; then [EnvRow], answered by [EnvAnswer] or one EnvFailure
child -> env worker     while it steps: MemberCall, answered by MemberAnswer or EnvFailure

The chat messages, metadata, options and answers in them are values of the user.
"""

from typing import Any

from rl_core.messages.registry import record


@record
class EnvRow:
    """One sample to which the environment responds."""

    key: str
    """Sample id: rows of a key go to the process that served it before. "" = the row belongs to no sample."""
    messages: list[dict[str, str]]
    """The message log so far, {role, content} each."""
    metadata: dict[str, Any] | None
    """The environment's own state of the episode, or the sample's columns at its first step."""
    task_name: str | None
    """Rows of different tasks are never scored in one call of user code."""


@record
class EnvAnswer:
    """The response of the environment to one row."""

    observation: dict[str, str]
    """The message that is appended to the log: {role, content}."""
    metadata: dict[str, Any] | None
    stop_strings: list[str] | None
    """Stops of the next turn; None = the task's."""
    reward: float | dict[str, float | None] | None
    """A number, or numbers by name; None = not applicable, which masks the sample."""
    terminated: bool
    """Whether the episode is over."""
    answer: Any
    """What the environment read out of the completion, for logs."""
    reward_weights: dict[str, float] | None = None
    """Weights to sum rewards by name with, where the environment has them."""


@record
class EnvFailure:
    """The error of a row, of a call, or of building an environment."""

    type: str
    """Name of a class of `rl_core.api.errors`."""
    message: str


@record
class EnvSettings:
    """The settings with which a child process builds the environment."""

    type: str
    """Registered name or `module:Class`."""
    label: str
    """How errors call it: `reward score:fn`, `environment math`."""
    options: dict[str, Any]
    """`env.options` without `limits`, checked by the environment's own model."""
    memory_bytes: int | None
    """Address space of the process; None = unlimited."""
    cpu_seconds: int | None
    """CPU time of one step; None = unlimited."""
    seed: int
    """Given to the environment's `seed` after it is built."""
    extensions: list[str]
    """`spec.extensions`."""
    search_path: list[str]
    """Folders put in front of `sys.path`: where user code lies."""
    barrier: bool = True
    """Whether user code is kept from keys and other processes' memory, where the kernel allows."""


@record
class EnvReady:
    """The child has built its environment."""

    pid: int
    max_turns: int | None = None
    """Turns of an episode that the environment's class declares; None = it declares none."""


@record
class MemberCall:
    """The code of an environment calls a method of a group of the job."""

    group: str
    method: str
    arguments: list[Any]


@record
class MemberAnswer:
    """What the called method returned."""

    value: Any
