"""Streamed chat calls, read by the unmodified `openai` client: true increments, the same message and record as an unstreamed call, disconnects."""

import asyncio

import openai
import pytest

from rl_core.rollouts.endpoint.pieces import TextStream, overlap
from tests.unit.endpoint.conftest import SampledText
from tests.unit.endpoint.test_endpoint import HELLO, serving
from tests.unit.endpoint.test_sessions import TEXTS, TOOLS


async def read(stream):
    """Return (contents, tool calls, finish reasons, ids) by choice, put together as a client does."""
    contents, calls, reasons, ids = {}, {}, {}, {}
    async for chunk in stream:
        for choice in chunk.choices:
            contents.setdefault(choice.index, []).append(choice.delta.content or "")
            ids.setdefault(choice.index, []).extend((choice.model_extra or {}).get("token_ids") or [])
            calls.setdefault(choice.index, []).extend(choice.delta.tool_calls or [])
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    return contents, calls, reasons, ids


@pytest.mark.parametrize("text", TEXTS)
async def test_a_stream_gives_the_message_that_is_recorded(chatml, text):
    async with serving(chatml, [text]) as world:
        client = world.client()
        request = {"model": "policy", "messages": HELLO, "tools": TOOLS}
        stream = await client.chat.completions.create(**request, stream=True, extra_body={"return_token_ids": True})
        contents, calls, reasons, ids = await read(stream)
        whole = (await client.chat.completions.create(**request)).choices[0]
        assert ("".join(contents[0]), reasons[0]) == (whole.message.content or "", whole.finish_reason)
        assert [(call.function.name, call.function.arguments) for call in calls[0]] == [
            (call.function.name, call.function.arguments) for call in whole.message.tool_calls or []
        ]
        assert ids[0] == world.episode.session.turns[0].output.ids
        reply = {"role": "assistant", "content": "".join(contents[0])}
        if calls[0]:
            reply["tool_calls"] = [call.model_dump(exclude={"index"}) for call in calls[0]]
        following = [*HELLO, reply, {"role": "user", "content": "and"}]
        await client.chat.completions.create(model="policy", messages=following, tools=TOOLS)
        assert world.episode.session.turns[-1].parent is world.episode.session.turns[0]


async def test_text_arrives_while_the_row_runs(chatml):
    async with serving(chatml, ["unused"]) as world:
        go = asyncio.Event()
        whole = world.policy.generate_row

        async def in_two_parts(prompt, *, on_tokens, **request):
            on_tokens(chatml("some", add_special_tokens=False)["input_ids"])
            await go.wait()
            return await whole(prompt, **request)

        world.policy.texts = ["something"]
        world.policy.generate_row = in_two_parts
        stream = await world.client().chat.completions.create(
            model="policy", messages=HELLO, stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        chunks = aiter(stream)
        assert (await anext(chunks)).choices[0].delta.content == "some"
        go.set()
        rest = [chunk async for chunk in chunks]
        assert [chunk.choices[0].delta.content for chunk in rest if chunk.choices] == ["thing", None]
        assert len(rest[-2].choices[0].logprobs.content) == len("something") + 1
        assert rest[-1].usage.completion_tokens == len("something") + 1


async def test_stop_strings_are_left_out_of_several_choices(chatml):
    async with serving(chatml, lambda prompt, seed: f"{seed % 1000}STSTOP") as world:
        stream = await world.client().chat.completions.create(
            model="policy", messages=HELLO, n=3, stop=["STOP"], stream=True
        )
        contents, _, reasons, _ = await read(stream)
        texts = {"".join(parts) for parts in contents.values()}
        assert len(texts) == 3 and all(text.endswith("ST") and "STOP" not in text for text in texts)
        assert set(reasons.values()) == {"stop"}


async def test_a_stream_that_its_client_leaves_leaves_the_engine_and_records_nothing(chatml):
    async with serving(chatml, ["yes"]) as world:
        ended = asyncio.Event()

        async def hang(prompt, *, on_tokens, **_):
            on_tokens(chatml("some", add_special_tokens=False)["input_ids"])
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        world.policy.generate_row = hang
        stream = await world.client().chat.completions.create(model="policy", messages=HELLO, stream=True)
        assert (await anext(aiter(stream))).choices[0].delta.content == "some"
        await stream.close()
        await ended.wait()
        assert (world.episode.session.turns, world.episode.session.branches) == ([], 0)


async def test_failures_are_a_status_before_the_first_token_and_an_error_event_after_it(chatml):
    async with serving(chatml, ["yes"]) as world:
        with pytest.raises(openai.BadRequestError, match="context length"):
            messages = [{"role": "user", "content": "x" * 3000}]
            await world.client().chat.completions.create(model="policy", messages=messages, stream=True)

        async def fail(prompt, *, on_tokens, **_):
            on_tokens(chatml("some", add_special_tokens=False)["input_ids"])
            await asyncio.sleep(0)
            raise RuntimeError("the engine is gone")

        world.policy.generate_row = fail
        stream = await world.client().chat.completions.create(model="policy", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="the engine is gone"):
            await read(stream)


def test_what_could_begin_a_stop_string_or_a_tool_call_is_held_back(chatml):
    def texts(text, stops, *, tools):
        stream = TextStream(chatml, stops, tools=tools)
        return [stream.push(chatml(letter, add_special_tokens=False)["input_ids"])[0] for letter in text]

    assert texts("aSSTb", ["STOP"], tools=False) == ["a", "", "S", "", "STb"]
    assert texts("a<tob", [], tools=True) == ["a", "", "", "", "<tob"]
    assert texts(' {"na', [], tools=True) == [""] * 5
    assert overlap("a<tool", "<tool_call>") == 5 and overlap("aaa", "aaa") == 2


@pytest.mark.parametrize("seed", range(50))
def test_pieces_are_the_whole_text_whatever_the_increments(chatml, seed):
    policy = SampledText(chatml, TEXTS, seed=seed)
    text = policy.random.choice(TEXTS)
    ids = chatml(text, add_special_tokens=False)["input_ids"]
    stream, at, got = TextStream(chatml, [], tools=False), 0, []
    while at < len(ids):
        size = policy.random.randint(1, 4)
        got.append(stream.push(ids[at : at + size])[0])
        at += size
    assert "".join([*got, stream.rest(text, ids)[0]]) == text
