"""The `rljob` command. This module only parses arguments; each command imports its own module when it runs, so that `--help` is fast."""

import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="rljob",
    help="Post-train language models with RL. Run a job on this machine, or apply the same YAML to a cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="The job (YAML).", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Override a field of the job, such as algorithm.steps=100. May be repeated."
    ),
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="Output folder of a local run, or name of a job on the cluster.", show_default=False
    ),
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace of the job.", show_default="the context's")
]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig.", show_default="the current one")]

DeviceMemory = Annotated[
    float | None,
    typer.Option(
        min=0, help="Memory of an accelerator in GiB. A job that needs more is refused.", show_default="unknown"
    ),
]


@app.command()
def init(
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="Folder of the new job.", show_default="my-<task>")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="math, reward, multi-turn or agent.", show_default="asked for")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model folder or hf://owner/name.", show_default="hf://Qwen/Qwen2.5-0.5B-Instruct"),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Accelerators of the machine. The job uses two of them, or shares one.",
            show_default="those of this machine",
        ),
    ] = None,
) -> None:
    """Create a folder with a job that runs as it is, example data, a stub of your code and a README."""
    from rl_core.cli import init as new_job

    run_command(lambda: new_job.init(folder, task=task, model=model, gpus=gpus))


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
    """Run a job on this machine, with the same processes as on a cluster."""
    sys.stdout.write(f"checking {file}: fields, model, data, user code\n")
    sys.stdout.flush()  # Flushed before the modules of a run are imported, which takes longer.
    from rl_core.cli.run import run_job

    run_command(lambda: run_job(file, output=output, settings=settings or [], resume=resume, progress=progress))


@app.command()
def validate(file: JobFile, settings: Settings = None, device_memory: DeviceMemory = None) -> None:
    """Check a job, its model, data and user code, and print all problems. The exit code is 2 if there are any."""
    from rl_core.cli.validate import validate_file

    run_command(lambda: validate_file(file, settings or [], device_memory=device_memory))


@app.command()
def plan(file: JobFile, settings: Settings = None, device_memory: DeviceMemory = None) -> None:
    """Show the processes, devices and memory that a job needs, without starting it. Reads only config.json of the model.

    The exit code is 2 if a device has too little memory, or if the job or config.json cannot be read.
    """
    from rl_core.cli.plan import show_plan

    run_command(lambda: show_plan(file, settings or [], device_memory=device_memory))


@app.command()
def status(target: Target, namespace: Namespace = None, context: Context = None) -> None:
    """Print the state of a local run or of a job on the cluster as JSON."""
    from rl_core.cli import cluster_view, local_view, targets

    def command() -> int:
        if folder := targets.folder_of(target):
            return local_view.show_status(folder)
        place = targets.Place(namespace=namespace, context=context)
        return cluster_view.show_status(targets.cluster(target), target, place)

    run_command(command)


