"""The commands that only a cluster has; `register` adds them to the `rljob` app (entry point `rljob.commands`). Parsing only."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.", show_default=False)]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace of the job.", show_default="the context's")
]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig.", show_default="the current one")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """Where a command looks: connection.ClusterPlace."""

    namespace: str | None
    context: str | None


def register(app: typer.Typer) -> None:
    """Add the cluster's commands."""
    for command in (submit, suspend, resume, checkpoint):
        app.command()(command)


def submit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The job (YAML).", show_default=False)],
    code: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder with Python modules of the job, such as a reward function."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let the API server check the job and store nothing.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Report progress until the job has ended.")] = False,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Create a job on the cluster, with the Python modules that it needs."""

    def command() -> int:
        from rljob_operator.cli.connection import Connection
        from rljob_operator.cli.submit import submit as send

        connection = Connection.open(Here(namespace=namespace, context=context))
        return send(connection, file, code=code, dry_run=dry_run, wait=wait)

    _run(command)


def suspend(name: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Save a checkpoint of a job and delete its pods. `rljob resume` continues from the checkpoint."""
    _run(lambda: _suspend(_job_name(name, "stop it with Ctrl-C"), Here(namespace=namespace, context=context)))


def resume(name: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Continue a suspended or paused job."""
    _run(
        lambda: _resume(
            _job_name(name, "continue it with rljob run FILE --output DIR --resume auto"),
            Here(namespace=namespace, context=context),
        )
    )


def checkpoint(name: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Show the newest and the best checkpoint of a job on a cluster."""

    def command() -> int:
        from rljob_operator.cli import jobs
        from rljob_operator.cli.connection import Connection

        job_name = _job_name(name, "its checkpoints are the folders checkpoints/step-* in it")
        job = jobs.read(Connection.open(Here(namespace=namespace, context=context)), job_name)
        status = (job.get("status") or {}).get("checkpoint")
        if not status:
            sys.stdout.write(f"{name}: no checkpoint yet\n")
            return 0
        for field, value in status.items():
            sys.stdout.write(f"{field}: {value}\n")
        return 0

    _run(command)


def _job_name(name: str, instead: str) -> str:
    """Return the name of a job. Raises ConfigError for the output folder of a local run, with what to do `instead`."""
    from rl_core.api.errors import ConfigError

    if "/" in name or Path(name).is_dir():
        raise ConfigError(f"NAME must be a job of a cluster, got {name}, the folder of a local run; {instead}")
    return name


def _suspend(name: str, place: Here) -> int:
    from rljob_operator.cli import jobs
    from rljob_operator.cli.connection import Connection

    jobs.change(Connection.open(place), name, {"suspend": True}, doing=f"suspending job {name}")
    sys.stdout.write(f"{name}: suspends at its next checkpoint\n")
    return 0


def _resume(name: str, place: Here) -> int:
    from rljob_operator.cli import jobs
    from rljob_operator.cli.connection import Connection

    connection, action = Connection.open(place), f"resuming job {name}"
    # A pause by a rule ends only after the operator has seen a suspension.
    if jobs.paused(jobs.read(connection, name)):
        jobs.change(connection, name, {"suspend": True}, doing=action)
        jobs.await_unpaused(connection, name)
    jobs.change(connection, name, {"suspend": False}, doing=action)
    sys.stdout.write(f"{name}: goes on from its newest checkpoint\n")
    return 0


def _run(command: Callable[[], int]) -> None:
    """Run a command and end with its exit code; a known error is one clear line, not a traceback."""
    from rl_core.api.errors import RLJobError, exit_code

    try:
        code = command()
    except RLJobError as error:
        sys.stderr.write(f"rljob: {error}\n")
        code = exit_code(error)
    raise typer.Exit(code)
