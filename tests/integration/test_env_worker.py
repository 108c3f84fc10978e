"""The env worker as rollouts and the command line meet it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.errors import ConfigError, RLJobError
from rl_core.api.job import RLJobSpec
from rl_core.api.settings import RuntimeSpec
from rl_core.envs.check import check_env
from rl_core.envs.worker import TextEnvWorker
from rl_core.messages.envs import EnvRow
from rl_core.rollouts.environment import RemoteEnvironment
from rl_core.transports.rpc import RpcServer

HOST = """
import asyncio, sys
from rl_core.envs.worker import TextEnvWorker
worker = TextEnvWorker({"type": "math", "processes": 2, "options": {"comparator": "exact"}})
print(*[process["pid"] for process in asyncio.run(worker.status())["processes"]], flush=True)
print("torch" in sys.modules, "transformers" in sys.modules, flush=True)
sys.stdin.read()
"""


def row(key, completion, metadata):
    messages = [{"role": "user", "content": "p"}, {"role": "assistant", "content": completion}]
    return EnvRow(key=key, messages=messages, metadata=metadata, task_name="math")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text(
        "import sys\n"
        "def score(prompts, completions, answer):\n"
        "    assert 'torch' not in sys.modules\n"
        "    return [float(c == a) for c, a in zip(completions, answer)]\n"
        "def level(prompts, completions, **columns):\n"
        "    return [float(column) for column in columns['level']]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def worker(folder):
    made = []

    def make(cfg, **options):
        made.append(TextEnvWorker(cfg, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


async def test_math_rows_are_scored_in_child_processes(worker):
    math = worker({"type": "math", "processes": 2})
    answers = await math.step_rows([row(f"k{n}", str(n), {"ground_truth": "3"}) for n in range(8)])
    assert [a.reward for a in answers] == [float(n == 3) for n in range(8)]
    assert answers[3].answer == "3"
    answers = await math.step_rows([row("k", "3", {"ground_truth": "3"}), row("l", "3", {})])
    assert answers[0].reward == 1.0
    assert answers[1].type == "RolloutDataFailure"
    assert (await math.status())["counters"]["data_failures"] == 1
    assert await math.health()


async def test_user_rewards_come_from_the_folder_of_the_job(worker):
    env = worker({"type": "reward", "reward": "my_reward:score"})
    answers = await env.step_rows([row("k", "4", {"answer": "4"}), row("l", "5", {"answer": "4"})])
    assert [a.reward for a in answers] == [1.0, 0.0]


async def test_a_closed_worker_refuses_and_has_no_processes(worker):
    env = worker({"type": "math", "options": {"comparator": "exact"}})
    (process,) = (await env.status())["processes"]
    env.close()
    env.close()
    assert not Path(f"/proc/{process['pid']}").exists()
    assert not await env.health()


def test_a_worker_whose_environment_cannot_be_built_says_why(worker):
    with pytest.raises(ConfigError, match=r"env\.options\.comparater: unknown field"):
        worker({"type": "math", "options": {"comparater": "exact"}})


def test_children_die_with_their_worker_and_nothing_loads_torch():
    host = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in host.stdout.readline().split()]
        assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
        assert host.stdout.readline().split() == ["False", "False"]
        os.kill(host.pid, signal.SIGKILL)
        host.wait()
        end = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < end, "an env child outlived its worker"
            time.sleep(0.02)
    finally:
        host.kill()
        host.communicate()


def spec(**env):
    return RLJobSpec.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "env": env})


def test_validate_finds_nothing_wrong_with_good_environments(folder, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    assert check_env(spec(type="math", options={"comparator": "numeric"})) == []
    assert check_env(spec(type="reward", reward="my_reward:score"), search_path=[str(folder)]) == []


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ({"type": "reward", "reward": "my_reward:scores"}, "spec.env.reward: must exist, got 'my_reward:scores'"),
        ({"type": "reward", "reward": "not_there:score"}, "spec.env.reward: must be importable, got 'not_there'"),
        ({"type": "my_reward:score"}, "spec.env.type: must name a class"),
        ({"type": "math", "options": {"limits": {"gpus": 1}}}, "spec.env.options.limits.gpus: unknown field, got 1"),
    ],
)
def test_validate_tells_what_cannot_be_built(folder, env, problem):
    (found,) = check_env(spec(**env), search_path=[str(folder)])
    assert found.startswith(problem)


def test_validate_lists_all_wrong_options(folder):
    found = check_env(spec(type="math", options={"comparater": 1, "correct": "yes"}))
    assert [line.partition(":")[0] for line in found] == ["spec.env.options.correct", "spec.env.options.comparater"]


def test_validate_does_not_wait_for_ever(folder):
    (folder / "endless.py").write_text("while True: pass")
    (found,) = check_env(spec(type="reward", reward="endless:score"), search_path=[str(folder)], deadline=1.0)
    assert found.startswith("spec.env.reward: reward endless:score: a process must be ready within")


def examples(*metadata):
    messages = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "0"}]
    return {
        f"data.train row {n}": EnvRow(key=str(n), messages=messages, metadata=columns, task_name="reward")
        for n, columns in enumerate(metadata, start=1)
    }


REWARDS = """
import time

