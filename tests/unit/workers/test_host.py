"""A worker process says hello until it is heard, and tells a repeated hello from a new one."""

import asyncio
from dataclasses import replace

import pytest

from rl_core.api.errors import DeadlineExceeded
from rl_core.workers.context import stand_alone_identity
from rl_core.workers.host import Ended, Host


class Hub:
    """Stands in for the client of the hub: the first `late` answers do not come in time."""

    def __init__(self, late, job=None):
        self.late, self.heard, self.job = late, [], job

    async def call(self, method, report, *, timeout, idempotent):
        self.heard.append(report["registration"])
        if len(self.heard) <= self.late:
            raise DeadlineExceeded("hello")
        view = {"version": 0, "members": []}
        return {"accepted": True, "epoch": 0, "heartbeat_seconds": 2.0, "job": self.job, "files": {}, "view": view}

    def close(self):
        """Nothing to close."""


def host_at(hub):
    host = Host(replace(stand_alone_identity(), role="rollout", hub="tcp://127.0.0.1:1"))
    host._connect = lambda: hub
    return host


@pytest.mark.parametrize("late", [0, 2])
def test_a_late_answer_repeats_the_hello_and_a_new_start_is_another_one(late):
    hub = Hub(late)
    host = host_at(hub)

    async def twice():
        await host._register()
        await host._register()

    asyncio.run(twice())
    assert hub.heard == [1] * (late + 1) + [2]


def test_a_job_of_another_release_ends_the_process_for_good():
    async def once():
        await host_at(Hub(0, job={"kind": "RLJob", "spec": {"unknown": 1}}))._register()

    with pytest.raises(Ended, match="use images of the same release") as end:
        asyncio.run(once())
    assert end.value.code == 2
