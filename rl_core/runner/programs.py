"""The programs by name, and the rule that chooses one for a job."""

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec
from rl_core.api.user_code import import_reference
from rl_core.runner.program import Program

PROGRAMS = {
    "reasoning": "rl_core.runner.reasoning:ReasoningRunner",
    "asynchronous": "rl_core.runner.asynchronous:AsyncReasoningRunner",
    "embodied": "rl_core.runner.embodied:EmbodiedRunner",
    "embodied_async": "rl_core.runner.embodied:AsyncEmbodiedRunner",
}
"""Name -> "module:Class". To add a program, add its line."""


def program_name(spec: RLJobSpec) -> str:
    """Return the name of the program of a job: `spec.program` if it is set, else asynchronous or reasoning by `algorithm.maxStaleness`."""
    if spec.program is not None:
        return spec.program
    return "asynchronous" if spec.algorithm.max_staleness else "reasoning"


def load_program(name: str) -> type[Program]:
    """Return the program `name`, one of PROGRAMS or the user's "module:Class".

    Raises ConfigError for a name that is neither, a module that cannot be imported, and a class that is no Program or lacks a method.
    """
    path = PROGRAMS.get(name, name)
    if ":" not in path:
        raise ConfigError(f"program: must be one of {', '.join(PROGRAMS)} or module:Class, got {name!r}; correct it")
    program = import_reference(path, field="program")
    if not (isinstance(program, type) and issubclass(program, Program)):
        raise ConfigError(
            f"program: must be a subclass of rl_core.runner.program.Program, got {name!r}, which is {program!r}; derive it from GroupProgram"
        )
    if missing := sorted(program.__abstractmethods__):
        raise ConfigError(f"program: must define {', '.join(missing)}, got {name!r} without; write them")
    return program
