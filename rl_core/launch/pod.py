"""Entry point of a pod: `python -m rl_core.launch.pod PLANFILE [CONTAINER]` runs a Supervisor on a PodPlan file.

Imports little: a supervisor starts in a fraction of a second and stays small.
"""

import logging
import sys
from pathlib import Path

from rl_core.api.errors import ConfigError
from rl_core.observability import events
from rl_core.observability.logging import configure_logging


def main(arguments: list[str]) -> int:
    """Run the pod; return its exit code (runtime.md 3.6)."""
    configure_logging(role="supervisor")
    events.descriptor()  # before anything is started that could inherit the variable
    if len(arguments) not in (1, 2):
        sys.stderr.write("usage: python -m rl_core.launch.pod PLANFILE [CONTAINER]\n")
        return 2
    from rl_core.plan.launch import PodPlan
    from rl_core.workers.supervisor import Supervisor

    try:
        plan = PodPlan.from_json(Path(arguments[0]).read_text())
        supervisor = Supervisor(plan, container=arguments[1] if len(arguments) == 2 else None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        logging.getLogger(__name__).error("%s must be a pod plan that can be run: %s", arguments[0], error)
        return 2
    except ConfigError as error:
        logging.getLogger(__name__).error("%s", error)
        return 2
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