def score(prompts, completions, answer):
    print("noise")
    return [float(completion == expected.strip()) for completion, expected in zip(completions, answer, strict=True)]
def short(prompts, completions):
    return [1.0]
async def late(prompts, completions):
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("reward", "columns", "problem"),
    [
        ("score", [{"answer": "4"}, {"answer": "5"}], None),
        ("score", [{"solution": "4"}], "called with data.train row 1: reward mine:score needs the column 'answer'"),
        ("score", [{"answer": "4"}, {"solution": "4"}], "called with data.train row 2: reward mine:score needs the column 'answer'"),
        ("score", [{"answer": None}], "it raised AttributeError: 'NoneType' object has no attribute 'strip' (mine.py:6 in <listcomp>)"),
        ("short", [{}, {}], "called with 2 rows: reward mine:short must return one score per completion (2), got 1"),
        ("late", [{}], "a step of 1 rows must end within runtime.deadlines.envStep = 2 s"),
    ],
)  # fmt: skip
def test_validate_calls_a_reward_function_with_rows_of_the_data(tmp_path, capfd, reward, columns, problem):
    (tmp_path / "mine.py").write_text(REWARDS)
    job = spec(type="reward", reward=f"mine:{reward}")
    if reward == "late":
        job = job.model_copy(update={"runtime": RuntimeSpec.model_validate({"deadlines": {"envStep": 2}})})
    found = check_env(job, search_path=str(tmp_path), examples=examples(*columns))
    assert len(found) == (problem is not None) and all(line.startswith("spec.env.reward: ") for line in found)
    assert problem is None or problem in found[0]
    assert capfd.readouterr().out == ""


def test_rows_with_the_same_columns_are_tried_in_one_call(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def slow(prompts, completions, **columns):\n"
        f"    print(len(prompts), file=open({str(tmp_path / 'calls')!r}, 'a'))\n"
        "    return [1.0] * len(prompts)\n"
    )
    job = spec(type="reward", reward="mine:slow")
    assert check_env(job, search_path=str(tmp_path), examples=examples(*[{"answer": "4"}] * 4, {})) == []
    assert (tmp_path / "calls").read_text().split() == ["4", "1"]


SEVERAL = """
from rl_core.envs.base import EnvironmentInterface, EnvironmentReturn

class Unweighted(EnvironmentInterface):
    def step(self, logs, metadata):
        rows = len(logs)
        rewards = {"right": [1.0] * rows, "length": [2.0] * rows}
        return EnvironmentReturn([{"role": "user", "content": ""}] * rows, list(metadata), None, rewards, [True] * rows, None)
class Weighted(Unweighted):
    reward_weights = {"right": 1.0, "length": 0.5}
def one(prompts, completions):
    return [1.0] * len(prompts)
def parts(prompts, completions):
    return [{"reward": 1.0, "parts": {"right": 1.0, "short": 0.5}} for _ in prompts]
def nothing(prompts, completions):
    return [None for _ in prompts]
"""


