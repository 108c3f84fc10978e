"""Checks of the program and the worker classes of a job, for `rljob validate`.

The checks import user code, so each of them runs in a child process: `python -m rl_core.runner.program_check program|worker MODULE:CLASS`.
If it finds a problem, it writes the problem as the last line of its standard error. As many run at once as the machine has processors: most
of their time is the import of torch.
"""

import inspect
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec
from rl_core.api.user_code import check_in_child, import_reference, report_checked
from rl_core.runner.programs import PROGRAMS, load_program
from rl_core.workers.group import check_class


def check_program(spec: RLJobSpec, *, search_path: str) -> Iterator[str]:
    """Check the program of the user and each worker class in `spec.groups`, and yield each problem that is found.

    A problem has the form `path: rule, got value; way out`. `search_path` is the folder of the job file, which holds the code of the user.
    """
    references = [(f"groups.{group.name}.worker", "worker", group.worker) for group in spec.groups]
    if spec.program is not None and spec.program not in PROGRAMS:
        references.insert(0, ("program", "program", spec.program))

    def check(reference: tuple[str, str, str]) -> str:
        _, kind, name = reference
        return check_in_child(__name__, kind, name, name=name, search_path=search_path)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (field, kind, _), problem in zip(references, pool.map(check, references), strict=True):
            if problem:
                yield f"spec.{field}: {problem.removeprefix(f'{kind}: ')}"


def check_worker(name: str) -> None:
    """Raise ConfigError or ValueError unless `name` is a worker class that can be constructed with its `config`."""
    worker = import_reference(name, field="worker")
    if not isinstance(worker, type):
        raise ConfigError(
            f"worker: must be a class, got {name!r}, which is {worker!r}; name a subclass of rl_core.workers.worker.Worker"
        )
    check_class(worker)
    try:
        inspect.signature(worker).bind({})
    except TypeError as error:
        raise ConfigError(
            f"worker: must be constructed with config alone, got {name!r}: {error}; give other arguments a default"
        ) from error


if __name__ == "__main__":
    try:
        {"program": load_program, "worker": check_worker}[sys.argv[1]](sys.argv[2])
    except (ConfigError, ValueError) as problem:
        sys.exit(" ".join(str(problem).split()))
    report_checked()
