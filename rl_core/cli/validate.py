"""`rljob validate`: the schema, then everything the job names: model folder, tokenizer, data, user code, placement."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rl_core.api.errors import ConfigError, RLJobError
from rl_core.api.job import RLJob
from rl_core.cli.job_file import PATH_FIELDS, JobProblems, load_job
from rl_core.data.hub import HUB_SCHEME, fetch_references


def validate_file(file: Path, settings: Sequence[str]) -> int:
    """Print every problem of a job; return 0 when there are none, else 2.

    What lies on a volume of the actor's pods cannot be seen from here; it is named and left to the pods.
    """
    job = load_job(file, settings)
    mounted = paths_on_volumes(job)
    check_references(job, file, files=not mounted)
    unseen = f"; not looked at, on volumes of the actor: {', '.join(mounted)}" if mounted else ""
    sys.stdout.write(
        f"{file}: valid ({job.metadata.name}: {job.spec.algorithm.name}, {job.spec.algorithm.steps} steps){unseen}\n"
    )
    return 0


def paths_on_volumes(job: RLJob) -> list[str]:
    """Return the path fields of the job that lie below a volume mount of the actor, as `spec.model.path`."""
    mounts = [Path(mount.mount_path) for mount in job.spec.actor.volume_mounts]
    spec = job.spec.model_dump(mode="json", by_alias=True)
    values = {f"spec.{block}.{field}": spec[block][field] for block, field in PATH_FIELDS}
    return [
        name for name, value in values.items() if value and any(Path(value).is_relative_to(mount) for mount in mounts)
    ]


def check_references(job: RLJob, file: Path, *, files: bool = True) -> None:
    """Raise JobProblems listing everything outside the YAML that would stop the job; `files` False: but model and data."""
    problems = list(find_reference_problems(job, search_path=file.resolve().parent, files=files))
    if problems:
        raise JobProblems(file, problems)


def find_reference_problems(job: RLJob, *, search_path: Path, files: bool = True) -> Iterator[str]:
    """Yield one line per problem; `hub` references are checked when they are fetched, at the start of a run."""
    without_files = (_check_user_code, _check_placement, _check_schedule)
    for check in (_check_model, *without_files) if files else without_files:
        yield from _told(lambda check=check: check(job, search_path))  # type: ignore[misc]


def _told(check: Callable[[], Iterator[str]]) -> Iterator[str]:
    try:
        yield from check()
    except RLJobError as error:
        yield str(error)


def _check_model(job: RLJob, search_path: Path) -> Iterator[str]:
    from rl_core.data.tokenizer import Tokenizer
    from rl_core.plan.model_facts import stored_shapes
    from rl_core.runner.limits import sequence_limit

    spec = job.spec
    if spec.model.path.startswith(HUB_SCHEME):
        yield from _check_data(job, None, 1 << 30)
        return
    folder = Path(spec.model.path)
    if not (folder / "config.json").is_file():
        yield f"spec.model.path: must be a folder with config.json, got {folder}, check the path"
        yield from _check_data(job, None, 1 << 30)
        return
    tokenizer, limit = None, 1 << 30
    try:
        tokenizer = Tokenizer.from_folder(folder)
        limit = sequence_limit(spec, json.loads((folder / "config.json").read_text()))
    except RLJobError as error:
        yield f"spec.model.path: {error}"
    except ValueError as error:
        yield f"spec.model.path: config.json must be valid JSON, got {error}, save the model again"
    try:
        if not stored_shapes(folder):
            yield f"spec.model.path: must hold safetensors weights, got none in {folder}, save the model with save_pretrained"
    except ConfigError as error:
        yield f"spec.model.path: {error}"
    yield from _check_data(job, tokenizer, limit)


def _check_data(job: RLJob, tokenizer: object, limit: int) -> Iterator[str]:
    from rl_core.data.dataset import load_prompts
    from rl_core.data.source import read_rows
    from rl_core.data.tokenizer import Tokenizer

    data = job.spec.data
    for field, reference in (("data.train", data.train), ("data.validation", data.validation)):
        if reference is None or reference.startswith(HUB_SCHEME):
            continue
        try:
            if isinstance(tokenizer, Tokenizer):
                load_prompts(reference, data, tokenizer, field=field, task_name=job.spec.env.type, max_seq_len=limit)
            else:
                read_rows(reference, field=field)
        except RLJobError as error:
            yield from (f"spec.{field}: {line.removeprefix(f'{field}: ')}" for line in str(error).splitlines())


def _check_user_code(job: RLJob, search_path: Path) -> Iterator[str]:
    from rl_core.algorithms.check import check_functions
    from rl_core.envs.check import check_env

    yield from check_env(job.spec, search_path=str(search_path))
    yield from check_functions(job.spec.algorithm, search_path=str(search_path))


def _check_placement(job: RLJob, search_path: Path) -> Iterator[str]:
    from rl_core.plan.launch import build_launch_plan

    build_launch_plan(job, name=job.metadata.name, uid="validate")
    yield from ()


def _check_schedule(job: RLJob, search_path: Path) -> Iterator[str]:
    from rl_core.runner.changes import check_schedule

    try:
        check_schedule(job.spec)
    except ValueError as error:
        yield str(error)


def prepare(file: Path, settings: Sequence[str]) -> RLJob:
    """Return the job ready to run: validated, fetched, checked."""
    job = fetch_references(load_job(file, settings))
    check_references(job, file)
    return job
