"""`rljob validate`: the schema, then everything the job names: model folder, tokenizer, data, user code, placement."""

import json
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rl_core.api.backends import EMBODIED_PROGRAMS
from rl_core.api.data import DataSpec
from rl_core.api.embodied import check_job, embodied_options, is_embodied
from rl_core.api.env import EnvSpec
from rl_core.api.errors import ConfigError, RLJobError
from rl_core.api.job import RLJob, RLJobSpec
from rl_core.api.lora import absent_layers
from rl_core.api.user_code import IMPORT_SECONDS, check_in_child
from rl_core.cli.job_file import JobProblems, absolute, load_job, path_fields, read_document
from rl_core.data.hub import HUB_SCHEME, fetch_config, fetch_references, hub_problem, references
from rl_core.plan.groups import ENV

if TYPE_CHECKING:
    from rl_core.data.dataset import PromptDataset
    from rl_core.data.tokenizer import Tokenizer
    from rl_core.messages.envs import EnvRow
    from rl_core.plan.capacity import CapacityReport

GIB = 1024**3
SIMULATOR_TRIAL = "rl_core.cli.simulator_trial"
WAITING_S = 5.0
"""Seconds between two lines that say that user code is waited for."""
NO_LIMIT = 1 << 30
"""Tokens of a prompt where the model does not tell how many it takes."""


def validate_file(file: Path, settings: Sequence[str], *, device_memory: float | None = None) -> int:
    """Print every problem of a job; return 0 when there are none, else 2.

    What lies on a volume of the actor's pods cannot be seen from here; it is named and left to the pods. `device_memory`: GiB of an
    accelerator; None where that is not known.
    """
    try:
        job = load_job(file, settings)
    except JobProblems as error:
        raise JobProblems(file, [*error.problems, *find_file_problems(file, settings)]) from None
    mounted = paths_on_volumes(job)
    check_references(job, file, on_volumes=mounted, device_memory=device_memory, simulators=True)
    unseen = f"; not looked at, on volumes of the actor: {', '.join(mounted)}" if mounted else ""
    sys.stdout.write(
        f"{file}: valid ({job.metadata.name}: {job.spec.algorithm.name}, {job.spec.algorithm.steps} steps){unseen}\n"
    )
    return 0


def paths_on_volumes(job: RLJob) -> list[str]:
    """Return the path fields of the job that lie below a volume mount of the actor, as `spec.model.path`."""
    mounts = [Path(mount.mount_path) for mount in job.spec.actor.volume_mounts]
    spec = job.spec.model_dump(mode="json", by_alias=True)
    values = {f"spec.{field}": holder[key] for field, holder, key in path_fields(spec)}
    return [name for name, value in values.items() if any(Path(value).is_relative_to(mount) for mount in mounts)]


def check_references(
    job: RLJob,
    file: Path,
    *,
    on_volumes: Collection[str] = (),
    device_memory: float | None = None,
    simulators: bool = False,
) -> None:
    """Raise JobProblems with all problems outside the YAML file that would stop the job.

    The fields `on_volumes`, such as `spec.data.train`, are not looked at. With `simulators` a simulator of the job makes some steps, which a
    run does at its start by itself.
    """
    folder = file.resolve().parent
    problems = list(find_reference_problems(job, search_path=folder, on_volumes=on_volumes))
    if simulators and is_embodied(job.spec) and not problems:
        with _waiting_for("the simulator of the job"):
            problems += check_simulator(
                job.spec, search_path=str(folder), with_policy="spec.model.path" not in on_volumes
            )
    memory = _with_errors(lambda: _check_memory(job, device_memory))
    problems += (line for line in memory if f"spec: {line}" not in problems)
    if problems:
        raise JobProblems(file, problems)


