"""rljob's runtime: what runs inside the actor, rollout and env processes of a job, on a cluster and on one machine.

The classes named here are the face for scripts and programs of users. They are imported at their first use, because every process imports
this package.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.channel import Channel
    from rl_core.launch.cluster import Cluster
    from rl_core.workers.worker import Worker

__all__ = ["Channel", "Cluster", "Worker"]

_HOMES = {"Channel": "rl_core.channel", "Cluster": "rl_core.launch.cluster", "Worker": "rl_core.workers.worker"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
