"""Turns `spec.env` of a job into the record from which a child process builds the environment."""

from rl_core.api.base import Spec
from rl_core.api.env import EnvSpec
from rl_core.envs.base import parse_config
from rl_core.messages.envs import EnvSettings


class LimitsSpec(Spec):
    """`env.options.limits`, for every type of environment."""

    memory_bytes: int | None = None
    """Address space of one process; beyond it user code gets MemoryError. null = what it writes to may take three quarters of the memory."""
    cpu_seconds: int | None = None
    """CPU time of one step; beyond it the process is killed. null = only the deadline on the clock."""
    barrier: bool = True
    """Keep user code from the job's keys and from its other processes' memory, where the kernel allows it: no capabilities, no rights over
    files of other users, a /dev/shm of its own. false for code that needs one of these."""


def env_source(
    spec: EnvSpec, *, seed: int = 0, extensions: list[str] | None = None, search_path: list[str] | None = None
) -> EnvSettings:
    """Return the record from which child processes build the environment of `spec.env`. Raises ConfigError for bad `limits`."""
    options = dict(spec.options)
    limits = parse_config(LimitsSpec, options.pop("limits", None), where="env.options.limits")
    label = f"environment {spec.type}"
    if spec.reward is not None:
        options["reward"], label = spec.reward, f"reward {spec.reward}"
    if spec.agent is not None:
        options["agent"], label = spec.agent, f"agent {spec.agent}"
    if spec.command is not None:
        options["command"], label = spec.command, f"agent {' '.join(spec.command)}"
    if spec.factory is not None:
        options["factory"], label = spec.factory, f"environment {spec.factory}"
    return EnvSettings(
        type=spec.type,
        label=label,
        options=options,
        memory_bytes=limits.memory_bytes,
        cpu_seconds=limits.cpu_seconds,
        seed=seed,
        extensions=list(extensions or ()),
        barrier=limits.barrier,
        search_path=[str(folder) for folder in search_path or ()],
    )