@pytest.mark.parametrize(
    ("env", "algorithm", "problem"),
    [
        ({"type": "mine:Unweighted"}, "grpo", "spec.env.type: rewards by name need reward_weights on the environment's class, got none for"),
        ({"type": "mine:Weighted"}, "gdpo", None),
        ({"type": "reward", "reward": "mine:one"}, "gdpo", "spec.algorithm.name: gdpo needs at least two rewards by name, got one reward without"),
        ({"type": "reward", "reward": "mine:parts"}, "gdpo", None),
    ],
    ids=["no weights", "weights", "one reward", "parts"],
)  # fmt: skip
def test_validate_tells_several_rewards_that_cannot_train(tmp_path, env, algorithm, problem):
    (tmp_path / "mine.py").write_text(SEVERAL)
    job = spec(**env)
    job = job.model_copy(update={"algorithm": AlgorithmSpec.model_validate({"name": algorithm})})
    found = check_env(job, search_path=str(tmp_path), examples=examples({}, {}))
    assert len(found) == (problem is not None) and (problem is None or found[0].startswith(problem)), found


def test_validate_warns_of_a_reward_that_gives_none_for_every_row(tmp_path):
    (tmp_path / "mine.py").write_text(SEVERAL)
    told = []
    job = spec(type="reward", reward="mine:nothing")
    assert check_env(job, search_path=str(tmp_path), examples=examples({}, {}), warn=told.append) == []
    (text,) = told
    assert "reward mine:nothing returned None for every row" in text and "data.train row 2" in text


GAME = """
from rl_core.envs.base import EnvironmentInterface, EnvironmentReturn

class Game(EnvironmentInterface):
    def step(self, logs, metadata):
        rows = len(logs)
        return EnvironmentReturn([{"role": "user", "content": "again"}] * rows, list(metadata), None, [0.0] * rows, [False] * rows, None)
class Declared(Game):
    max_turns = 3
"""


@pytest.mark.parametrize(
    ("name", "turns", "problem"),
    [
        ("Game", 1, "spec.env.maxTurns: must be given for mine:Game, which did not end the episode in its first step, got 1"),
        ("Game", 2, None),
        ("Declared", 2, "spec.env.maxTurns: must be at least 3, the max_turns that mine:Declared declares, got 2"),
        ("Declared", 3, None),
    ],
)  # fmt: skip
def test_an_environment_of_several_turns_is_not_cut_to_one_in_silence(tmp_path, name, turns, problem):
    (tmp_path / "mine.py").write_text(GAME)
    found = check_env(spec(type=f"mine:{name}", maxTurns=turns), search_path=str(tmp_path), examples=examples({}))
    assert [line[: len(problem)] for line in found] == [problem] if problem else found == []


async def test_rollouts_get_scores_masks_and_typed_failures_over_rpc(worker, folder):
    (folder / "trouble.py").write_text(
        "import time\n"
        "def score(prompts, completions, **columns):\n"
        "    if 'hang' in completions: time.sleep(3600)\n"
        "    return [{'nan': float('nan'), 'none': None}.get(c, 1.0) for c in completions]\n"
    )
    env = worker({"type": "reward", "reward": "trouble:score"}, deadlines={"envStep": 1.0})
    server = RpcServer("tcp://127.0.0.1:0", {"step_rows": env.step_rows})
    server.start()
    remote = RemoteEnvironment([server.address], step_seconds=1.0)

    async def ask(text):
        log = [{"role": "user", "content": "p"}, {"role": "assistant", "content": text}]
        try:
            return (await remote.step([log], [{"grid": (1, 2)}], keys=[f"g_{text}"])).rewards
        except RLJobError as error:
            return type(error).__name__

    try:
        found = await asyncio.gather(*map(ask, ["fine", "none", "nan", "hang", "good"]))
        assert found == [[1.0], [None], "RolloutDataFailure", "RolloutTimeout", [1.0]]
    finally:
        remote.close()
        server.close()


async def test_rows_whose_columns_do_not_fit_into_one_message_are_scored_all_the_same(worker, folder):
    (folder / "large.py").write_text(
        "def score(prompts, completions, tests):\n    return [float(len(test)) for test in tests]\n"
    )
    env = worker({"type": "reward", "reward": "large:score"})
    server = RpcServer("tcp://127.0.0.1:0", {"step_rows": env.step_rows})
    server.start()
    remote = RemoteEnvironment([server.address])
    sizes = [2_000_000 + n for n in range(40)]

    async def ask(size):
        log = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}]
        return (await remote.step([log], [{"tests": "x" * size}], keys=[f"g_{size}"])).rewards

    try:
        assert await asyncio.gather(*map(ask, sizes)) == [[float(size)] for size in sizes]
    finally:
        remote.close()
        server.close()
