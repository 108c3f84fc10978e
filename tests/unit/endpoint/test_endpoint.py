"""The endpoint over HTTP, called by the unmodified `openai` client: answers, refusals, runs of one sample, calls after its end."""

import asyncio
import contextlib
import io

import openai
import pytest
from aiohttp import ClientSession

from rl_core.rollouts.endpoint.server import BODY_BYTES, Endpoint
from tests.unit.endpoint.conftest import SampledText, make_episodes

HELLO = [{"role": "user", "content": "hi"}]


class World:
    """An endpoint and one session."""

    def __init__(self, tokenizer, texts, **limits):
        self.policy = SampledText(tokenizer, texts)
        self.episodes = make_episodes(tokenizer, **limits)
        self.endpoint = Endpoint(self.episodes, tokenizer, model="policy", max_new_tokens=200)
        self.episode = self.episodes.open("0-1_g0", self.policy, seed=5, greedy=False)
        self.clients = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.endpoint.port}"

    def client(self, key=None):
        self.clients.append(
            openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key or f"{self.episode.key}.run1", max_retries=0)
        )
        return self.clients[-1]


@contextlib.asynccontextmanager
async def serving(tokenizer, texts, **limits):
    world = World(tokenizer, texts, **limits)
    await world.endpoint.start("127.0.0.1")
    try:
        yield world
    finally:
        for client in world.clients:
            await client.close()
        await world.endpoint.close()


async def test_a_conversation_is_answered_and_recorded_as_one_line(chatml):
    async with serving(chatml, ["yes"]) as world:
        client = world.client()
        first = await client.chat.completions.create(
            model="policy", messages=HELLO, logprobs=True, extra_body={"return_token_ids": True}
        )
        reply = first.choices[0].message
        await client.chat.completions.create(
            model="policy", messages=[*HELLO, reply, {"role": "user", "content": "and"}]
        )
        assert (reply.content, first.choices[0].finish_reason) == ("yes", "stop")
        [line] = world.episode.session.lines()
        assert first.model_extra["prompt_token_ids"] == line[0].prompt
        assert first.choices[0].model_extra["token_ids"] == line[0].output.ids
        assert [entry.logprob for entry in first.choices[0].logprobs.content] == line[0].output.logprobs
        assert [call[0] for call in world.policy.calls] == [line[0].prompt, line[0].ids + line[1].prompt]
        assert [model.id async for model in client.models.list()] == ["policy"]


async def test_tool_calls_have_the_form_of_the_api_and_their_results_continue_the_line(chatml):
    call = 'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    async with serving(chatml, [call]) as world:
        client = world.client()
        answer = await client.chat.completions.create(model="policy", messages=HELLO, tools=tools)
        reply = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert (reply.tool_calls[0].function.name, reply.tool_calls[0].function.arguments) == ("add", '{"a": 1}')
        result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "1"}
        await client.chat.completions.create(model="policy", messages=[*HELLO, reply, result], tools=tools)
        assert [len(line) for line in world.episode.session.lines()] == [2]


async def test_several_choices_and_stop_strings(chatml):
    async with serving(chatml, lambda prompt, seed: f"{seed % 1000}STOP more") as world:
        answer = await world.client().chat.completions.create(model="policy", messages=HELLO, n=3, stop="STOP")
        texts = [choice.message.content for choice in answer.choices]
        assert texts[0] == "5"
        assert len(set(texts)) == 3  # each choice has a seed of its own
        assert world.episode.session.branches == 2


@pytest.mark.parametrize("key", ["rl-unknown.run", "none"])
async def test_another_key_is_refused_and_counted(chatml, key):
    async with serving(chatml, ["yes"]) as world:
        with pytest.raises(openai.AuthenticationError):
            await world.client(key).chat.completions.create(model="policy", messages=HELLO)
        assert world.episodes.refused == 1
        assert not world.policy.calls


async def test_calls_after_the_end_are_refused_and_those_in_progress_are_dropped(chatml):
    async with serving(chatml, ["yes"]) as world:
        started, ended = asyncio.Event(), asyncio.Event()

        async def hang(*_, **__):
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        world.policy.generate_row = hang
        call = asyncio.ensure_future(world.client().chat.completions.create(model="policy", messages=HELLO))
        await started.wait()
        world.episodes.close(world.episode)
        with pytest.raises(openai.OpenAIError):
            await call
        await ended.wait()
        with pytest.raises(openai.AuthenticationError, match="ended"):
            await world.client().chat.completions.create(model="policy", messages=HELLO)
        assert not world.episode.session.turns


async def test_a_row_leaves_the_engine_when_its_client_goes_away(chatml):
    async with serving(chatml, ["yes"]) as world:
        started, ended = asyncio.Event(), asyncio.Event()

        async def hang(*_, **__):
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        world.policy.generate_row = hang
        call = asyncio.ensure_future(world.client().chat.completions.create(model="policy", messages=HELLO))
        await started.wait()
        call.cancel()
        await asyncio.wait({call})
        await ended.wait()
        assert (world.episode.session.turns, world.episode.session.branches) == ([], 0)


async def test_a_new_run_of_the_sample_begins_with_an_empty_session(chatml):
    async with serving(chatml, ["yes"]) as world:
        old, new = world.client(f"{world.episode.key}.a"), world.client(f"{world.episode.key}.b")
        await old.chat.completions.create(model="policy", messages=HELLO)
        await new.chat.completions.create(model="policy", messages=HELLO)
        assert (world.episode.run, len(world.episode.session.turns)) == ("b", 1)
        with pytest.raises(openai.AuthenticationError):
            await old.chat.completions.create(model="policy", messages=HELLO)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 5, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "context length"),
    ],
)
async def test_what_cannot_be_answered_is_a_bad_request_with_the_reason(chatml, changes, words):
    async with serving(chatml, ["yes"]) as world:
        with pytest.raises(openai.BadRequestError, match=words):
            await world.client().chat.completions.create(**{"model": "policy", "messages": HELLO, **changes})
        assert not world.policy.calls


async def test_too_many_calls_and_too_long_bodies_are_refused(chatml):
    async with serving(chatml, ["yes"], max_calls=2) as world, ClientSession() as http:
        client = world.client()
        for _ in range(2):
            await client.chat.completions.create(model="policy", messages=HELLO)
        with pytest.raises(openai.RateLimitError, match="maxCalls"):
            await client.chat.completions.create(model="policy", messages=HELLO)
        headers = {"Authorization": f"Bearer {world.episode.key}.run1"}
        async with http.post(
            f"{world.url}/v1/chat/completions", data=io.BytesIO(b"x" * (BODY_BYTES + 1)), headers=headers
        ) as answer:
            assert answer.status == 413
        async with http.post(f"{world.url}/v1/chat/completions", data=b"{", headers=headers) as answer:
            assert answer.status == 400
        async with http.post(f"{world.url}/tokenize", json={"messages": HELLO}) as answer:
            assert (await answer.json())["tokens"] == world.policy.calls[0][0]
