"""Environment classes that cannot be run are refused; episodes at the same time have instances of their own, and a failed one's is dropped.

That episodes are those of TRL is shown in tests/integration/test_trl_environment.py.
"""

import asyncio
import json
import sys
import types

import pytest
from aiohttp import web

from rl_core.api.errors import ConfigError
from rl_core.envs.environment_factory import EnvironmentFactory, first_messages
from rl_core.messages.agents import REQUEST, RESULT


class Counter:
    """Counts its own tool calls."""

    built = []

    def __init__(self):
        Counter.built.append(self)

    def reset(self, fails=False, **columns):
        if fails:
            raise RuntimeError("no world")
        self.calls = 0
        return columns.get("says")

    async def count(self, by: int) -> int:
        """
        Count.

        Args:
            by: How far.
        """
        self.calls += by
        await asyncio.sleep(0)
        return self.calls

    async def get_reward(self):
        return float(self.calls)


class Untyped(Counter):
    def other(self, what):
        """
        Do something.

        Args:
            what: Something.
        """


class Rewardless:
    def reset(self): ...


@pytest.fixture(autouse=True)
def module(monkeypatch):
    monkeypatch.setattr(Counter, "built", [])
    named = {"one": Counter, "two": Counter}
    module = types.SimpleNamespace(
        Counter=Counter, Untyped=Untyped, Rewardless=Rewardless, named=named, broken=lambda: 1 / 0
    )
    monkeypatch.setitem(sys.modules, "worlds", module)


@pytest.fixture
async def endpoint():
    """A model that calls `count` twice and then ends, or is full if the prompt says so; keeps the bodies of requests."""
    bodies = []

    async def chat(request):
        body = await request.json()
        bodies.append(body)
        said, rounds = body["messages"][0]["content"], sum(message["role"] == "tool" for message in body["messages"])
        if said == "full" and rounds:
            return web.json_response({"error": {"message": "full", "code": "context_length_exceeded"}}, status=400)
        if said == "down":
            return web.json_response({"error": {"message": "no engine", "code": "unavailable"}}, status=503)
        function = {"name": "count", "arguments": json.dumps({"by": 1})}
        calls = [{"id": "c", "type": "function", "function": function}]
        message = (
            {"role": "assistant", "content": None, "tool_calls": calls}
            if rounds < 2
            else {"role": "assistant", "content": "done"}
        )
        return web.json_response({"choices": [{"message": message}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", bodies
    await runner.cleanup()


async def run(environment, address, *rows):
    request = {"base_url": address, "api_key": "k", "model": "policy", "seconds": 60.0}
    returned = await environment.step([[] for _ in rows], [{**row, REQUEST: request} for row in rows])
    return returned.rewards, [metadata[RESULT]["error"] for metadata in returned.metadata]


async def test_episodes_at_the_same_time_have_instances_of_their_own(endpoint):
    address, bodies = endpoint
    environment = EnvironmentFactory({"factory": "worlds:Counter"})
    rows = [{"prompt": "go"}] * 4
    assert await run(environment, address, *rows) == ([2.0] * 4, [""] * 4)
    built = len(Counter.built)
    assert await run(environment, address, *rows[:1]) == ([2.0], [""])
    assert len(Counter.built) == built <= 4, "instances are used again"
    assert bodies[0]["tools"][0]["function"]["parameters"]["properties"] == {
        "by": {"type": "integer", "description": "How far."}
    }


async def test_an_episode_that_fails_has_no_reward_and_fails_no_other(endpoint):
    environment = EnvironmentFactory({"factory": "worlds:Counter"})
    rewards, errors = await run(
        environment, endpoint[0], {"prompt": "go", "fails": True}, {"prompt": "down"}, {"prompt": "go"}
    )
    assert rewards == [None, None, 2.0]
    assert "no world" in errors[0] and "status 503: no engine" in errors[1] and not errors[2]


async def test_a_full_sequence_and_the_limit_of_rounds_end_an_episode_with_its_reward(endpoint):
    environment = EnvironmentFactory({"factory": "worlds:Counter"})
    assert await run(environment, endpoint[0], {"prompt": "full"}) == ([1.0], [""])
    limited = EnvironmentFactory({"factory": "worlds:Counter", "maxToolCallingIterations": 0})
    assert await run(limited, endpoint[0], {"prompt": "go"}) == ([0.0], [""])


async def test_a_column_selects_one_of_several_classes(endpoint):
    environment = EnvironmentFactory({"factory": "worlds:named"})
    rewards, errors = await run(environment, endpoint[0], {"prompt": "go", "environment": "two"}, {"prompt": "go"})
    assert rewards == [2.0, None]
    assert "column environment must be one of ['one', 'two'], got None" in errors[1]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Rewardless", "must define get_reward"),
        ("broken", "could not be built: ZeroDivisionError"),
        ("Untyped", "a tool needs types and a docstring"),
        ("Nothing", "has no 'Nothing'"),
    ],
)
def test_a_class_that_cannot_be_run_is_refused(name, problem):
    with pytest.raises(ConfigError, match=problem):
        EnvironmentFactory({"factory": f"worlds:{name}"})


def test_what_reset_returns_is_put_at_the_end_of_the_prompt():
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert first_messages(prompt, "!") == [prompt[0], {"role": "user", "content": "u!"}]
    assert first_messages("u", None) == [prompt[1]]
    parts = [{"type": "text", "text": "u"}]
    assert first_messages([{"role": "user", "content": parts}], "!")[0]["content"] == [
        *parts,
        {"type": "text", "text": "!"},
    ]
    assert prompt[1]["content"] == "u" and len(parts) == 1
