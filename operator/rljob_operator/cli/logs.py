"""`rljob logs` of a job: the logs of its containers side by side, each line with the container's name and the pod's index.

A colocated job runs rollouts in the pods of its actors, in containers of their own or in those of the actors. Containers that are not of
the job, such as sidecars that a webhook added, are left out.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rl_core.api.errors import ConfigError
from rl_core.plan.parts import PodPlan
from rljob_operator import naming
from rljob_operator.cli import jobs
from rljob_operator.cli.connection import Connection, Json
from rljob_operator.errors import ApiError
from rljob_operator.kinds import POD

NO_LOG_YET = ("ContainerCreating", "PodInitializing", "is waiting to start")


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerLog:
    """The log of one container of a job."""

    pod: Json
    container: str
    groups: frozenset[str]
    """Groups of the processes that write to it."""

    @property
    def label(self) -> str:
        """The name of the container and the index of its pod, as `rollout-0`."""
        return f"{self.container}-{self.pod['metadata'].get('labels', {}).get(naming.LABEL_INDEX, '?')}"

    def matches(self, *, role: str | None, index: int | None, attempt: int | None) -> bool:
        """Return whether processes of group `role` write to it, in a pod of this index and epoch; None = any."""
        labels = self.pod["metadata"].get("labels", {})
        selector = {naming.LABEL_INDEX: index, naming.LABEL_EPOCH: attempt}
        return (role is None or role in self.groups) and all(
            value is None or labels.get(key) == str(value) for key, value in selector.items()
        )


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
    """Write the logs of the job's containers that match; `attempt` is the epoch of actor pods. With `follow` until they end.

    Raises ConfigError when no pod matches.
    """
    jobs.read(connection, name)
    with jobs.explained(connection, f"listing the pods of job {name}"):
        pods = connection.list(POD, selector=f"{naming.LABEL_JOB}={name}")
    logs = sorted((log for pod in pods for log in _logs_of(pod)), key=lambda log: log.label)
    selected = [log for log in logs if log.matches(role=role, index=index, attempt=attempt)]
    if not selected:
        existing = ", ".join(log.label for log in logs) or "none exist"
        raise ConfigError(
            f"no pod of job {name} matches role {role or 'any'}, index {_any(index)}, attempt {_any(attempt)}; pods: {existing}"
        )
    if follow:
        _follow(connection, selected, write)
        return
    for log in selected:
        for line in _lines(connection, log, follow=False):
            write(f"{log.label}: {line}\n")


def _logs_of(pod: Json) -> Iterator[ContainerLog]:
    """Yield the logs of the containers of the job."""
    role = pod["metadata"].get("labels", {}).get(naming.LABEL_ROLE)
    for container in pod["spec"]["containers"]:
        name = container["name"]
        plan = next((entry.get("value") for entry in container.get("env", []) if entry["name"] == "RLJOB_POD_PLAN"), "")
        if plan or name == role:
            yield ContainerLog(pod=pod, container=name, groups=_groups_in(plan) | {name})


def _groups_in(plan: str) -> frozenset[str]:
    """Return the groups of the processes of a container's plan; empty for one that this version does not understand."""
    try:
        pod_plan = PodPlan.from_json(plan.replace("$$", "$"))  # The inverse of how manifests.containers writes values.
    except (ValueError, KeyError, TypeError):
        return frozenset()
    return frozenset(process.group for container in pod_plan.containers for process in container.processes)


def _follow(connection: Connection, logs: list[ContainerLog], write: Callable[[str], None]) -> None:
    """Write lines as they come, from a thread per container."""
    arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read(log: ContainerLog) -> None:
        try:
            for line in _lines(connection, log, follow=True):
                arrived.put(f"{log.label}: {line}\n")
        finally:
            arrived.put(None)

    for log in logs:
        threading.Thread(target=read, args=(log,), daemon=True, name=log.label).start()
    num_open = len(logs)
    while num_open:
        line = arrived.get()
        if line is None:
            num_open -= 1
        else:
            write(line)


def _lines(connection: Connection, log: ContainerLog, *, follow: bool) -> Iterator[str]:
    name = log.pod["metadata"]["name"]
    query = {"container": log.container} | ({"follow": "true"} if follow else {})
    empty = True
    try:
        for line in connection.lines(POD.path(connection.namespace, name, "log"), query=query):
            empty = False
            yield line
        if empty:
            yield f"(no log yet: the pod is {(log.pod.get('status') or {}).get('phase', 'Pending')})"
    except ApiError as error:
        not_started = any(marker in error.message for marker in NO_LOG_YET)
        yield f"(no log yet: {error.message})" if not_started else f"(no log: {error.message})"


def _any(value: int | None) -> str:
    return "any" if value is None else str(value)
