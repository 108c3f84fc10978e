"""Entry point of a pod: `python -m rl_core.launch.pod [PLANFILE [CONTAINER]]` runs a Supervisor on a PodPlan.

A local run gives a file; in a container the plan is in the environment variable RLJOB_POD_PLAN. Imports little: a supervisor starts
in a fraction of a second and stays small.
"""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.api.errors import ConfigError
from rl_core.observability import events
from rl_core.observability.logging import configure_logging

if TYPE_CHECKING:
    from rl_core.plan.parts import PodPlan

logger = logging.getLogger(__name__)

PLAN_VARIABLE = "RLJOB_POD_PLAN"
USAGE = "usage: python -m rl_core.launch.pod [PLANFILE [CONTAINER]]\n"
CONFIG_ERROR = 2
INTERRUPTED = 3


def main(arguments: list[str]) -> int:
    """Run the pod; return its exit code."""
    # The kernel hides SIGTERM from process 1 until it has a handler: a pod deleted while it starts would stay for its whole grace.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))
    configure_logging(role="supervisor")
    events.descriptor()  # before anything is started that could inherit the variable
    if len(arguments) > 2:
        sys.stderr.write(USAGE)
        return CONFIG_ERROR
    from rl_core.workers.supervisor import Supervisor

    try:
        plan = _read_file(arguments[0]) if arguments else _read_environment()
        supervisor = Supervisor(plan, container=arguments[1] if len(arguments) == 2 else None)
    except ConfigError as error:
        logger.error("%s", error)
        _tell_kubelet(str(error))
        return CONFIG_ERROR
    return supervisor.run()


def _read_file(name: str) -> "PodPlan":
    try:
        text = Path(name).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name} must be a pod plan that can be read, got: {error}; name the launcher's file"
        ) from error
    return _parse(text, name)


def _read_environment() -> "PodPlan":
    """Return the plan of this container; it leaves the environment, which children inherit, and its output folder is made."""
    text = os.environ.pop(PLAN_VARIABLE, None)
    if text is None:
        raise ConfigError(
            f"environment variable {PLAN_VARIABLE} must hold the pod plan when no file is named, got nothing; "
            "start pods through the operator, local runs through `rljob run`"
        )
    plan = _parse(text, f"environment variable {PLAN_VARIABLE}")
    _make_output_folder()
    return plan


def _parse(text: str, origin: str) -> "PodPlan":
    from rl_core.plan.parts import PodPlan

    try:
        plan = PodPlan.from_json(text)
        _check(plan)
        return plan
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{origin} must be a pod plan as rl_core.plan.launch writes it, got {type(error).__name__}: {error}; "
            "use an image and an operator of the same release"
        ) from error


def _check(plan: "PodPlan") -> None:
    """Raise TypeError or ValueError for what would only fail once processes are started."""
    for process in (process for container in plan.containers for process in container.processes):
        arguments = (process.name, *process.command, *process.env, *process.env.values(), *process.visible_devices)
        if not process.command or not all(isinstance(argument, str) for argument in arguments):
            raise TypeError(f"process {process.name} must have a command and an environment of texts")
        int(process.env.get("RLJOB_HEALTH_PORT", "0"))


def _make_output_folder() -> None:
    folder = os.environ.get("RLJOB_OUTPUT")
    if not folder:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the output folder {folder} must be on a volume that the pod may write, got: {error}; "
            "mount a volume of the actor at checkpoint.path, without readOnly"
        ) from error


def _tell_kubelet(reason: str) -> None:
    from rl_core.workers import termination

    path = Path(os.environ.get("RLJOB_TERMINATION_LOG", termination.DEFAULT_PATH))
    termination.write(path, reason=reason, code=CONFIG_ERROR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
