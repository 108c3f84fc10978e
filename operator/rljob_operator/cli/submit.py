"""`rljob submit`: sends a job file to the cluster, the user's code along with it, and waits for the end where asked."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError

from rl_core.api import text
from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJob
from rl_core.api.problems import problem_lines
from rljob_operator import kinds
from rljob_operator.cli import jobs
from rljob_operator.cli.code import config_map
from rljob_operator.cli.connection import Connection, Json
from rljob_operator.errors import AlreadyExists

POLL_SECONDS = 2.0
EXIT_CODES: Mapping[str, int] = {"Succeeded": 0, "Failed": 3}


def submit(
    connection: Connection,
    file: Path,
    *,
    code: Path | None,
    dry_run: bool,
    wait: bool,
    say: Callable[[str], None] = lambda line: _write(line),
) -> int:
    """Create the job of `file`, and apply what else is in it; return the exit code.

    `code`: folder whose modules become a ConfigMap of the job. `dry_run`: the API server checks, nothing is stored.
    Raises ConfigError naming every problem.
    """
    job, documents = read_documents(file)
    name = job["metadata"]["name"]
    if namespace := job["metadata"].get("namespace"):
        connection.namespace = namespace
    if code is not None:
        modules = config_map(code, job=name)
        job["spec"]["code"] = {"configMap": modules["metadata"]["name"]}
    with jobs.explained(connection, f"submitting {file}"):
        for document in documents:
            connection.apply(kinds.of(document["apiVersion"], document["kind"]), document, dry_run=dry_run)
        if code is not None:
            connection.apply(kinds.CONFIG_MAP, modules, dry_run=dry_run)
        try:
            created = connection.create(kinds.RLJOB, job, dry_run=dry_run)
        except AlreadyExists as error:
            raise ConfigError(
                f"job {name} must not exist in namespace {connection.namespace}, got one; delete it (kubectl delete rlj {name}) "
                "or rename this one"
            ) from error
        # The job exists now and owns the ConfigMap, which is deleted together with it.
        if code is not None and not dry_run:
            connection.apply(kinds.CONFIG_MAP, config_map(code, job=name, owner=created["metadata"]))
    if dry_run:
        say(f"{name}: accepted by the API server (nothing was created)")
        return 0
    say(f"{name}: submitted to namespace {connection.namespace}; rljob top {name} -n {connection.namespace}")
    return follow(connection, name, say=say) if wait else 0


def read_documents(file: Path) -> tuple[Json, list[Json]]:
    """Return the job of a YAML file, checked by this version's schema, and the other objects in it. Raises ConfigError."""
    documents = text.read_documents(file)
    if not all(
        isinstance(document, dict) and {"apiVersion", "kind", "metadata"} <= document.keys() for document in documents
    ):
        raise ConfigError(f"{file}: every document must have apiVersion, kind and metadata; correct the one without")
    rljobs = [document for document in documents if document["kind"] == kinds.RLJOB.kind]
    if len(rljobs) != 1:
        raise ConfigError(f"{file}: must hold exactly one RLJob, got {len(rljobs)}; submit them one by one")
    try:
        RLJob.model_validate(rljobs[0])
    except ValidationError as error:
        lines = "\n".join(f"  {line}" for line in problem_lines(error))
        raise ConfigError(f"{file}: the job is not valid\n{lines}") from error
    return rljobs[0], [document for document in documents if document is not rljobs[0]]


def follow(connection: Connection, name: str, *, say: Callable[[str], None]) -> int:
    """Tell phase and step as they change until the job has ended; return 0 for success, 3 for failure, 130 on Ctrl-C."""
    last_line = ""
    try:
        while True:
            job = jobs.read(connection, name)
            line = _line(job)
            if line != last_line:
                say(line)
                last_line = line
            phase = jobs.phase(job)
            if phase in jobs.FINAL_PHASES:
                return EXIT_CODES[phase]
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        say(f"{name}: goes on; rljob status {name}")
        return 130


def _line(job: Json) -> str:
    status = job.get("status") or {}
    phase = jobs.phase(job)
    parts = [f"{job['metadata']['name']}: {phase}"]
    if status.get("totalSteps"):
        parts.append(f"step {status.get('step', 0)}/{status['totalSteps']}")
    if isinstance(status.get("reward"), int | float):
        parts.append(f"reward {status['reward']:.3f}")
    reason = jobs.condition(job, "Failed") if phase == "Failed" else {}
    if reason.get("status") == "True":
        parts.append(f"{reason['reason']}: {reason.get('message', '')}")
    return "  ".join(parts)


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
