"""The NeMo-Gym path: known episodes become known rows, and a server that misbehaves over HTTP never yields a reward.

The servers are aiohttp servers in this process that answer as those of nemo-gym 0.7.0 do: a head server with the addresses and an agent
with `/run`, scripted by row.
"""

import asyncio
import contextlib
import json
import math

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from rl_core.api.errors import ConfigError, GymTransportError, RolloutConfigError, RolloutDataFailure, RolloutTimeout
from rl_core.batching.collate import collate_groups
from rl_core.nemo_gym.answers import row_result
from rl_core.observability.statistics import aggregate_rollout_metrics
from rl_core.rollouts.manager import AsyncNemoGymRolloutImpl, FailureKind, RetryPolicy, RolloutManager, classify_failure
from rl_core.rollouts.nemo_gym import NemoGymEnvironment, RowFailure
from rl_core.rollouts.nemo_gym.implementation import RolloutTimer

AGENT = "calc_simple_agent"
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 16, "stop_strings": None, "top_k": None}
PROMPT = [5, 6, 7]


def turn(prompt, generated, *, kind="message"):
    item = {"type": kind, "prompt_token_ids": prompt, "generation_token_ids": generated}
    item["generation_log_probs"] = [-0.25 * (i + 1) for i in range(len(generated))]
    if kind == "message":
        item |= {"role": "assistant", "content": [{"type": "output_text", "text": "x"}]}
    return item


OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "4"}
EMPTY = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": ""}]}
TWO_TURNS = [
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "call"}]},
    turn(PROMPT, [97, 98], kind="function_call"),
    OUTPUT,
    turn([*PROMPT, 97, 98, 50, 51], [99]),
]


def episode(output=None, *, reward=1.0, **fields):
    response = {"status": "completed", "incomplete_details": None, "output": TWO_TURNS if output is None else output}
    return {"response": response, "reward": reward, "mask_sample": False, "failure_kind": None} | fields


def incomplete(output):
    answer = episode(output)
    answer["response"] |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return answer


class Gym:
    """Answers row i with the steps of script[i] in turn, the last again; a step is an answer or a coroutine function of the request."""

    def __init__(self, script):
        self.script = script
        self.calls = []
        self.cancelled = []
        self.addresses = []
        """Addresses of the agent that the head server lists in turn, the last again; None: its real one."""

    async def run(self, request):
        row = await request.json()
        index = row["_rowidx"]
        earlier = sum(call["_rowidx"] == index for call, _ in self.calls)
        self.calls.append((row, dict(request.headers)))
        steps = self.script.get(index, [episode()])
        step = steps[min(earlier, len(steps) - 1)]
        try:
            return await step(request) if callable(step) else web.json_response(step)
        except asyncio.CancelledError:
            self.cancelled.append(index)
            raise

    async def instances(self, request):
        address = self.addresses.pop(0) if len(self.addresses) > 1 else (self.addresses or [None])[0]
        url = address or f"http://127.0.0.1:{request.url.port}"
        return web.json_response([{"process_name": AGENT, "server_type": "responses_api_agents", "url": url}])

    def rows(self):
        return [row["_rowidx"] for row, _ in self.calls]


@contextlib.asynccontextmanager
async def serving(script, **limits):
    """Yield the scripted servers and a client of theirs, which does not wait between tries."""
    gym = Gym(script)
    app = web.Application()
    app.add_routes([web.post("/run", gym.run), web.get("/server_instances", gym.instances)])
    server = TestServer(app)
    await server.start_server()
    gym.delays = []

    async def sleep(seconds):
        gym.delays.append(seconds)

    gym.environment = NemoGymEnvironment(str(server.make_url("/")), **{"sleep": sleep, **limits})
    try:
        yield gym
    finally:
        await gym.environment.close()
        await server.close()


def status(code, text="sorry"):
    async def answer(request):
        return web.Response(status=code, text=text)

    return answer


