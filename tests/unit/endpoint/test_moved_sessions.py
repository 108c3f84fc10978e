"""A run whose rollout is lost, drained or slow goes on at another one, with the tokens that the policy has sampled; or is made anew."""

import asyncio
import contextlib
import io
import json
import resource
import sys
import types

import aiohttp
import anthropic
import openai
import pytest
import yarl

from rl_core.envs.agent import AgentEnvironment
from rl_core.envs.model_relay import BODY_BYTES
from rl_core.envs.sessions import SessionRouter
from rl_core.messages.envs import EnvAnswer
from rl_core.rollouts.agents import AgentRolloutImpl
from rl_core.rollouts.endpoint.server import Endpoint
from rl_core.rollouts.environment import RemoteEnvironment
from tests.unit.endpoint.conftest import SampledText, make_episodes, sample

TURNS = 5
WORLD = None


async def chat(base_url, key, messages):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        return (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message.content


async def streamed(base_url, key, messages):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        chunks = await client.chat.completions.create(model="policy", messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


async def responses(base_url, key, messages):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        return (await client.responses.create(model="policy", input=messages)).output_text


async def of_anthropic(base_url, key, messages):
    client = anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=key, max_retries=0)
    async with client, client.messages.stream(model="policy", messages=messages, max_tokens=64) as events:
        return await events.get_final_text()


async def talk(row, base_url, api_key, model, dialect="chat"):
    """Five turns. Before the fourth one the world may lose the rollout."""
    WORLD.starts += 1
    start = WORLD.starts
    messages = [{"role": "user", "content": row["prompt"]}]
    for turn in range(TURNS):
        if turn == 3 and start == 1:
            WORLD.three_turns.set()
            await WORLD.go.wait()
        text = await globals()[dialect](base_url, api_key, messages)
        WORLD.seen.append(text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"go on {turn}"}]
    return 1.0


class Programs:
    """Runs the programs in this process; stands for the pool of an env worker."""

    def __init__(self, **options):
        self.environment = AgentEnvironment({"agent": "moved_programs:talk", **options})

    async def step_rows(self, rows):
        returned = await self.environment.step([row.messages for row in rows], [row.metadata for row in rows])
        return [
            EnvAnswer(observation={"role": "environment", "content": ""}, metadata=metadata, stop_strings=None, reward=reward, terminated=True, answer=None)
            for metadata, reward in zip(returned.metadata, returned.rewards, strict=True)
        ]  # fmt: skip


class Worker:
    """The env worker as rollouts call it."""

    def __init__(self, router):
        self.router = router

    async def call(self, method, argument, timeout):
        return self.router.held(argument) if method == "held_sessions" else await self.router.step_rows(argument)

    def close(self):
        pass


class Rollout:
    """A rollout with an endpoint, whose policy says which rollout it is."""

    def __init__(self, name, tokenizer, router, **options):
        self.episodes = make_episodes(tokenizer)
        self.endpoint = Endpoint(self.episodes, tokenizer, model="policy", max_new_tokens=64)
        self.policy = SampledText(tokenizer, lambda prompt, seed: f"{name} after {len(prompt)}")
        # The env worker has no name here: of two, the one that holds the session must be asked.
        environment = RemoteEnvironment(
            ["empty", "holder"], connect=lambda address: Worker(router if address == "holder" else WORLD.empty)
        )
        self.groups = AgentRolloutImpl(
            tokenizer, {"agent": environment}, 1, 2048, self.policy, seed=1, env_step_seconds=20.0,
            episodes=self.episodes, base_url=lambda: f"http://127.0.0.1:{self.endpoint.port}/v1", model="policy", **options,
        )  # fmt: skip


