"""What TARGET means: an existing folder is a local run, anything else the name of a job in the current kube context (protocol.md 9).

The cluster's side lives in `rljob_operator.cli` and is found by the entry-point group `rljob.targets`, imported when it is needed.
"""

from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from rl_core.api.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a job is looked for."""

    namespace: str | None = None
    """None = the context's."""
    context: str | None = None
    """Context of the kubeconfig; None = the current one."""


class ClusterViews(Protocol):
    """What a cluster offers for a job name; each returns an exit code. Implemented by rljob_operator.cli.views."""

    def status(self, name: str, place: Place) -> int:
        """Print the job's status as JSON."""

    def top(self, name: str, place: Place, *, once: bool) -> int:
        """Show the job as tables, live until it ends."""

    def logs(
        self, name: str, place: Place, *, role: str | None, index: int | None, attempt: int | None, follow: bool
    ) -> int:
        """Print the logs of the job's pods."""

    def scale(self, name: str, place: Place, *, replicas: int | None, envs: int | None) -> int:
        """Set the number of rollouts or envs."""


def local(target: str, place: Place) -> Path | None:
    """Return the folder of a local run, None for a job name. Raises ConfigError for what can be neither."""
    folder = Path(target)
    if folder.is_dir():
        return folder
    if "/" in target or target in (".", ".."):
        raise ConfigError(
            f"TARGET must be the output folder of a run or the name of a job, got {target}: no such folder"
        )
    return None


def cluster() -> ClusterViews:
    """Return the cluster's side. Raises ConfigError where it is not installed."""
    for point in entry_points(group="rljob.targets", name="cluster"):
        views: ClusterViews = point.load()()
        return views
    raise ConfigError(
        "TARGET must be an existing folder here, as the cluster commands are not installed; pip install rljob[cluster]"
    )
