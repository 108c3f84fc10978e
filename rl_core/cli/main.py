"""The `rljob` command. Only parsing lives here; each command imports its own module late, so that `--help` answers at once."""

import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="rljob",
    help="RL post-training as a job: run it on this machine, or apply the same YAML to a cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="The job (YAML).", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a field, as algorithm.steps=100 (repeatable)."),
]
Target = Annotated[Path, typer.Argument(metavar="FOLDER", help="Output folder of a local run.", show_default=False)]


@app.command()
def run(
    file: JobFile,
    output: Annotated[Path | None, typer.Option(help="Output folder.", show_default="outputs/<job name>")] = None,
    settings: Settings = None,
    resume: Annotated[
        str, typer.Option(help="auto (newest complete checkpoint), none, or a checkpoint folder.")
    ] = "none",
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Live table, or a line per step.")] = True,
) -> None:
    """Run a job on this machine: the same processes a cluster would run."""
    from rl_core.cli.run import run_job

    _exit(lambda: run_job(file, output=output, settings=settings or [], resume=resume, progress=progress))


@app.command()
def validate(file: JobFile, settings: Settings = None) -> None:
    """Check a job and everything it names; print every problem. Exit code 2 when there are any."""
    from rl_core.cli.validate import validate_file

    _exit(lambda: validate_file(file, settings or []))


@app.command()
def plan(file: JobFile, settings: Settings = None) -> None:
    """Show the processes, devices and memory a job would take, before anything starts."""
    from rl_core.cli.plan import show_plan

    _exit(lambda: show_plan(file, settings or []))


@app.command()
def status(target: Target) -> None:
    """Print the state of a run as JSON."""
    from rl_core.cli.local_view import show_status

    _exit(lambda: show_status(target))


@app.command()
def top(
    target: Target, once: Annotated[bool, typer.Option("--once", help="Print once instead of live.")] = False
) -> None:
    """Show a live table of a run: step, reward, versions, who waits for whom."""
    from rl_core.cli.local_view import show_top

    _exit(lambda: show_top(target, once=once))


@app.command()
def logs(
    target: Target,
    role: Annotated[str | None, typer.Option(help="actor, rollout or env; all by default.")] = None,
    index: Annotated[int | None, typer.Option(help="Pod index; all by default.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing as the files grow.")] = False,
) -> None:
    """Print the logs of a run's processes."""
    from rl_core.cli.local_view import show_logs

    _exit(lambda: show_logs(target, role=role, index=index, follow=follow))


def _exit(command: Callable[[], int]) -> None:
    """Run a command and end with its exit code; a known error is one clear line, not a traceback."""
    from rl_core.api.errors import RLJobError, exit_code

    try:
        code = command()
    except RLJobError as error:
        sys.stderr.write(f"rljob: {error}\n")
        code = exit_code(error)
    except BrokenPipeError:
        code = 141
    raise typer.Exit(code)


def main() -> None:
    """Entry point: the local commands and those of installed extensions (group `rljob.commands`)."""
    for point in entry_points(group="rljob.commands"):
        point.load()(app)
    app()


if __name__ == "__main__":
    main()