class World:
    """Two rollouts, an env worker that runs the program and one that runs none."""

    def __init__(self):
        self.starts, self.seen = 0, []
        self.three_turns, self.go = asyncio.Event(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self, tokenizer, *, hold_seconds=20.0, dialect="chat", **options):
        self.router = SessionRouter(Programs(arguments={"dialect": dialect}), hold_seconds=hold_seconds)
        self.empty = SessionRouter(Programs())
        self.first, self.second = (Rollout(name, tokenizer, self.router, **options) for name in ("one", "two"))
        self.second.policy.policy_version = 2  # the tokens of the first one are not older
        for part in (self.router, self.empty):
            await part.start()
        for rollout in (self.first, self.second):
            await rollout.endpoint.start("127.0.0.1")
        self.first.groups.task_to_env["agent"]._homes["0-7_g0"] = "holder"
        self.group = asyncio.create_task(self.first.groups.run_rollout(sample(tokenizer)))
        await self.three_turns.wait()
        yield self
        self.group.cancel()
        for rollout in (self.first, self.second):
            await rollout.endpoint.close()
        await self.router.close()
        await self.empty.close()

    async def lose(self, how):
        """Lose the first rollout: killed, its sockets are closed; drained, it gives its groups back and serves on."""
        if how == "killed":
            await self.first.endpoint.close()
        self.group.cancel()
        await asyncio.wait([self.group])

    async def resumed(self, tokenizer, **fields):
        [completion] = (
            await self.second.groups.run_rollout(sample(tokenizer) | {"resumed": True} | fields)
        ).completions
        return completion


@pytest.fixture(autouse=True)
def world(monkeypatch):
    module = types.ModuleType("moved_programs")
    module.talk = talk
    monkeypatch.setitem(sys.modules, "moved_programs", module)
    monkeypatch.setitem(globals(), "WORLD", World())
    return WORLD


def turns(completion):
    """Return ids, log-probabilities and versions of the sampled turns."""
    said = [message for message in completion.message_log if message["role"] == "assistant"]
    return [
        (m["token_ids"].tolist(), [round(p, 5) for p in m["generation_logprobs"].tolist()], m["policy_versions"])
        for m in said
    ]


def calls(*rollouts):
    return [
        (ids, [round(p, 5) for p in logprobs], versions)
        for rollout in rollouts
        for _, ids, logprobs, versions in rollout.policy.calls
    ]


@pytest.mark.parametrize("dialect", ["chat", "streamed", "responses", "of_anthropic"])
@pytest.mark.parametrize("how", ["killed", "drained"])
async def test_a_run_goes_on_at_another_rollout_with_the_tokens_that_were_sampled(chatml, world, how, dialect):
    async with world.running(chatml, dialect=dialect):
        await world.lose(how)
        world.go.set()  # its next call waits until the sample is leased again
        completion = await world.resumed(chatml)
        assert world.starts == 1 and len(world.first.policy.calls) == 3 and len(world.second.policy.calls) == 2
        assert turns(completion) == calls(world.first, world.second)
        assert [text.split()[0] for text in world.seen] == ["one"] * 3 + ["two"] * 2
        assert completion.reward == 1.0 and completion.metrics["turns"] == TURNS
        assert world.router.counters["sessions_moved"] == 1
        read = [t for m in completion.message_log for t in m["token_ids"].tolist()]
        last, ids, *_ = world.second.policy.calls[-1]
        assert read == last + ids


async def test_a_call_that_is_on_its_way_when_the_rollout_dies_is_answered_by_the_next(chatml, world):
    async with world.running(chatml):
        started = asyncio.Event()

        async def hang(*_, **__):
            started.set()
            await asyncio.Event().wait()

        world.first.policy.generate_row = hang
        world.go.set()
        await started.wait()
        await world.lose("killed")
        completion = await world.resumed(chatml)
        assert world.starts == 1 and turns(completion) == calls(world.first, world.second)


async def test_an_ended_run_is_not_made_again_for_a_group_that_is(chatml, world):
    async with world.running(chatml):
        world.go.set()
        await world.group
        completion = await world.resumed(chatml)
        assert world.starts == 1 and not world.second.policy.calls and turns(completion) == calls(world.first)


