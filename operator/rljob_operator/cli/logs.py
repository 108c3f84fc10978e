"""`rljob logs` of a job: the pods' logs side by side, each line with its pod's role and index."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from rl_core.api.errors import ConfigError
from rljob_operator import naming
from rljob_operator.cli import jobs
from rljob_operator.cli.connection import Connection, Json
from rljob_operator.errors import ApiError
from rljob_operator.kinds import POD

NO_LOG_YET = ("ContainerCreating", "PodInitializing", "is waiting to start")


def show(
    connection: Connection,
    name: str,
    *,
    role: str | None,
    index: int | None,
    attempt: int | None,
    follow: bool,
    write: Callable[[str], None],
) -> None:
    """Write the logs of the job's pods that match; `attempt` is the epoch of actor pods. With `follow` until they end.

    Raises ConfigError when no pod matches.
    """
    jobs.read(connection, name)
    with jobs.explained(connection, f"listing the pods of job {name}"):
        pods = connection.list(POD, selector=f"{naming.LABEL_JOB}={name}")
    chosen = [pod for pod in pods if _matches(pod, role=role, index=index, attempt=attempt)]
    if not chosen:
        known = ", ".join(sorted(_label(pod) for pod in pods)) or "none exist"
        raise ConfigError(
            f"no pod of job {name} matches role {role or 'any'}, index {_any(index)}, attempt {_any(attempt)}; pods: {known}"
        )
    chosen.sort(key=_label)
    if follow:
        _follow(connection, chosen, write)
        return
    for pod in chosen:
        for line in _lines(connection, pod, follow=False):
            write(f"{_label(pod)}: {line}\n")


def _follow(connection: Connection, pods: list[Json], write: Callable[[str], None]) -> None:
    """Write lines as they come, from a thread per pod."""
    arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read(pod: Json) -> None:
        try:
            for line in _lines(connection, pod, follow=True):
                arrived.put(f"{_label(pod)}: {line}\n")
        finally:
            arrived.put(None)

    for pod in pods:
        threading.Thread(target=read, args=(pod,), daemon=True, name=_label(pod)).start()
    left = len(pods)
    while left:
        line = arrived.get()
        if line is None:
            left -= 1
        else:
            write(line)


def _lines(connection: Connection, pod: Json, *, follow: bool) -> Iterator[str]:
    name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]["name"]
    query = {"container": container} | ({"follow": "true"} if follow else {})
    empty = True
    try:
        for line in connection.lines(POD.path(connection.namespace, name, "log"), query=query):
            empty = False
            yield line
        if empty:
            yield f"(no log yet: the pod is {(pod.get('status') or {}).get('phase', 'Pending')})"
    except ApiError as error:
        waits = any(word in error.message for word in NO_LOG_YET)
        yield f"(no log yet: {error.message})" if waits else f"(no log: {error.message})"


def _matches(pod: Json, *, role: str | None, index: int | None, attempt: int | None) -> bool:
    labels = pod["metadata"].get("labels", {})
    wanted = {naming.LABEL_ROLE: role, naming.LABEL_INDEX: index, naming.LABEL_EPOCH: attempt}
    return all(value is None or labels.get(key) == str(value) for key, value in wanted.items())


def _label(pod: Json) -> str:
    labels = pod["metadata"].get("labels", {})
    return f"{labels.get(naming.LABEL_ROLE, '?')}-{labels.get(naming.LABEL_INDEX, '?')}"


def _any(value: int | None) -> str:
    return "any" if value is None else str(value)