async def half_a_body(request):
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"response": {')
    request.transport.close()
    return response


async def drop(request):
    request.transport.close()
    return web.Response()


async def hang(request):
    await asyncio.Event().wait()


def sample(**changes):
    ids = torch.tensor(PROMPT)
    row = {"agent_ref": {"name": AGENT}, "responses_create_params": {"input": []}, "expected": 4}
    return {
        "message_log": [{"role": "user", "content": "2+2", "token_ids": ids}],
        "length": 3,
        "extra_env_info": row,
        "loss_multiplier": 1.0,
        "idx": 7,
        "group_id": "0-7",
        **changes,
    }


def make(fakes, env, n=2, max_seq_len=100, **options):
    return AsyncNemoGymRolloutImpl(fakes.Tokenizer(), {"nemo_gym": env}, n, max_seq_len, SAMPLING, **options)


async def run(fakes, script, n=2, limits=None, **options):
    """Return (record, servers) of one group."""
    async with serving(script, **(limits or {})) as gym:
        return await make(fakes, gym.environment, n, **options).run_rollout(sample()), gym


# --- episodes ---------------------------------------------------------------------------------------------------------


async def test_a_known_episode_becomes_known_rows(fakes):
    record, gym = await run(fakes, {1: [episode(reward=0.5)]})
    log = record.completions[0].message_log
    assert [(m["role"], m["token_ids"].tolist(), m["content"]) for m in log] == [
        ("user", PROMPT, ""),
        ("assistant", [97, 98], "ab"),
        ("user", [50, 51], ""),
        ("assistant", [99], "c"),
    ]
    assert log[1]["generation_logprobs"].tolist() == [-0.25, -0.5] and log[1]["token_ids"].dtype == torch.int64
    assert [c.reward for c in record.completions] == [1.0, 0.5]
    assert record.completions[0].finish_reason == "stop" and record.metadata == {"task_name": "nemo_gym"}
    batch = collate_groups([record], max_length=100, pad_token_id=0)
    assert batch.input_ids[0].tolist() == [*PROMPT, 97, 98, 50, 51, 99]
    assert batch.loss_mask[0].tolist() == [False, False, False, True, True, False, False, True]
    assert gym.calls[0][1]["X-Row-Id"] in ("0-7_g0_a1", "0-7_g1_a1")


async def test_the_prompt_is_the_samples_own_where_its_tokens_begin_the_logs(fakes):
    async with serving({}) as gym:
        given = sample()
        assert (await make(fakes, gym.environment).run_rollout(given)).prompt is given["message_log"]
        other = sample(message_log=[{"role": "user", "content": "", "token_ids": torch.tensor([1, 2])}])
        assert (await make(fakes, gym.environment).run_rollout(other)).prompt[0]["token_ids"].tolist() == PROMPT


def test_rows_are_deep_copies_with_the_sampling_settings(fakes):
    given = sample()
    given["extra_env_info"]["responses_create_params"]["max_output_tokens"] = 9
    rows = make(fakes, None, n=3)._build_inputs(given)
    assert [row["_rowidx"] for row in rows] == [0, 1, 2]
    assert rows[0]["responses_create_params"] == {
        "input": [], "temperature": 1.0, "top_p": 1.0, "max_output_tokens": 9,
    }  # fmt: skip
    rows[0]["responses_create_params"]["input"].append("x")
    rows[0]["agent_ref"]["name"] = "y"
    assert rows[1]["responses_create_params"]["input"] == [] and given["extra_env_info"]["agent_ref"]["name"] == AGENT
    assert "temperature" not in given["extra_env_info"]["responses_create_params"]


@pytest.mark.parametrize(
    ("answer", "limit", "reason"),
    [
        (episode(), 8, "seq_limit"),
        (episode(), 9, "stop"),
        (incomplete(TWO_TURNS), 100, "length"),
        (incomplete([*TWO_TURNS, OUTPUT, EMPTY]), 100, "length"),
    ],
    ids=["exact fit", "one token of room", "cut call", "no room for another turn"],
)
async def test_what_truncates_an_episode(fakes, answer, limit, reason):
    record, _ = await run(fakes, {0: [answer]}, n=1, max_seq_len=limit)
    completion = record.completions[0]
    assert (completion.finish_reason, completion.truncated) == (reason, reason != "stop")
    assert sum(len(m["token_ids"]) for m in completion.message_log) == 8 and completion.reward == 1.0


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (episode([]), "must have an output item with generation_token_ids"),
        (episode([OUTPUT]), "must have an output item with generation_token_ids"),
        (episode([EMPTY]), "got none at turn 0"),
        (incomplete([EMPTY]), "got none at turn 0"),
        (episode([*TWO_TURNS, OUTPUT, EMPTY]), "got none at turn 2"),
        (incomplete([*TWO_TURNS, OUTPUT, {"type": "function_call", "name": "f"}]), "got none at turn 2"),
        (incomplete([EMPTY, OUTPUT, *TWO_TURNS]), "got none at turn 0"),
        (episode([turn(PROMPT, [1]), OUTPUT, turn([5, 6, 9, 1], [2])]), "Non-contiguous messages found.*turn 1.*position 2"),
        (episode([turn(PROMPT, [1]), OUTPUT, turn(PROMPT, [2])]), "Non-contiguous messages found.*turn 1.*position 3"),
        (episode([{**turn(PROMPT, [1]), "generation_log_probs": []}]), "one entry per generated token, 1, got 0"),
        (episode([{**turn(PROMPT, [1]), "prompt_token_ids": ["a"]}]), "prompt_token_ids of turn 0 must be"),
        (episode([turn(PROMPT, [1]) | {"generation_log_probs": [math.nan]}]), "log-probabilities must be finite"),
        (episode(reward=None), "finite reward, got None"),
        (episode(reward=math.inf), "finite reward, got inf"),
        ({"reward": 1.0}, "must have response.output"),
        ({"reward": 1.0, "response": {"output": ["x"]}}, "must have response.output"),
    ],
)  # fmt: skip
async def test_an_answer_that_cannot_be_trained_on_is_a_data_failure(fakes, answer, match):
    with pytest.raises(RolloutDataFailure, match=match):
        await run(fakes, {0: [status(200, json.dumps(answer))]}, n=1)