@pytest.mark.parametrize("why", ["another attempt", "not resumed", "too old", "new epoch"])
async def test_a_run_that_must_not_be_continued_is_made_anew(chatml, world, why):
    async with world.running(chatml):
        await world.lose("drained")
        if why == "too old":
            world.second.policy.policy_version = 100
        if why == "new epoch":
            world.router.end_all()
        world.go.set()
        fields = {"another attempt": {"attempt": 2}, "not resumed": {"resumed": False}}.get(why, {})
        if why == "not resumed":
            world.second.groups.task_to_env["agent"]._homes["0-7_g0"] = "holder"
        completion = await world.resumed(chatml, **fields)
        assert world.starts == 2 and turns(completion) == calls(world.second) and len(turns(completion)) == TURNS


async def test_tokens_within_the_staleness_are_continued(chatml, world):
    async with world.running(chatml, max_staleness=100):
        await world.lose("drained")
        world.second.policy.policy_version = 100
        world.go.set()
        assert turns(await world.resumed(chatml)) == calls(world.first, world.second)


async def test_a_run_that_nobody_leases_fails_in_time(chatml, world):
    async with world.running(chatml, hold_seconds=0.05):
        await world.lose("killed")
        world.go.set()
        while world.router.held(["0-7_g0"]):
            await asyncio.sleep(0.01)
        assert len(world.seen) == 3


async def test_a_stream_that_breaks_off_ends_with_an_error_and_the_next_call_goes_on(chatml, world):
    async with world.running(chatml):
        [key] = world.router._by_key
        run = world.router._by_key[key].run
        begun, reported = asyncio.Event(), world.first.policy

        async def half(*_, on_tokens, **__):
            on_tokens(reported.tokenizer("half", add_special_tokens=False)["input_ids"])
            begun.set()
            await asyncio.Event().wait()

        world.first.policy.generate_row = half
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        headers = {"Authorization": f"Bearer {key}.{run}"}
        url = f"{world.router._base_url}/chat/completions"
        async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as answer:
            first = await answer.content.readline()
            await world.lose("killed")
            rest = await answer.text()
        assert b"half" in first and json.loads(rest.split("data: ")[-1])["error"]["type"] == "server_error"
        world.go.set()
        completion = await world.resumed(chatml)
        assert turns(completion) == calls(world.first, world.second)


async def test_other_keys_old_runs_and_long_bodies_are_refused(chatml, world):
    async with world.running(chatml), aiohttp.ClientSession() as http:
        [key] = world.router._by_key
        run = world.router._by_key[key].run

        async def status(token, data=b'{"messages": [{"role": "user", "content": "hi"}]}'):
            headers = {"Authorization": f"Bearer {token}"}
            async with http.post(f"{world.router._base_url}/chat/completions", data=data, headers=headers) as answer:
                assert "message" in (await answer.json())["error"]
                return answer.status

        assert await status("rl-unknown.run") == 401
        assert await status(f"{key}.{run}", io.BytesIO(b"x" * (BODY_BYTES + 1))) == 413
        assert await status(f"{key}.{run}", b"{") == 400
        world.go.set()
        await world.group
        assert await status(f"{key}.{run}") == 401
        assert world.router.counters["calls_refused"] == 2


async def test_a_client_that_goes_away_ends_its_row_and_a_thousand_idle_connections_do_no_harm(chatml, world):
    async with world.running(chatml), aiohttp.ClientSession() as http:
        url = yarl.URL(world.router._base_url)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        idle = [await asyncio.open_connection(url.host, url.port) for _ in range(1000)]
        [key] = world.router._by_key
        started, ended, generate = asyncio.Event(), asyncio.Event(), world.first.policy.generate_row

        async def hang(*_, **__):
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        world.first.policy.generate_row = hang
        headers = {"Authorization": f"Bearer {key}.{world.router._by_key[key].run}"}
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        call = asyncio.create_task(http.post(url / "chat/completions", json=body, headers=headers))
        await started.wait()
        call.cancel()
        await ended.wait()
        world.first.policy.generate_row = generate
        world.go.set()
        [completion] = (await world.group).completions
        assert turns(completion) == calls(world.first) and len(turns(completion)) == TURNS
        for _, writer in idle:
            writer.close()