def find_file_problems(file: Path, settings: Sequence[str]) -> Iterator[str]:
    """Yield the problems of model and data of a job that breaks the schema; each file is checked by itself."""
    document = read_document(file, settings)
    if _at(document, "spec", "actor", "volumeMounts"):
        return
    spec = _at(document, "spec")
    columns = _columns_of(_at(document, "spec", "data"))
    for field, holder, key in references(spec if isinstance(spec, dict) else {}):
        path = absolute(file, holder[key])
        if path.startswith(HUB_SCHEME):
            continue
        if _at(document, "spec", "program") in EMBODIED_PROGRAMS:
            continue
        if field == "model.path":
            yield from _open_model(path, file.resolve().parent)[1]
        else:
            read_rows = _reader(
                path, columns.get(field.rpartition(".")[0]), task_name=_task_of(_at(document, "spec", ENV))
            )
            yield from _read_problems(
                field, read_rows, missing_path_hint(path, file.resolve().parent, file="/FILE.parquet")
            )


def _columns_of(data: Any) -> dict[str, DataSpec]:
    """Return the settings of each data set of an unvalidated `spec.data` by its field, such as `data.sets.0`; empty if they are invalid."""
    try:
        return {field: part for _, field, part in DataSpec.model_validate(data).parts()}
    except ValidationError:
        return {}


def _task_of(env: Any) -> str:
    """Return the type of an unvalidated `spec.env`.

    Without a type it is the default, but "", which needs no column of answers, if another field shows that the default is not meant.
    """
    fields = env if isinstance(env, dict) else {}
    default = "" if fields.keys() & {"reward", "agent", "command", "factory"} else EnvSpec.model_fields["type"].default
    return str(fields.get("type", default))


def _reader(path: str, data: DataSpec | None, *, task_name: str) -> Callable[..., object]:
    """Return a function that reads a data set. If its settings `data` are given, the function also checks that the columns exist."""
    from rl_core.data.dataset import read_columns
    from rl_core.data.source import read_rows

    return partial(read_rows, path) if data is None else partial(read_columns, path, data, task_name=task_name)


def _at(document: Any, *path: str) -> Any:
    """Return the value at a path of an unvalidated document, None where the path does not exist."""
    for part in path:
        document = document.get(part) if isinstance(document, dict) else None
    return document


def find_reference_problems(job: RLJob, *, search_path: Path, on_volumes: Collection[str] = ()) -> Iterator[str]:
    """Yield one line per problem. The fields `on_volumes` are not looked at.

    What lies on the Hugging Face hub is only looked for; its content is checked at the start of a run.
    """
    problems = list(_with_errors(lambda: _check_files(job, search_path, on_volumes)))
    yield from problems
    # Rows that are wrong are reported once, and not again as failures of the code that is called with them.
    data_is_wrong = any(line.startswith("spec.data.") for line in problems)
    yield from _with_errors(
        lambda: _check_user_code(job, search_path, {} if data_is_wrong else _example_rows(job, on_volumes))
    )
    for check in (_check_placement, _check_schedule):
        yield from _with_errors(lambda check=check: check(job))  # type: ignore[misc]


def memory_report(job: RLJob, device_memory: float | None) -> "CapacityReport | None":
    """Return the estimated memory of each process of a job; None for a policy that acts in simulators, whose size only its class knows.

    The model may be a local folder, or on the Hugging Face hub: then only its config.json is fetched.

    `device_memory`: GiB of an accelerator, None = unknown. Raises ConfigError where the model cannot be read, and where it lacks layers that
    are to have adapters.
    """
    from rl_core.plan.capacity import ModelFacts, estimate

    if is_embodied(job.spec):
        return None
    path = job.spec.model.path
    folder = fetch_config(path) if path.startswith(HUB_SCHEME) else Path(path)
    available = None if device_memory is None else int(device_memory * GIB)
    facts = ModelFacts.from_config(folder)
    for problem in absent_layers(job.spec.model.lora, layers=facts.layers):
        raise ConfigError(problem)
    return estimate(job, facts, device_memory=available)


