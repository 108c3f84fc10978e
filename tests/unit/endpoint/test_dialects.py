"""The other APIs of the endpoint, called by unmodified clients: a conversation in each of them is one line with the tokens of the chat API."""

import anthropic
import openai
import pytest
from aiohttp import ClientSession

from tests.unit.endpoint.test_endpoint import HELLO, serving
from tests.unit.endpoint.test_sessions import TOOLS, check_exact

CALL = 'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def reply(prompt, seed):
    """A tool call first, then a text."""
    return CALL if prompt.count(3) < 4 else "two"


async def through_chat(world):
    client = world.client()
    first = await client.chat.completions.create(model="policy", messages=HELLO, tools=TOOLS)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "1"}
    await client.chat.completions.create(model="policy", messages=[*HELLO, message, result], tools=TOOLS)


async def through_messages(world, *, stream):
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    key = f"{world.episode.key}.run1"
    async with anthropic.AsyncAnthropic(base_url=world.url, api_key=key, max_retries=0) as client:

        async def ask(messages):
            request = {"model": "policy", "max_tokens": 100, "messages": messages, "tools": tools}
            if not stream:
                return await client.messages.create(**request)
            async with client.messages.stream(**request) as events:
                return await events.get_final_message()

        first = await ask(HELLO)
        text, use = first.content
        assert (text.text, use.name, use.input, first.stop_reason) == ("so\n", "add", {"a": 1}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "1"}]}
        assistant = {"role": "assistant", "content": [part.model_dump() for part in first.content]}
        last = await ask([*HELLO, assistant, {"role": "user", "content": [result]}])
        assert ([part.text for part in last.content], last.stop_reason) == (["two"], "end_turn")
        assert last.usage.output_tokens == len("two") + 1


async def through_responses(world, *, stream):
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
    client = world.client()

    async def ask(given):
        request = {"model": "policy", "input": given, "tools": tools}
        if not stream:
            return await client.responses.create(**request)
        async with client.responses.stream(**request) as events:
            kinds = [event.type async for event in events]
            assert kinds[0] == "response.created" and "response.output_text.delta" in kinds
            return await events.get_final_response()

    first = await ask("hi")
    call = first.output[-1]
    assert (first.output_text, call.name, call.arguments) == ("so\n", "add", '{"a": 1}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
    last = await ask([{"role": "user", "content": "hi"}, *first.output, result])
    assert (last.output_text, last.status) == ("two", "completed")


@pytest.mark.parametrize("api", ["chat", "messages", "streamed messages", "responses", "streamed responses"])
async def test_a_conversation_with_a_tool_is_one_line(chatml, api):
    async with serving(chatml, reply) as world:
        if api == "chat":
            await through_chat(world)
        elif api.endswith("responses"):
            await through_responses(world, stream=api != "responses")
        else:
            await through_messages(world, stream=api != "messages")
        session = world.episode.session
        assert [len(line) for line in session.lines()] == [2]
        assert (session.branches, session.unspliced) == (0, 0)
        check_exact(session, world.policy)


async def test_completions_continue_the_call_whose_ids_they_begin_with(chatml):
    async with serving(chatml, ["yes"]) as world:
        client = world.client()
        first = await client.completions.create(
            model="policy", prompt="abc", logprobs=0, extra_body={"return_token_ids": True}
        )
        [choice] = first.choices
        extra = choice.model_extra
        assert (choice.text, choice.finish_reason, len(choice.logprobs.token_logprobs)) == ("yes", "stop", 4)
        ids = [*extra["prompt_token_ids"], *extra["token_ids"]]
        await client.completions.create(model="policy", prompt=[*ids, 7], max_tokens=2)
        await client.completions.create(model="policy", prompt=[7, 8])
        session = world.episode.session
        assert [len(line) for line in session.lines()] == [2, 1]
        assert (session.turns[1].prompt, session.turns[1].output.finish_reason) == ([7], "length")
        check_exact(session, world.policy)
        with pytest.raises(openai.BadRequestError, match="echo"):
            await client.completions.create(model="policy", prompt="abc", echo=True)


async def test_a_streamed_completion_has_the_text_and_the_ids_of_its_record(chatml):
    async with serving(chatml, lambda prompt, seed: f"{seed % 1000} yes") as world:
        stream = await world.client().completions.create(
            model="policy",
            prompt="abc",
            n=2,
            logprobs=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
        chunks = [chunk async for chunk in stream]
        texts = ["".join(c.text for chunk in chunks for c in chunk.choices if c.index == index) for index in (0, 1)]
        ends = [choice for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        assert len(chunks) > 5 and len({chunk.id for chunk in chunks}) == 1
        turns = world.episode.session.turns
        assert sorted(texts) == sorted(turn.text for turn in turns) and len(set(texts)) == 2
        assert [end.model_extra["token_ids"] for end in ends] == [turn.output.ids for turn in turns]
        assert [end.logprobs.token_logprobs for end in ends] == [turn.output.logprobs for turn in turns]
        assert chunks[-1].usage.completion_tokens == sum(len(turn.output.ids) for turn in turns)
        check_exact(world.episode.session, world.policy)


async def test_generate_takes_and_returns_ids(chatml):
    async with serving(chatml, ["yes"]) as world, ClientSession() as http:
        headers = {"Authorization": f"Bearer {world.episode.key}.run1"}
        body = {"token_ids": [7, 8], "sampling_params": {"max_tokens": 2, "temperature": 1.0, "logprobs": 1}}
        async with http.post(f"{world.url}/inference/v1/generate", json=body, headers=headers) as answer:
            [choice] = (await answer.json())["choices"]
        [turn] = world.episode.session.turns
        assert (turn.prompt, choice["token_ids"], choice["finish_reason"]) == ([7, 8], turn.output.ids, "length")
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == turn.output.logprobs
        for wrong in (
            {"token_ids": []},
            {"token_ids": "a"},
            {"token_ids": [7], "sampling_params": 3},
            {"token_ids": [1.5]},
            [],
        ):
            async with http.post(f"{world.url}/inference/v1/generate", json=wrong, headers=headers) as answer:
                assert answer.status == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        ("messages", {"messages": "hi"}),
        ("messages", {}),
        ("responses", {"input": "hi", "previous_response_id": "resp_1"}),
        ("responses", {"input": [{"type": "web_search_call"}]}),
        ("responses", {"input": "hi", "tools": [{"type": "web_search"}]}),
    ],
)
async def test_what_cannot_be_answered_is_a_bad_request(chatml, path, body):
    async with serving(chatml, ["yes"]) as world, ClientSession() as http:
        headers = {"x-api-key": f"{world.episode.key}.run1"}
        async with http.post(f"{world.url}/v1/{path}", json=body, headers=headers) as answer:
            assert answer.status == 400, await answer.text()
        assert not world.policy.calls
