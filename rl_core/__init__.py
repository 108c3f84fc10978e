"""rljob's runtime: what runs inside the actor, rollout and env processes of a job, on a cluster and on one machine.

What is named here is the face for scripts and programs of users. It is imported at its first use, because every process imports
this package.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.api.errors import RemoteError, WorkerLost
    from rl_core.api.job import RLJob
    from rl_core.channel import Channel
    from rl_core.cli.local_run import LocalRun, RunFailed, start_run
    from rl_core.launch.cluster import Cluster
    from rl_core.workers.result import WorkerErrors
    from rl_core.workers.worker import Worker

__all__ = [
    "Channel",
    "Cluster",
    "LocalRun",
    "RLJob",
    "RemoteError",
    "RunFailed",
    "Worker",
    "WorkerErrors",
    "WorkerLost",
    "start_run",
]

_HOMES = {
    "Channel": "rl_core.channel",
    "Cluster": "rl_core.launch.cluster",
    "LocalRun": "rl_core.cli.local_run",
    "RLJob": "rl_core.api.job",
    "RemoteError": "rl_core.api.errors",
    "RunFailed": "rl_core.cli.local_run",
    "Worker": "rl_core.workers.worker",
    "WorkerErrors": "rl_core.workers.result",
    "WorkerLost": "rl_core.api.errors",
    "start_run": "rl_core.cli.local_run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
