"""`env.type: nemo_gym`: episodes of NeMo-Gym servers give the rows of our own, through the relay of the model; no failure is ever a reward.

The servers are those of `tests.gym_stand_in`. With RLJOB_NEMO_GYM_HEAD, the address of a real head server whose model URL is
http://127.0.0.1:7707/v1 and that serves examples/gym/resources_servers/calculator, the first test runs with the real ones too.
"""

import asyncio
import contextlib
import json
import os
import socket

import aiohttp
import pytest
import torch
from aiohttp import web

from rl_core.api.errors import ConfigError, GymTransportError, RolloutDataFailure, RolloutTimeout
from rl_core.envs.model_relay import ModelRelay, session_of_row
from rl_core.envs.nemo_gym import NemoGymPrograms
from rl_core.rollouts.agents import AgentRolloutImpl
from rl_core.rollouts.endpoint.server import Endpoint
from tests.gym_stand_in import AGENT, Gym, ModelError
from tests.unit.endpoint.conftest import SampledText, make_episodes

QUESTION = "<|im_start|>user\n6*7<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'
TOOLS = [{"type": "function", "name": "calculator", "parameters": {"type": "object", "properties": {}}, "strict": True}]
REAL = os.environ.get("RLJOB_NEMO_GYM_HEAD")


def scripted(prompt, seed):
    """Call the calculator first, then give the result: an end-of-turn token each for the tools, the question, the call and its result."""
    return CALL if prompt.count(3) == 2 else "42"


def right(row, output):
    """Reward the right number in the last item."""
    return float(output[-1]["type"] == "message" and output[-1]["content"][0]["text"] == row["answer"])


def sample():
    row = {"responses_create_params": {"input": [{"role": "user", "content": "6*7"}], "tools": TOOLS}, "answer": "42"}
    return {
        "message_log": [{"role": "user", "content": "6*7", "token_ids": torch.tensor([5])}],
        "length": 1,
        "extra_env_info": {**row, "agent_ref": {"name": AGENT}},
        "loss_multiplier": 1.0,
        "idx": 7,
        "task_name": "nemo_gym",
        "group_id": "0-7",
    }


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class World:
    """An endpoint, the environment that relays to it, and servers."""

    @contextlib.asynccontextmanager
    async def running(
        self, tokenizer, *, steps=(None,), head=None, seconds=20.0, verify=right, texts=scripted, **options
    ):
        self.episodes = make_episodes(tokenizer)
        self.endpoint = Endpoint(self.episodes, tokenizer, model="policy", max_new_tokens=96)
        await self.endpoint.start("127.0.0.1")
        port = free_port() if head is None else 7707
        self.gym = Gym(f"http://127.0.0.1:{port}/v1", verify=verify, steps=steps)
        stop, address = await self.gym.start()
        self.environment = NemoGymPrograms({"head": head or address, "modelPort": port, **options})
        self.delays = []
        self.environment._sleep = self._sleep
        self.policy = SampledText(tokenizer, texts)
        self.url = f"http://127.0.0.1:{port}/v1"
        try:
            yield AgentRolloutImpl(
                tokenizer,
                {"nemo_gym": self.environment},
                2,
                2048,
                self.policy,
                seed=1,
                env_step_seconds=seconds,
                episodes=self.episodes,
                base_url=lambda: f"http://127.0.0.1:{self.endpoint.port}/v1",
                model="policy",
            )
        finally:
            await self.environment.aclose()
            await stop()
            await self.endpoint.close()
        assert not self.episodes._open

    async def _sleep(self, seconds):
        self.delays.append(seconds)
        await asyncio.sleep(0)


@pytest.mark.parametrize("head", [None, *([REAL] if REAL else [])])
async def test_an_episode_of_the_servers_is_the_one_that_the_policy_sampled(chatml, head):
    world = World()
    async with world.running(chatml, head=head) as rollouts:
        record = await rollouts.run_rollout(sample())
    assert [completion.reward for completion in record.completions] == [1.0, 1.0]
    called, told = (chatml(text, add_special_tokens=False)["input_ids"] + [3] for text in (CALL, "42"))
    for completion in record.completions:
        sampled = [
            message["token_ids"].tolist() for message in completion.message_log if message["role"] == "assistant"
        ]
        assert sampled == [called, told]
        assert completion.metrics["turns"] == 2 and completion.finish_reason == "terminated"
        read = torch.cat([message["token_ids"] for message in completion.message_log]).tolist()
        assert any(read[: -len(told)] == prompt for prompt, ids, _, _ in world.policy.calls if ids == told)
    assert record.rollout_metrics["branches"] == record.rollout_metrics["unspliced"] == 0


