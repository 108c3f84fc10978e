"""Agents that are child processes train like functions; what they start ends with them, and no failure of theirs is a reward."""

import asyncio
import json
import sys
import types

import psutil
import pytest
import torch

from rl_core.api.env import EnvSpec
from rl_core.api.errors import ConfigError, RolloutDataFailure, RolloutTimeout
from rl_core.batching.collate import collate_groups
from rl_core.envs.agent import AgentEnvironment
from rl_core.envs.command import OUTPUT_BYTES, Command
from rl_core.envs.source import env_source
from tests.unit.endpoint.conftest import AFTER, rollouts, sample
from tests.unit.endpoint.test_agents import own_episodes

TALK = """
import json, os, sys, urllib.request

def reply(messages):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    call = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(call) as answer:
        return json.load(answer)["choices"][0]["message"]

messages = [{"role": "user", "content": json.load(sys.stdin)["prompt"]}]
for turn in range(TURNS):
    messages += [reply(messages), {"role": "user", "content": "go on"}]
"""
STAYS = """
import os, subprocess, sys, time
code = "import os, time; os.setsid() if int(os.environ['LEAVES']) else None; open(f'{os.getpid()}.pid', 'w').close(); time.sleep(600)"
for leaves in "01":
    subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "LEAVES": leaves})
while sum(name.endswith(".pid") for name in os.listdir()) < 2:
    time.sleep(0.01)
"""


@pytest.fixture
def program(tmp_path):
    """Make an agent of a program's text."""

    def make(text, *, turns=3, **options):
        (tmp_path / "program.py").write_text(TALK.replace("TURNS", str(turns)) + text)
        return AgentEnvironment({"command": ["python", str(tmp_path / "program.py")], **options})

    return make


async def test_a_program_gives_the_rows_of_our_own_episodes(chatml, program):
    expected = await own_episodes(chatml).run_rollout(sample(chatml))
    text = "print('a log'); print(json.dumps({'reward': 1, 'parts': {'turns': 3}}))"
    async with rollouts(chatml, program(text)) as agents:
        record = await agents.run_rollout(sample(chatml))
    ours, theirs = (collate_groups([group], pad_token_id=0, max_length=2048) for group in (expected, record))
    for field in ("input_ids", "loss_mask", "raw_rewards", "lengths", "valid", "truncated"):
        assert torch.equal(getattr(ours, field), getattr(theirs, field)), field
    assert AFTER in chatml.decode(theirs.input_ids[0].tolist())
    assert {completion.metrics["reward/turns"] for completion in record.completions} == {3}


async def test_a_reward_function_scores_what_a_program_prints(chatml, program, monkeypatch):
    module = types.ModuleType("agent_scores")
    module.score = lambda prompts, completions, *, prompt, weight: [
        weight if (prompts[0], text) == (prompt[0], "the end\n") else None for text in completions
    ]
    monkeypatch.setitem(sys.modules, "agent_scores", module)
    agent = program("print('the end')", reward="agent_scores:score", arguments={"weight": 0.25})
    async with rollouts(chatml, agent) as agents:
        record = await agents.run_rollout(sample(chatml))
    assert [completion.reward for completion in record.completions] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("print(1); sys.exit('no luck')", RolloutDataFailure, "exit code 1: no luck"),
        ("print(1, flush=True); os.kill(os.getpid(), 9)", RolloutDataFailure, "killed by SIGKILL"),
        ("print(1); print('done')", RolloutDataFailure, "last line.*got 'done'"),
        ("", RolloutDataFailure, "last line"),
        ("print('NaN')", RolloutDataFailure, "finite number"),
        ("print('x' * 600000); print(1)", RolloutDataFailure, f"at most {OUTPUT_BYTES} bytes"),
        ("print(1, flush=True); import time; time.sleep(600)", RolloutTimeout, "envStep"),
    ],
)
async def test_a_program_that_fails_has_no_reward(chatml, program, text, error, words):
    late = error is RolloutTimeout
    async with rollouts(chatml, program(text, turns=1), generations=1, seconds=1.0 if late else 60.0) as agents:
        with pytest.raises(error, match=words):
            await agents.run_rollout(sample(chatml))


@pytest.mark.parametrize("stays", [False, True])
async def test_what_a_program_started_ends_with_it(tmp_path, stays):
    (tmp_path / "program.py").write_text(STAYS + ("time.sleep(600)" if stays else ""))
    command = Command(["python", "program.py"], folder=str(tmp_path))
    run = asyncio.create_task(command.run({}, base_url="http://127.0.0.1:1/v1", api_key="k", model="m"))
    while len(started := list(tmp_path.glob("*.pid"))) < 2:
        await asyncio.sleep(0.01)
    if stays:
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    else:
        assert await run == ""
    assert not any(runs(int(path.stem)) for path in started)


def runs(pid):
    """Return whether a process has not ended; one that nobody has reaped has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_program_gets_the_row_and_the_addresses_of_both_apis(tmp_path):
    names = [f"{api}_{what}" for api in ("OPENAI", "ANTHROPIC") for what in ("BASE_URL", "API_KEY", "MODEL")]
    text = f"import json, os, sys; print(json.dumps([json.load(sys.stdin), [os.environ[name] for name in {names}]]))"
    row = {"prompt": "é" * 50_000}
    printed = await Command(["python", "-c", text]).run(row, base_url="http://h:1/v1", api_key="k", model="m")
    assert json.loads(printed) == [row, ["http://h:1/v1", "k", "m", "http://h:1", "k", "m"]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"command": ["no-such-program"]}, "env.command.*'no-such-program'"),
        ({}, "env.agent"),
        ({"command": ["true"], "agent": "m:f"}, "env.agent"),
        ({"command": ["true"], "arguments": {"a": 1}}, r"env.options.arguments.*append"),
    ],
)
def test_what_cannot_be_run_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        AgentEnvironment(options)


def test_a_job_gives_a_command_or_a_function():
    source = env_source(EnvSpec(type="agent", command=["python", "p.py"]))
    assert (source.options, source.label) == ({"command": ["python", "p.py"]}, "agent python p.py")
    for fields in ({"command": ["p"]}, {"type": "agent"}, {"type": "agent", "command": ["p"], "agent": "m:f"}):
        with pytest.raises(ValueError, match="exactly one of agent and command"):
            EnvSpec(**fields)
