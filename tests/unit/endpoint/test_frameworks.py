"""Agents of unmodified frameworks of PyPI: every token that trains was sampled, and a history that only grows is one line."""

import asyncio
import os

import pytest

from tests.unit.endpoint.test_dialects import CALL
from tests.unit.endpoint.test_endpoint import HELLO, serving
from tests.unit.endpoint.test_sessions import TOOLS, check_exact


def add(a: int) -> str:
    """Add a number.

    Args:
        a: The number.
    """
    return str(a)


async def by_litellm(base_url, api_key):
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it downloads a table at its import otherwise
    import litellm

    async def ask(messages):
        answer = await litellm.acompletion(
            model="openai/policy", base_url=base_url, api_key=api_key, messages=messages, tools=TOOLS, max_retries=0
        )
        return answer.choices[0].message

    message = await ask(HELLO)
    [call] = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    last = await ask([*HELLO, message, {"role": "tool", "tool_call_id": call.id, "content": add(1)}])
    return last.content


async def by_openai_agents(base_url, api_key, *, chat):
    import openai
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    make = OpenAIChatCompletionsModel if chat else OpenAIResponsesModel
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        model = make(model="policy", openai_client=client)
        agent = Agent(name="adder", instructions="Add.", model=model, tools=[function_tool(add)])
        return (await Runner.run(agent, "hi")).final_output


FRAMEWORKS = {
    "litellm": by_litellm,
    "openai-agents, chat": lambda *endpoint: by_openai_agents(*endpoint, chat=True),
    "openai-agents, responses": lambda *endpoint: by_openai_agents(*endpoint, chat=False),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_an_agent_of_a_framework_is_one_line_of_exact_tokens(chatml, framework):
    def scripted(prompt, seed):
        return "two" if world.policy.calls else CALL

    async with serving(chatml, scripted) as world:
        answer = await FRAMEWORKS[framework](f"{world.url}/v1", f"{world.episode.key}.run1")
        session = world.episode.session
        assert answer == "two"
        assert [len(line) for line in session.lines()] == [2]
        assert (session.branches, session.unspliced) == (0, 0)
        check_exact(session, world.policy)


async def test_smolagents_rewrites_its_history_so_that_each_call_is_a_branch_of_exact_tokens(chatml):
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'

    def scripted(prompt, seed):
        return call % (("final_answer", '{"answer": "two"}') if world.policy.calls else ("add", '{"a": 1}'))

    async with serving(chatml, scripted, max_seq_len=20000) as world:
        model = OpenAIModel("policy", api_base=f"{world.url}/v1", api_key=f"{world.episode.key}.run1")
        agent = ToolCallingAgent(tools=[tool(add)], model=model, verbosity_level=0)
        assert await asyncio.to_thread(agent.run, "hi") == "two"
        session = world.episode.session
        assert [len(line) for line in session.lines()] == [1, 1]
        assert (session.branches, session.unspliced) == (1, 0)
        check_exact(session, world.policy)