def test_no_tokens_at_all_is_also_a_value_error():
    with pytest.raises(ValueError, match="generation_token_ids"):
        row_result(episode([OUTPUT]))


# --- masked rows ------------------------------------------------------------------------------------------------------

MASKED = [
    {"mask_sample": True},
    {"instance_config": {"mask_sample": True}},
    {"failure_kind": "judge_failed"},
    {"mask_sample": True, "failure_kind": "judge_failed", "_ng_failure_class": "judge_failed"},
]


@pytest.mark.parametrize("fields", MASKED, ids=["flag", "flag of the instance", "failure", "judge failed"])
async def test_a_masked_row_has_no_reward_and_does_not_train(fakes, fields):
    record, gym = await run(fakes, {1: [episode(reward=0.0, **fields)]})
    good, masked = record.completions
    assert math.isnan(masked.reward) and masked.loss_multiplier == 0.0 and good.reward == 1.0
    batch = collate_groups([record], max_length=100, pad_token_id=0)
    assert batch.valid.tolist() == [True, False] and not batch.loss_mask[1].any()
    metrics = record.rollout_metrics
    assert metrics["masked_rows"] == 1 and metrics["total_reward/histogram"] == [1.0]
    assert metrics[f"{AGENT}/reward/mean"] == 1.0 and metrics[f"{AGENT}/reward/count"] == 1
    assert metrics.get(f"{AGENT}/judge_failed/failures", 0) == ("failure_kind" in fields)
    assert sorted(gym.rows()) == [0, 1]


async def test_masking_can_be_off_but_a_failed_row_never_has_a_reward(fakes):
    script = {0: [episode(**MASKED[0])], 1: [episode(**MASKED[1])], 2: [episode(**MASKED[3])]}
    record, _ = await run(fakes, script, n=3, mask_env_flagged_samples=False)
    assert [c.reward for c in record.completions[:2]] == [1.0, 1.0] and math.isnan(record.completions[2].reward)
    assert "mask_sample" not in record.completions[0].env_extras
    assert record.completions[1].env_extras["instance_config"] == {}


async def test_metrics_are_of_the_rows_that_have_the_key_and_masked_rows_add_up(fakes):
    script = {0: [episode(score=3, solved=True)], 1: [episode(score=1)], 2: [episode(mask_sample=True)]}
    record, _ = await run(fakes, script, n=3)
    metrics = record.rollout_metrics
    assert (metrics[f"{AGENT}/score/mean"], metrics[f"{AGENT}/score/count"]) == (2.0, 2)
    assert (metrics[f"{AGENT}/solved/mean"], metrics[f"{AGENT}/solved/count"]) == (1.0, 1)
    assert metrics["turns_per_sample/mean"] == 2.0 and metrics["total_tokens_per_sample/mean"] == 8.0
    assert metrics["gen_tokens_per_sample/mean"] == metrics["mean_gen_tokens_per_sample"] == 3.0
    assert json.loads(metrics[f"{AGENT}/full_result"][0])["score"] == 3
    assert {f"timing/rollout/{name}" for name in (
        "total", "run_rollouts", "compute_metrics", "await_results", "postprocess_results", "postprocess_results_pct"
    )} <= set(metrics)  # fmt: skip
    assert aggregate_rollout_metrics([metrics, metrics])["masked_rows"] == 2