def _check_memory(job: RLJob, device_memory: float | None) -> Iterator[str]:
    """Yield a problem for each group whose processes need more memory than an accelerator has. Yields none if either number is unknown."""
    from rl_core.plan.capacity import admit

    path = job.spec.model.path
    if device_memory is not None and (path.startswith(HUB_SCHEME) or (Path(path) / "config.json").is_file()):
        report = memory_report(job, device_memory)
        if report is not None:
            admit(report)
    yield from ()


def _with_errors(check: Callable[[], Iterator[str]]) -> Iterator[str]:
    try:
        yield from check()
    except RLJobError as error:
        yield str(error)


def _check_files(job: RLJob, folder: Path, on_volumes: Collection[str]) -> Iterator[str]:
    from rl_core.actors.guards import unsupported_settings
    from rl_core.data.dataset import load_prompts
    from rl_core.runner.limits import check_token_ids, sequence_limit

    model_is_here = "spec.model.path" not in on_volumes
    if is_embodied(job.spec):
        yield from _check_policy(job) if model_is_here else ()
        return
    tokenizer, limit = None, NO_LIMIT
    on_hub: list[tuple[str, str]] = []
    plain_fields: list[str] = []
    """Fields of the job whose data sets have plain prompts, although the model has a chat template that they could use."""
    if job.spec.model.path.startswith(HUB_SCHEME):
        on_hub.append(("model.path", job.spec.model.path))
    elif model_is_here:
        opened, problems = _open_model(job.spec.model.path, folder)
        yield from problems
        if opened is not None:
            tokenizer, config = opened
            try:
                limit = sequence_limit(job.spec, config)
            except RLJobError as error:
                yield f"spec.model.path: {error}"
            try:
                check_token_ids(job.spec, config)
            except RLJobError as error:
                yield f"spec.{error}"
            yield from (f"spec: {line}" for line in unsupported_settings(job.spec, config))
            if job.spec.env.calls_model and not (job.spec.data.chat_template or tokenizer.chat_template):
                yield (
                    f"spec.data.chatTemplate: must be given for env.type {job.spec.env.type}, because the tokenizer of the model has no chat "
                    "template, got none; write one, or save it with the tokenizer"
                )
    for name, field, reference, data in _data_references(job, on_volumes):
        if reference.startswith(HUB_SCHEME):
            on_hub.append((field, reference))
            continue
        task = job.spec.env.type
        if tokenizer is None:
            read_prompts = _reader(reference, data, task_name=task)
        else:
            read_prompts = partial(
                load_prompts, reference, data, tokenizer, name=name, task_name=task, max_seq_len=limit
            )
        prompts: list[PromptDataset] = []
        yield from _read_problems(
            field, read_prompts, missing_path_hint(reference, folder, file="/FILE.parquet"), prompts
        )
        if (
            tokenizer is not None
            and not job.spec.env.calls_model
            and any(_without_template(prompt, data, tokenizer) for prompt in prompts)
        ):
            plain_fields.append(f"spec.{field}")
    if plain_fields:
        _warn(
            f"the model has a chat template, but the prompts of {', '.join(plain_fields)} are plain text and are given to it without the template; "
            "set data.chat: true to make each a user message, or data.chat: false to keep them and silence this warning"
        )
    yield from _hub_problems(on_hub)


def _without_template(prompts: "PromptDataset", data: DataSpec, tokenizer: "Tokenizer") -> bool:
    """Return whether all prompts are plain text although the tokenizer has a chat template, and `data.chat` is not given."""
    unset = "chat" not in data.model_fields_set
    return unset and bool(tokenizer.chat_template) and not any(sample.get("chat") for sample in prompts.samples)


def _check_policy(job: RLJob) -> Iterator[str]:
    """Yield the problem of the folder of a policy that acts in simulators, other than of its class, which may be the user's."""
    config = Path(job.spec.model.path) / "config.json"
    if not config.is_file():
        yield f"spec.model.path: must be a folder with config.json, got {config.parent}, check the path"
    elif "policy" not in json.loads(config.read_text()):
        yield f'spec.model.path: {config} must have the key "policy", got none; see docs/embodied.md'