@app.command()
def top(
    target: Target,
    once: Annotated[bool, typer.Option("--once", help="Print once instead of live.")] = False,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Show a live table of a run or job: step, reward, policy versions, and what each process waits for."""
    from rl_core.cli import cluster_view, local_view, targets

    def command() -> int:
        if folder := targets.folder_of(target):
            return local_view.show_top(folder, once=once)
        place = targets.Place(namespace=namespace, context=context)
        return cluster_view.show_top(targets.cluster(target), target, place, once=once)

    run_command(command)


@app.command()
def logs(
    target: Target,
    role: Annotated[str | None, typer.Option(help="actor, rollout or env; all by default.")] = None,
    index: Annotated[int | None, typer.Option(help="Pod index; all by default.")] = None,
    attempt: Annotated[
        int | None,
        typer.Option(help="Attempt of the run, its status.epoch (cluster only); all by default.", show_default=False),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing as the logs grow.")] = False,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Print the logs of the processes of a run or job."""
    from rl_core.api.errors import ConfigError
    from rl_core.cli import cluster_view, local_view, targets

    def command() -> int:
        if folder := targets.folder_of(target):
            if attempt is not None:
                raise ConfigError(
                    "--attempt is for jobs of a cluster, got it with a folder, whose logs hold all; leave it out"
                )
            return local_view.show_logs(folder, role=role, index=index, follow=follow)
        place = targets.Place(namespace=namespace, context=context)
        side = targets.cluster(target)
        return cluster_view.show_logs(side, target, place, role=role, index=index, attempt=attempt, follow=follow)

    run_command(command)


@app.command()
def samples(
    target: Target,
    step: Annotated[int | None, typer.Option(min=0, help="Training step.", show_default="the newest")] = None,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest reward first, over all steps.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Highest reward first, over all steps.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Samples that have no reward.")] = False,
    filtered: Annotated[
        bool, typer.Option("--filtered", help="Samples of groups that dynamic sampling discarded.")
    ] = False,
    group: Annotated[str | None, typer.Option(help="Id of a prompt group.", show_default=False)] = None,
    validation: Annotated[
        bool, typer.Option("--validation", help="Samples of validation instead of training.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Largest number of samples to print.")] = 8,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Print completions of a local run or of a running job on the cluster, with rewards and finish reasons."""
    from rl_core.cli import targets
    from rl_core.cli.copied_output import readable_run
    from rl_core.cli.samples import Choice, show_samples

    def command() -> int:
        place = targets.Place(namespace=namespace, context=context)
        choice = Choice(
            step=step,
            group=group,
            validation=validation,
            worst=worst,
            best=best,
            failed=failed,
            filtered=filtered,
            limit=limit,
        )
        with readable_run(target, place, only=["samples"]) as (folder, _):
            return show_samples(folder, choice)

    run_command(command)


@app.command()
def view(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET...", help="Output folders of runs, else names of running jobs.", show_default=False
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 = any free port.")] = 0,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Who can reach it can read the samples.")
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Serve a page of one or several runs: curves, samples, tokens, and what each process waited for."""
    from rl_core.cli.targets import Place
    from rl_core.cli.view import serve_view

    place = Place(namespace=namespace, context=context)
    run_command(lambda: serve_view(runs, place, host=host, port=port, browser=browser))


@app.command()
def export(
    source: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="Output folder of a run, or a checkpoint.", show_default=False),
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder that is written.", show_default=False)],
    merge: Annotated[
        bool, typer.Option("--merge", help="Write the model with merged adapters instead of the adapters.")
    ] = False,
    step: Annotated[str, typer.Option(help="Step of the checkpoint, latest or best.")] = "latest",
    model: Annotated[
        str | None,
        typer.Option(help="Folder of the weights that the run began with.", show_default="model.path of the job"),
    ] = None,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder; with model.lora, its adapters in the format of peft."""
    from rl_core.cli.export import export as write

    run_command(lambda: write(source, folder, step=step, merge=merge, model=model))


@app.command()
def serve(
    target: Annotated[
        str,
        typer.Argument(
            metavar="OUT|MODEL",
            help="Output folder of a finished run, a model folder or hf://owner/name.",
            show_default=False,
        ),
    ],
    engine: Annotated[str | None, typer.Option(help="hf or sglang.", show_default="the run's, else hf")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 = any free port.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on. Who can reach it can call the model.")] = "127.0.0.1",
    settings: Settings = None,
) -> None:
    """Serve a model behind the endpoint that agents are trained with, to try an agent. Ctrl-C ends it."""
    from rl_core.cli.serve import serve_model

    run_command(lambda: serve_model(target, engine=engine, settings=settings or [], host=host, port=port))


@app.command()
def metrics(
    name: Annotated[
        str | None, typer.Argument(help="Output folder of a run, a metric, or a part of its name.", show_default="all")
    ] = None,
    word: Annotated[
        str | None, typer.Argument(help="After an output folder: a metric, or a part of its name.", show_default="all")
    ] = None,
) -> None:
    """Explain the metrics of a run. With an output folder, also print their last values."""
    from rl_core.cli.metrics import show_metrics

    run_command(lambda: show_metrics(name, word))


@app.command()
def scale(
    target: Target,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Number of pods of the group.", show_default=False)
    ] = None,
    group: Annotated[str, typer.Option(help="Worker group whose number of pods is changed.")] = "rollout",
    envs: Annotated[int | None, typer.Option("--env", min=1, help="Number of env pods.", show_default=False)] = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Change the number of pods of an elastic worker group, such as the rollouts, of a running job."""
    from rl_core.api.errors import ConfigError
    from rl_core.cli import cluster_view, local_control, targets
    from rl_core.plan.groups import ENV

    def command() -> int:
        if replicas is None and envs is None:
            raise ConfigError("scale must be given --replicas or --env, got neither; give a number")
        counts = {name: count for name, count in ((ENV, envs), (group, replicas)) if count is not None}
        if folder := targets.folder_of(target):
            return local_control.scale(folder, counts)
        place = targets.Place(namespace=namespace, context=context)
        return cluster_view.scale(targets.cluster(target), target, place, counts)

    run_command(command)


def run_command(command: Callable[[], int]) -> None:
    """Run a command and exit with its code; a known error is printed as one line, without a traceback."""
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
    """Entry point: the local commands, and those of installed packages by the entry-point group `rljob.commands`."""
    for point in entry_points(group="rljob.commands"):
        point.load()(app)
    app()


if __name__ == "__main__":
    main()