# --- faults over HTTP -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [status(408), status(429), status(502), status(503), status(504), drop, half_a_body],
    ids=["408", "429", "502", "503", "504", "dropped connection", "half a body"],
)
async def test_an_overloaded_or_broken_server_is_called_again(fakes, fault):
    record, gym = await run(fakes, {1: [fault, fault, episode(reward=0.5)]})
    assert [c.reward for c in record.completions] == [1.0, 0.5]
    assert sorted(gym.rows()) == [0, 1, 1, 1] and gym.delays == [0.5, 1.0]
    assert {row["_row_id"] for row, _ in gym.calls if row["_rowidx"] == 1} == {"0-7_g1_a1"}


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (status(500, "verifier broke"), "answered 500: verifier broke"),
        (status(500, "x" * 5000), "answered 500: x{2048}$"),
        (
            {"_ng_failure_class": "environment_server_failed", "_ng_failure_stage": "seed", "_ng_failure_message": "why"},
            "environment_server_failed.*seed.*why",
        ),
    ],
    ids=["500", "500 with a long body", "failure class"],
)  # fmt: skip
async def test_a_failed_row_is_sent_again_and_then_named_with_what_the_server_said(fakes, fault, match):
    again = []
    record, gym = await run(fakes, {1: [fault, fault, episode()]}, on_redispatch=again.append)
    assert [c.reward for c in record.completions] == [1.0, 1.0] and again == [1, 1]
    assert sorted(gym.rows()) == [0, 1, 1, 1] and gym.delays == []
    with pytest.raises(GymTransportError, match=r"rows without an answer: \[1\]; row 1: .*" + match) as caught:
        await run(fakes, {1: [fault]})
    assert classify_failure(caught.value) is FailureKind.INFRASTRUCTURE


async def test_a_server_that_stays_overloaded_is_given_up_with_its_last_words(fakes):
    with pytest.raises(
        GymTransportError, match=r"rows without an answer: \[0, 1\]; row 0: 2 tries failed.*429: slow down"
    ):
        await run(
            fakes, {0: [status(429, "slow down")], 1: [drop]}, limits={"tries": 2}, max_gym_row_attempts=1
        )  # fmt: skip


async def test_a_refused_connection_asks_the_head_server_for_the_new_address(fakes):
    async with serving({}) as gym:
        gym.addresses = [f"http://127.0.0.1:{unused_port()}", None]
        record = await make(fakes, gym.environment).run_rollout(sample())
    assert [c.reward for c in record.completions] == [1.0, 1.0] and set(gym.delays) == {0.5}


async def test_servers_that_are_away_are_a_transport_failure(fakes):
    async with serving({}, tries=2) as gym:
        gym.environment._heads = [f"http://127.0.0.1:{unused_port()}"]
        with pytest.raises(GymTransportError, match="ClientConnectorError"):
            await make(fakes, gym.environment).run_rollout(sample())


async def test_a_row_that_hangs_is_cancelled_and_sent_again(fakes):
    record, gym = await run(fakes, {1: [hang, episode()]}, limits={"row_seconds": 1.0})
    assert [c.reward for c in record.completions] == [1.0, 1.0]
    assert gym.cancelled == [1] and gym.rows().count(1) >= 2


async def test_the_deadline_of_the_group_ends_all_rows_and_names_the_missing(fakes):
    async with serving({0: [hang], 1: [hang]}) as gym:
        with pytest.raises(RolloutTimeout, match=r"missed its deadline of 0.5 s; rows without an answer: \[0, 1\]"):
            await make(fakes, gym.environment, group_seconds=0.5).run_rollout(sample())
        await asyncio.sleep(0)
    assert sorted(gym.cancelled) == sorted(gym.rows())


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (status(200, "<html>"), "must answer JSON.*<html>"),
        (status(200, "[1]"), r"must answer an object, got \[1\]"),
        (status(200, '"late"'), "must answer an object"),
        (episode(_rowidx=0), "must answer the row it was sent, 1, got the answer to row 0"),
        (episode(_rowidx=9), "must answer the row it was sent, 1, got the answer to row 9"),
        (status(422, "unknown field"), "row 1 was refused: .*answered 422: unknown field"),
    ],
    ids=["no JSON", "a list", "a string", "the same row twice", "a row not asked for", "refused"],
)
async def test_garbage_is_a_data_failure(fakes, fault, match):
    with pytest.raises(RolloutDataFailure, match=match) as caught:
        await run(fakes, {0: [hang], 1: [fault]})
    assert classify_failure(caught.value) is FailureKind.DATA


async def test_an_answer_of_any_size_is_not_read(fakes):
    with pytest.raises(RolloutDataFailure, match="at most 1000 bytes"):
        await run(fakes, {1: [status(200, "x" * 5000)]}, limits={"max_answer_bytes": 1000})