def _open_model(path: str, job_folder: Path) -> tuple["tuple[Tokenizer, dict[str, Any]] | None", list[str]]:
    """Return (tokenizer, content of config.json) of a model folder, None for a missing one, and the problems of the folder.

    `job_folder`: the folder of the job file.
    """
    from rl_core.data.tokenizer import Tokenizer
    from rl_core.plan.model_facts import stored_shapes

    folder, opened, problems = Path(path), None, []
    if not (folder / "config.json").is_file():
        return None, [
            f"spec.model.path: must be a folder with config.json, got {folder}, check the path{missing_path_hint(path, job_folder)}"
        ]
    try:
        opened = Tokenizer.from_folder(folder), json.loads((folder / "config.json").read_text())
    except RLJobError as error:
        problems.append(f"spec.model.path: {error}")
    except ValueError as error:
        problems.append(f"spec.model.path: config.json must be valid JSON, got {error}, save the model again")
    try:
        if not stored_shapes(folder):
            problems.append(
                f"spec.model.path: must hold safetensors weights, got none in {folder}, save the model with save_pretrained"
            )
    except ConfigError as error:
        problems.append(f"spec.model.path: {error}")
    return opened, problems


def _data_references(job: RLJob, on_volumes: Collection[str]) -> Iterator[tuple[str, str, str, "DataSpec"]]:
    """Yield (name, field, reference, settings) of the training and validation data of each data set that is not `on_volumes`."""
    for name, field, data in job.spec.data.parts():
        for column, reference in (("train", data.train), ("validation", data.validation)):
            if reference is not None and f"spec.{field}.{column}" not in on_volumes:
                yield name, f"{field}.{column}", reference, data


