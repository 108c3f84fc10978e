"""A rollout drains, and takes new weights with `onUpdate: wait`, while agent programs are between two of their calls.

Worker, endpoint, engine, publisher and RPC are real; the programs run in the stand-in of the env worker and call the endpoint over HTTP.
"""

import asyncio
import threading

import aiohttp
import pytest

from rl_core.messages.agents import REQUEST, RESULT
from rl_core.messages.envs import EnvAnswer
from rl_core.transports.handlers import HandlerLoop
from tests.integration.rollout_world import EnvPod, World, records, wait_for

AGENTS = {
    "env": {"type": "agent", "agent": "program:run"},
    "data": {"train": "unused", "chatTemplate": "{% for m in messages %}{{ m.content }}{% endfor %}"},
    "weights": {"onUpdate": "wait"},
}
SAMPLES = 4


class Programs(EnvPod):
    """Runs a program per row: two calls, and between them a pause until `go_on`."""

    def __init__(self):
        super().__init__()
        self.between, self.go_on = [], threading.Event()

    async def step_rows(self, rows):
        return list(await asyncio.gather(*map(self.run, rows)))

    async def run(self, row):
        request = row.metadata[REQUEST]
        headers = {"Authorization": f"Bearer {request['api_key']}.first"}
        ids = [4, 5, 6]
        async with aiohttp.ClientSession(request["base_url"].removesuffix("/v1"), headers=headers) as session:
            for number in range(2):
                body = {"model": request["model"], "prompt": ids, "max_tokens": 2}
                async with session.post("/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                ids = [*ids, 7, 8]
                if number == 0:
                    self.between.append(request["api_key"])
                    while not self.go_on.is_set():
                        await asyncio.sleep(0.005)
        result = {"run": "first", "error": "", "late": False, "parts": {}, "unavailable": False, "generated": []}
        return EnvAnswer(
            observation={"role": "environment", "content": ""},
            metadata={RESULT: result},
            stop_strings=None,
            reward=1.0,
            terminated=True,
            answer=None,
        )


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr("tests.integration.rollout_world.EnvPod", Programs)
    made = World(spec=AGENTS)
    yield made
    made.env.go_on.set()
    made.close()


def between_two_calls(world):
    """Start a group, and return when all its programs have made their first call."""
    world.start()
    world.publish(1, seed=1)
    world.put(0)
    wait_for(lambda: len(world.env.between) == SAMPLES)


def in_background(coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, HandlerLoop.shared().loop)


def test_programs_make_their_further_calls_while_the_rollout_drains_and_their_group_is_finished(world):
    between_two_calls(world)
    drained = in_background(world.worker.drain())
    wait_for(lambda: not world.worker._built().loop._gate.is_set())
    assert not drained.done()
    world.put(1)
    world.env.go_on.set()
    (record,) = records(world, 1)
    drained.result(60)
    assert record.group_id == "train-0" and [one.reward for one in record.completions] == [1.0] * len(
        record.completions
    )
    assert all(one.policy_versions == (1, 1) for one in record.completions)
    assert all(token != "token-0" for token, *_ in world.ledger.given_back), "the group of before is not given back"
    assert len(world.env.between) == SAMPLES, "no program of the group that came later was started"


def test_a_drain_during_an_update_that_waits_lets_both_end_with_the_programs(world):
    between_two_calls(world)
    updated = threading.Thread(target=world.publish, args=(2, 2))
    updated.start()
    wait_for(lambda: not world.worker._built().loop._gate.is_set())
    drained = in_background(world.worker.drain())
    world.env.go_on.set()
    (record,) = records(world, 1)
    drained.result(60)
    updated.join(60)
    assert not updated.is_alive()
    assert all(one.policy_versions == (1, 1) for one in record.completions), "generation waited with the new weights"
    assert world.ledger.given_back == [] and world.worker.status()["groups_in_flight"] == 0