async def test_an_unknown_agent_is_a_data_failure(fakes):
    async with serving({}) as gym:
        other = {"agent_ref": {"name": "other"}, "responses_create_params": {}}
        with pytest.raises(RolloutDataFailure, match=f"must be one of the servers \\['{AGENT}'\\], got 'other'"):
            await make(fakes, gym.environment).run_rollout(sample(extra_env_info=other))


async def test_rows_in_flight_are_bounded(fakes):
    active, most = 0, 0

    async def count(request):
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(0.01)
        active -= 1
        return web.json_response(episode())

    await run(fakes, {index: [count] for index in range(6)}, n=6, limits={"concurrency": 2})
    assert most == 2


# --- the stream of an environment -------------------------------------------------------------------------------------


class Stream:
    """An environment that yields the given (row index, result) pairs, one list per round."""

    def __init__(self, *rounds):
        self.rounds = list(rounds)
        self.sent = []

    async def run_rollouts(self, rows, *arguments):
        self.sent.append([row["_rowidx"] for row in rows])
        for index in self.rounds.pop(0):
            yield index if isinstance(index, tuple) else (index, row_result(episode()))


@pytest.mark.parametrize(
    ("rounds", "match"),
    [
        ([[0, 0]], "duplicate row index 0"),
        ([[0], [0]], "duplicate row index 0"),
        ([[5]], "invalid row index 5 for 2 inputs"),
        ([[-1]], "invalid row index -1"),
        ([[True]], "invalid row index True"),
        ([[("1", None)]], "invalid row index '1'"),
    ],
    ids=["twice in a round", "answered before", "too high", "negative", "bool", "text"],
)
async def test_a_wrong_row_of_an_environment_is_refused(fakes, rounds, match):
    with pytest.raises(ValueError, match=match):
        await make(fakes, Stream(*rounds)).run_rollout(sample())


async def test_only_missing_rows_are_sent_again_and_order_is_that_of_rows(fakes):
    def scored(index):
        return index, row_result(episode(reward=float(index)))

    stream = Stream([scored(2)], [scored(3), (0, RowFailure(reason="busy"))], [scored(1), scored(0)])
    impl = make(fakes, stream, n=4)
    rows = impl._build_inputs(sample())
    completions, _ = await impl._run_rollouts(rows, RolloutTimer(), "timing/rollout")
    assert stream.sent == [[0, 1, 2, 3], [0, 1, 3], [0, 1]]
    assert [c.reward for c in completions] == [0.0, 1.0, 2.0, 3.0]


# --- construction and the manager -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "options", "match"),
    [
        ({"stop_strings": ["x"]}, {}, "stop_strings is not supported in the generation config in NeMo-Gym path!"),
        ({"stop_token_ids": [1]}, {}, "stop_token_ids is not supported"),
        ({"top_k": 5}, {}, "top_k is not supported"),
        ({}, {"max_rollout_turns": 2}, "max_rollout_turns must be None or 1"),
        ({}, {"max_gym_row_attempts": 0}, "max_gym_row_attempts must be >= 1"),
        ({}, {"colour": 1}, "does not know colour"),
    ],
)
def test_settings_that_the_servers_cannot_honour_are_refused(fakes, config, options, match):
    with pytest.raises(RolloutConfigError, match=match):
        AsyncNemoGymRolloutImpl(fakes.Tokenizer(), {}, 1, 10, {**SAMPLING, **config}, **options)


@pytest.mark.parametrize("urls", [[], "host:1", ["http://a", "ftp://b"]])
def test_addresses_are_checked(urls):
    with pytest.raises(ConfigError, match="urls must be addresses"):
        NemoGymEnvironment(urls)


async def test_the_manager_runs_groups_on_the_servers_and_counts_rows_sent_again(fakes):
    async with serving({1: [status(500), status(200, "<html>"), episode()]}) as gym:
        manager = RolloutManager(
            fakes.Tokenizer(), {"nemo_gym": gym.environment}, 2, 100, policy_generation=fakes.Generation(version=4),
            generation_config=SAMPLING, use_nemo_gym=True, retry=RetryPolicy(data_attempts=2), group_seconds=60.0,
        )  # fmt: skip
        record = await manager.run(sample())
    assert [c.policy_versions for c in record.completions] == [(4, 4)] * 2 and record.attempt == 2
    metrics = manager.metrics()
    assert metrics["rollout/gym_row_redispatch_total"] == 1 and metrics["rollout/data_retry_total"] == 1
    assert {row["_row_id"] for row, _ in gym.calls} == {f"0-7_g{i}_a{a}" for i in (0, 1) for a in (1, 2)}