def status(code):
    async def answer(gym, request, row):
        return web.json_response({"error": "sorry"}, status=code)

    return answer


def text(body):
    async def answer(gym, request, row):
        await gym.episode(row)
        return web.Response(text=body, content_type="application/json")

    return answer


def changed(**fields):
    async def answer(gym, request, row):
        return web.json_response(await gym.episode(row) | fields)

    return answer


async def drop(gym, request, row):
    await gym.episode(row)
    request.transport.close()
    return web.Response()


async def without_model(gym, request, row):
    return web.json_response({"response": {"output": []}, "reward": 1.0})


async def of_another_row(gym, request, row):
    """Answer with the first episode, whatever the row is."""
    answer = await gym.episode(row)
    gym.first = getattr(gym, "first", answer)
    return web.json_response(gym.first)


async def hang(gym, request, row):
    await gym.episode(row)
    await asyncio.Event().wait()


async def half(gym, request, row):
    """Make the calls of an episode, then fail."""
    await gym.episode(row)
    return web.json_response("Hit an exception", status=500)


RETRIED = {
    "500": status(500),
    "429": status(429),
    "half": half,
    "drop": drop,
    "class": changed(_ng_failure_class="agent_request_failed"),
}


@pytest.mark.parametrize("fault", RETRIED)
async def test_a_row_that_the_servers_fail_is_sent_again_and_only_its_last_run_is_trained(chatml, fault):
    world = World()
    async with world.running(chatml, steps=[RETRIED[fault]] * 2 + [None]) as rollouts:
        record = await rollouts.run_rollout(sample())
    assert [completion.reward for completion in record.completions] == [1.0, 1.0]
    assert [completion.metrics["turns"] for completion in record.completions] == [2, 2]
    assert record.rollout_metrics["branches"] == 0
    assert len(world.gym.rows) == 4 and len(world.delays) == 2
    bodies = [json.loads(row["responses_create_params"]["metadata"]["extra_body"]) for row in world.gym.rows]
    assert len({body["rljob"]["api_key"] for body in bodies}) == 4


@pytest.mark.parametrize("fault", RETRIED)
async def test_a_row_that_the_servers_fail_without_end_fails_its_group_after_some_tries(chatml, fault):
    world = World()
    async with world.running(chatml, steps=[RETRIED[fault]], rowAttempts=3) as rollouts:
        with pytest.raises(GymTransportError, match="failed 3 times in succession"):
            await rollouts.run_rollout(sample())
    assert 3 <= len(world.gym.rows) <= 6


@pytest.mark.parametrize(
    "step, error",
    [
        (text("{"), "must answer JSON"),
        (text("[]"), "must answer an object"),
        (changed(response=None), "must have response.output"),
        (changed(reward=None), "must have a finite reward"),
        (changed(reward="1"), "must have a finite reward"),
        (status(422), "was refused"),
        (without_model, "must call the model"),
        (of_another_row, "the reward is that of another episode"),
    ],
)
async def test_an_answer_that_cannot_be_trained_on_fails_its_group(chatml, step, error):
    world = World()
    texts = [CALL.replace("6", str(number)) for number in range(10)]
    async with world.running(chatml, steps=[step], verify=lambda row, output: 1.0, texts=texts) as rollouts:
        with pytest.raises(RolloutDataFailure, match=error):
            await rollouts.run_rollout(sample())


@pytest.mark.parametrize("fields", [{"mask_sample": True}, {"failure_kind": "judge_failed"}])
async def test_an_episode_that_its_environment_masks_has_no_reward(chatml, fields):
    async with World().running(chatml, steps=[changed(**fields)]) as rollouts:
        record = await rollouts.run_rollout(sample())
    assert all(completion.reward != completion.reward for completion in record.completions)
    assert [completion.loss_multiplier for completion in record.completions] == [0.0, 0.0]


async def test_servers_that_hang_miss_the_deadline_and_are_told_to_stop(chatml):
    world = World()
    async with world.running(chatml, steps=[hang], seconds=0.5) as rollouts:
        with pytest.raises(RolloutTimeout, match="must end within|missed its deadline"):
            await rollouts.run_rollout(sample())
        async with asyncio.timeout(10):
            while world.gym.cancelled < len(world.gym.rows):
                await asyncio.sleep(0.01)


