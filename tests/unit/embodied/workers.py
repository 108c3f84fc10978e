"""Makes workers in this process, which `conftest` closes at the end of the test."""

import asyncio
from dataclasses import replace

from rl_core.workers.context import WorkerContext, stand_alone_identity

_open = []


def workers(kind, group, count, spec):
    """Return the `count` workers of a group."""
    made = []
    for rank in range(count):
        identity = replace(stand_alone_identity(), group=group, rank=rank, world_size=count)
        made.append(kind.create_in_context(WorkerContext(identity), spec))
        _open.append(made[-1])
    return made


def close_workers():
    """Close all workers that `workers` has made."""
    while _open:
        closing = _open.pop().close()
        if asyncio.iscoroutine(closing):
            asyncio.run(closing)
