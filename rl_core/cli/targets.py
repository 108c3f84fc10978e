"""Resolves the argument TARGET: an existing folder is a local run, anything else the name of a job in the current kube context.

The implementation for clusters is in `rljob_operator.cli`. It is found by the entry-point group `rljob.targets` and imported when needed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from rl_core.api.errors import ConfigError
from rl_core.plan.groups import ENV, ROLLOUT


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Namespace and kube context in which a job is searched."""

    namespace: str | None = None
    """Namespace; None = that of the context."""
    context: str | None = None
    """Context of the kubeconfig; None = the current one."""


class ClusterSide(Protocol):
    """Access to the jobs of a cluster by name; implemented by rljob_operator.cli.targets.

    All methods raise ConfigError when the job or the cluster does not exist.
    """

    def job(self, name: str, place: Place) -> dict[str, Any]:
        """Return the job as the API server holds it."""

    def watch(self, name: str, place: Place) -> Callable[[], dict[str, Any]]:
        """Return a function that reads the job again at each call, over one connection."""

    def logs(
        self,
        name: str,
        place: Place,
        *,
        role: str | None,
        index: int | None,
        attempt: int | None,
        follow: bool,
        write: Callable[[str], None],
    ) -> None:
        """Write the logs of the job's pods that match."""

    def scale(self, name: str, place: Place, counts: Mapping[str, int]) -> str:
        """Set the number of pods of elastic groups, by name; return the job's namespace."""

    def files(self, name: str, place: Place) -> Callable[[dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]:
        """Return a function that sends a body to `POST /files` of the job's runner; it returns the status of the runner and its answer.

        The function raises InfrastructureError when the runner does not answer.
        """


def counts_text(counts: Mapping[str, int]) -> str:
    """Return the pods of each group in words, such as "3 rollouts, 2 judge"."""
    plurals = {ROLLOUT: "rollouts", ENV: "envs"}
    return ", ".join(f"{count} {plurals.get(group, group)}" for group, count in counts.items())


def folder_of(target: str) -> Path | None:
    """Return the folder of a local run, None for a job name. Raises ConfigError when it can be neither."""
    folder = Path(target)
    if folder.is_dir():
        return folder
    if "/" in target or target in (".", ".."):
        raise ConfigError(
            f"TARGET must be the output folder of a run or the name of a job, got {target}: there is no such folder"
        )
    return None


def cluster(target: str) -> ClusterSide:
    """Return the access to clusters, for the job `target`. Raises ConfigError when the package is not installed."""
    for point in entry_points(group="rljob.targets", name="cluster"):
        side: ClusterSide = point.load()()
        return side
    raise ConfigError(
        f"TARGET must be an existing folder here, got {target}: the cluster commands are not installed; pip install rljob[cluster]"
    )