async def test_rows_wait_until_the_servers_have_started(chatml):
    world = World()
    async with world.running(chatml) as rollouts:
        world.gym.ready = False
        running = asyncio.create_task(rollouts.run_rollout(sample()))
        async with asyncio.timeout(10):
            while len(world.delays) < 3:
                await asyncio.sleep(0)
        assert not world.gym.rows
        world.gym.ready = True
        assert [completion.reward for completion in (await running).completions] == [1.0, 1.0]


async def test_servers_that_end_and_come_back_are_waited_for(chatml):
    async def end(gym, request, row):
        gym.ready = False
        return web.json_response("Request was cancelled", status=500)

    world = World()
    async with world.running(chatml, steps=[end, end, None], rowAttempts=2) as rollouts:
        running = asyncio.create_task(rollouts.run_rollout(sample()))
        async with asyncio.timeout(10):
            while len(world.delays) < 8:
                await asyncio.sleep(0)
        assert len(world.gym.rows) == 2
        world.gym.ready = True
        assert [completion.reward for completion in (await running).completions] == [1.0, 1.0]


async def test_servers_that_do_not_start_in_time_are_a_failure_of_infrastructure(chatml):
    world = World()
    async with world.running(chatml, seconds=0.5) as rollouts:
        world.gym.ready = False
        with pytest.raises(GymTransportError, match="must end within .* answered 503"):
            await rollouts.run_rollout(sample())
        assert not world.gym.rows


async def test_the_relay_refuses_calls_without_session_and_says_which_endpoint_is_gone(chatml):
    world = World()
    async with world.running(chatml), aiohttp.ClientSession() as http:
        gone = {"base_url": f"http://127.0.0.1:{free_port()}/v1", "api_key": "k"}
        bad = {"base_url": f"http://127.0.0.1:{world.endpoint.port}/v1", "api_key": "rl-0.1"}
        for body, expected in (
            ({}, 400),
            ([], 400),
            ({"rljob": 1}, 400),
            ({"rljob": gone}, 410),
            ({"rljob": bad}, 410),
        ):
            async with http.post(f"{world.url}/chat/completions", json=body) as answer:
                assert answer.status == expected and (await answer.json())["error"]["message"]
        async with http.get(f"{world.url}/models") as answer:
            assert [model["id"] for model in (await answer.json())["data"]] == ["policy"]


async def test_a_late_call_of_an_ended_run_does_not_make_the_model_server_give_up(chatml):
    """The model server of 0.7.0 sends no further call of any row once a key was refused."""
    over, late = asyncio.Event(), []

    async def fail(gym, request, row):
        async def call():
            await over.wait()
            with pytest.raises(ModelError, match="410: .*the run of this call has ended"):
                await gym.episode(row)

        late.append(asyncio.create_task(call()))
        return web.json_response("sorry", status=500)

    world = World()
    async with world.running(chatml, steps=[fail, fail, None]) as rollouts:
        await rollouts.run_rollout(sample())
        over.set()
        await asyncio.gather(*late)
        record = await rollouts.run_rollout(sample())
    assert [completion.reward for completion in record.completions] == [1.0, 1.0]


def test_a_relay_needs_an_address_of_its_own():
    with pytest.raises(ConfigError, match="modelHost and modelPort must be an address of this machine"):
        ModelRelay("192.0.2.1", 1, model="policy")


def test_the_session_of_a_row_keeps_what_its_metadata_had():
    row = {"responses_create_params": {"input": "hi", "metadata": {"a": "b", "extra_body": '{"priority": 3}'}}}
    params = session_of_row(row, "http://h:1/v1", "key")["responses_create_params"]
    body = json.loads(params["metadata"].pop("extra_body"))
    assert params == {"input": "hi", "metadata": {"a": "b"}}
    assert body == {"priority": 3, "rljob": {"base_url": "http://h:1/v1", "api_key": "key"}}
    assert row["responses_create_params"]["metadata"]["extra_body"] == '{"priority": 3}'
    for broken in (
        {},
        {"responses_create_params": {"metadata": {"extra_body": "["}}},
        {"responses_create_params": {"metadata": 1}},
    ):
        with pytest.raises(ValueError, match="of a row must be"):
            session_of_row(broken, "http://h:1/v1", "key")


@pytest.mark.parametrize(
    "options, error",
    [
        ({}, "env.options.head: is required"),
        ({"head": "gym:11000"}, "must be an address of the form http://HOST:PORT, got gym"),
        ({"head": "http://gym:1", "modelPort": 0}, "env.options.modelPort"),
        ({"head": "http://gym:1", "servers": 1}, "env.options.servers: unknown field"),
    ],
)
def test_the_options_are_checked(options, error):
    with pytest.raises(ConfigError, match=error):
        NemoGymPrograms(options)
