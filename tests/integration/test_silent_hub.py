"""A hub that says nothing for a while and goes on: it is looked for anew meanwhile, and what it was asked before is answered."""

import asyncio
import threading

import pytest

from rl_core.api.errors import InfrastructureError
from rl_core.messages.members import HeartbeatAnswer, HelloAccepted, View
from rl_core.transports.rpc import RpcClient, RpcServer
from rl_core.workers import registration
from rl_core.workers.context import WorkerContext
from rl_core.workers.registration import Registration
from tests.integration.rpc_samples import identity

VIEW = View(version=0, members=[])


class Hub:
    """Answers nothing while `goes_on` is not set, as a stopped process does."""

    def __init__(self):
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.beats = 0

    def hello(self, report):
        return HelloAccepted(heartbeat_seconds=0.01, view=VIEW, job=None, files={})

    async def heartbeat(self, member, beat):
        await asyncio.to_thread(self.goes_on.wait)
        self.beats += 1
        return HeartbeatAnswer(known=True, view=VIEW)

    async def admit(self, entries):
        await asyncio.to_thread(self.goes_on.wait)
        return [True for _ in entries]


@pytest.fixture
def hub():
    made = Hub()
    yield made
    made.goes_on.set()


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_call_under_way_is_answered_by_a_hub_that_goes_on_after_others_looked_for_its_successor(
    hub, monkeypatch
):
    monkeypatch.setattr(registration, "RECONNECT", 0.5)
    server = RpcServer("tcp://127.0.0.1:0", hub, None, identity("runner")).start()
    clients = []

    async def connect():
        clients.append(RpcClient(server.address, None, identity("actor"), service="hub"))
        return clients[-1]

    async def start_over(epoch):
        raise AssertionError("the hub is of our epoch")

    context = WorkerContext(identity("actor"))
    process = Registration(context, connect=connect, start_over=start_over)
    await process.register()
    assert len(clients) == 1
    keeping = asyncio.create_task(process.keep_in_touch())
    await until(lambda: hub.beats)
    hub.goes_on.clear()
    asked = asyncio.create_task(context.hub_client().call("admit", [1, 2], timeout=60))
    await until(lambda: len(clients) >= 3)
    assert not asked.done()
    hub.goes_on.set()
    assert await asked == [True, True]
    beats = hub.beats
    await until(lambda: hub.beats > beats + 2)
    with pytest.raises(InfrastructureError, match="the client was closed"):
        await clients[0].call("admit", [], timeout=60)  # nobody needs it any more
    assert not keeping.done()
    keeping.cancel()
    context.hub_client().close()
    server.close()
