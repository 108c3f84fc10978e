"""What `rljob status|top|logs|scale|samples|view` ask about a job name; entry point `rljob.targets` (rl_core.cli.targets.ClusterSide)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rl_core.api.errors import ConfigError
from rljob_operator.cli import jobs, logs
from rljob_operator.cli.connection import ClusterPlace, Connection, Json
from rljob_operator.cli.runner_files import RunnerFiles


class Targets:
    """Jobs of a cluster."""

    def job(self, name: str, place: ClusterPlace) -> Json:
        """Return the job as stored in the API server."""
        return jobs.read(_open(name, place), name)

    def watch(self, name: str, place: ClusterPlace) -> Callable[[], Json]:
        """Return a function that reads the job again at each call, over one connection."""
        connection = _open(name, place)
        return lambda: jobs.read(connection, name)

    def logs(
        self,
        name: str,
        place: ClusterPlace,
        *,
        role: str | None,
        index: int | None,
        attempt: int | None,
        follow: bool,
        write: Callable[[str], None],
    ) -> None:
        """Write the logs of the job's pods that match."""
        logs.show(_open(name, place), name, role=role, index=index, attempt=attempt, follow=follow, write=write)

    def scale(self, name: str, place: ClusterPlace, counts: Mapping[str, int]) -> str:
        """Set the number of pods of elastic groups, by name; return the job's namespace."""
        connection = _open(name, place)
        jobs.scale(connection, name, counts)
        return connection.namespace

    def files(self, name: str, place: ClusterPlace) -> Callable[[Json], tuple[Json, Json]]:
        """Return a function that asks the job's runner for its status and its files."""
        return RunnerFiles(_open(name, place), name).ask


def _open(name: str, place: ClusterPlace) -> Connection:
    """Return a connection to the cluster of the job `name`. The error says that `name` is not a folder either, which may be what was meant."""
    try:
        return Connection.open(place)
    except ConfigError as error:
        raise ConfigError(f"{name} is no folder here, and for a job of that name {error}") from error
