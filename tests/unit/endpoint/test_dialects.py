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


async def through_responses(world):
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
    client = world.client()
    first = await client.responses.create(model="policy", input="hi", tools=tools)
    call = first.output[-1]
    assert (first.output_text, call.name, call.arguments) == ("so\n", "add", '{"a": 1}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
    last = await client.responses.create(
        model="policy", input=[{"role": "user", "content": "hi"}, *first.output, result], tools=tools
    )
    assert (last.output_text, last.status) == ("two", "completed")


@pytest.mark.parametrize("api", ["chat", "messages", "streamed messages", "responses"])
async def test_a_conversation_with_a_tool_is_one_line(chatml, api):
    async with serving(chatml, reply) as world:
        if api == "chat":
            await through_chat(world)
        elif api == "responses":
            await through_responses(world)
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
        with pytest.raises(openai.BadRequestError, match="stream"):
            await client.completions.create(model="policy", prompt="abc", stream=True)


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
        ("responses", {"input": "hi", "stream": True}),
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