def _hub_problems(hub_references: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the problems of (field, reference) pairs, whose references are on the hub. If the hub does not answer, warn on stderr only."""
    for index, (field, reference) in enumerate(hub_references):
        try:
            if problem := hub_problem(reference, data=field != "model.path"):
                yield f"spec.{field}: {problem}"
        except ConfigError as error:
            yield f"spec.{field}: {error}"
        except ConnectionError as error:
            unseen = ", ".join(f"spec.{name}" for name, _ in hub_references[index:])
            sys.stderr.write(f"not checked: {unseen}: {error}\n")
            return


def missing_path_hint(reference: str, beside: Path, *, file: str = "") -> str:
    """Return a hint on how to get a missing model or data set, to be added to an error; "" if there is none.

    The hint is to run prepare.py if `beside`, the folder of the job, has that script. Otherwise, if the path has the form owner/name and
    `beside` has no folder owner/, it is the name on the Hugging Face hub. `file` is added to that name.
    """
    path = Path(reference)
    if path.is_relative_to(beside) and (beside / "prepare.py").is_file() and not path.exists():
        return f", or make it with python {beside / 'prepare.py'}"
    if (path.suffix and file) or path.parent.parent != beside or path.parent.exists():
        return ""
    name = f"hf://{path.parent.name}/{path.name}"
    forms = f"{name}?split=train[&config=CONFIG] or {name}{file}" if file else name
    return f", or write {forms} for that name on the Hugging Face hub"


def _read_problems(
    field: str, read: Callable[..., object], hint: str, prompts: "list[PromptDataset] | None" = None
) -> Iterator[str]:
    """Read a data set by `read(field=...)` and yield each line of the error that it raises. Warn if prompts are left out as too long.

    If the data set was tokenized, it is added to `prompts`.
    """
    from rl_core.data.dataset import PromptDataset

    try:
        result = read(field=field)
        if isinstance(result, PromptDataset) and prompts is not None:
            prompts.append(result)
        if isinstance(result, PromptDataset) and (dropped := result.dropped_overlong):
            total = dropped + len(result)
            _warn(
                f"spec.{field}: {dropped} of {total} prompts are left out, as they leave no room for a completion (data.onOverlong); "
                "raise rollout.maxSequenceLength to train on them"
            )
    except RLJobError as error:
        yield from (f"spec.{field}: {line.removeprefix(field).lstrip(': ')}{hint}" for line in str(error).splitlines())


def _example_rows(job: RLJob, on_volumes: Collection[str]) -> dict[str, "EnvRow"]:
    """Return rows of the training and validation data to try the environment with; none of a data set on the hub or of simulators."""
    from rl_core.data.examples import example_rows
    from rl_core.data.source import UnusableRows, numbered_rows

    examples: dict[str, EnvRow] = {}
    if is_embodied(job.spec):
        return examples
    for name, field, reference, data in _data_references(job, on_volumes):
        if not reference.startswith(HUB_SCHEME):
            try:
                rows = numbered_rows(reference, field=field, name=name)
            # There are at most data.maxBadRows bad rows; otherwise no rows would be tried.
            except UnusableRows as error:
                rows = dict(error.good)
            examples |= example_rows(rows, data, field=field, task_name=job.spec.env.type)
    return examples


def _check_user_code(job: RLJob, search_path: Path, examples: Mapping[str, "EnvRow"]) -> Iterator[str]:
    from rl_core.algorithms.user_functions import check_functions
    from rl_core.envs.check import check_env
    from rl_core.runner.program_check import check_program

    yield from check_program(job.spec, search_path=str(search_path))
    if is_embodied(job.spec):
        check_job(job.spec)
    elif job.spec.env.replicas:
        with _waiting_for("the reward or environment of the job"):
            problems = list(check_env(job.spec, search_path=str(search_path), examples=examples, warn=_warn))
        yield from problems
    yield from check_functions(job.spec.algorithm, search_path=str(search_path))


@contextmanager
def _waiting_for(label: str) -> Iterator[None]:
    """Write every WAITING_S seconds to standard error that `label` is waited for, until the block ends."""
    finished = threading.Event()

    def tell() -> None:
        seconds = 0.0
        while not finished.wait(WAITING_S):
            seconds += WAITING_S
            sys.stderr.write(f"waiting for {label} ({seconds:.0f} s)\n")

    teller = threading.Thread(target=tell, name="waiting", daemon=True)
    teller.start()
    try:
        yield
    finally:
        finished.set()
        teller.join()


def _warn(text: str) -> None:
    sys.stderr.write(f"warning: {text}\n")


def check_simulator(spec: RLJobSpec, *, search_path: str, with_policy: bool) -> list[str]:
    """Return the problem of the simulator of a job, as `path: rule, got value; way out`; empty if there is none.

    A child process builds it, begins an episode and makes the actions that the policy chooses. `with_policy` False: the folder of the policy
    cannot be read from here, and the actions are zeros. `search_path` is the folder with user code.
    """
    deadlines = spec.runtime.deadlines
    problem = check_in_child(
        SIMULATOR_TRIAL,
        *(["policy"] if with_policy else []),
        name=f"the simulator {embodied_options(spec).id}",
        given=spec.model_dump_json(by_alias=True),
        search_path=search_path,
        seconds=IMPORT_SECONDS + 2 * deadlines.env_reset + deadlines.env_step,
    )
    located = problem.startswith(("env.", "model.", "extensions:"))
    return [f"spec.{'' if located else 'env.options.id: '}{problem}"] if problem else []


def _check_placement(job: RLJob) -> Iterator[str]:
    from rl_core.plan.launch import build_launch_plan
    from rl_core.plan.slots import idle_accelerators

    yield from idle_accelerators(job.spec)
    build_launch_plan(job, name=job.metadata.name, uid="validate")


def _check_schedule(job: RLJob) -> Iterator[str]:
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
