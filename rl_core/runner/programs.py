"""The programs by name, and the rule that chooses one for a job."""

import importlib

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec
from rl_core.runner.program import Program

PROGRAMS = {
    "reasoning": "rl_core.runner.reasoning:ReasoningRunner",
    "asynchronous": "rl_core.runner.asynchronous:AsyncReasoningRunner",
}
"""Name -> "module:Class". To add a program, add its line."""


def program_name(spec: RLJobSpec) -> str:
    """Return the name of the program that runs a job: asynchronous where `algorithm.maxStaleness` lets generation run ahead."""
    return "asynchronous" if spec.algorithm.max_staleness else "reasoning"


def load_program(name: str) -> type[Program]:
    """Return the program `name`, one of PROGRAMS or the user's "module:Class".

    Raises ConfigError for a name that is neither, a module that cannot be imported, or a class that is no Program.
    """
    path = PROGRAMS.get(name, name)
    module, separator, attribute = path.partition(":")
    if not separator:
        raise ConfigError(f"program must be one of {', '.join(PROGRAMS)} or module:Class, got {name!r}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"program {name!r} must be importable, got: {error}; check the module path") from error
    if not (isinstance(found, type) and issubclass(found, Program)):
        raise ConfigError(f"program {name!r} must be a subclass of rl_core.runner.program.Program, got {found!r}")
    return found
