"""Env child processes with user code that raises, hangs, dies, prints, lies and starts slowly: what the callers get."""

import asyncio
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rl_core.api.env import EnvSpec
from rl_core.api.errors import ConfigError, DeadlineExceeded, WorkerLost
from rl_core.envs.pool import EnvPool
from rl_core.envs.source import env_source
from rl_core.messages.envs import EnvAnswer, EnvFailure, EnvRow

STEP_SECONDS = 2.0
"""Deadline of a step where user code hangs; elsewhere none is met."""

USER_CODE = '''
import asyncio, ctypes, os, subprocess, sys, time

from rl_core.api.errors import GymTransportError
from rl_core.transports import pipe

class OutOfReach(GymTransportError): pass

def score(prompts, completions, **columns):
    """1 for each completion, unless one asks for trouble."""
    if "wrong length" in completions:
        return [1.0] * (len(completions) + 1)
    return [answer(completion) for completion in completions]

class Mute(Exception):
    def __str__(self): raise RuntimeError

def answer(completion):
    if completion == "raise": raise ZeroDivisionError("no reward")
    if completion == "undecodable": raise ValueError("row \\udcff")
    if completion == "mute": raise Mute
    if completion == "hang": time.sleep(3600)
    if completion == "spin":
        while True: pass
    if completion == "kill": os.kill(os.getpid(), 9)
    if completion == "crash": ctypes.string_at(0)
    if completion == "exit": sys.exit(3)
    if completion == "leave": os._exit(4)
    if completion == "nan": return float("nan")
    if completion == "none": return None
    if completion.startswith("fork"): return fork(completion)
    if completion == "huge error": raise ValueError("x" * (80 << 20))
    if completion == "huge score": return "x" * (80 << 20)
    if completion == "forge": os.write(int(sys.argv[1]), pipe.pack([]))
    if completion == "forge a number": os.write(int(sys.argv[1]), pipe.pack(1))
    if completion == "memory": return float(len(bytearray(1 << 32)))
    if completion.startswith("daemon "):
        say, path = "import os, time; print(os.getpid(), flush=True); time.sleep(3600)", completion.split()[1]
        subprocess.run(["sh", "-c", 'setsid "$0" -c "$1" > "$2" &', sys.executable, say, path], check=True)
        while not (os.path.exists(path) and os.path.getsize(path)): time.sleep(0.01)
    if completion == "orphan":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], stdin=subprocess.DEVNULL)
        time.sleep(3600)
    if completion == "print":
        print("garbage" * 1000)
        sys.stdout.buffer.write(bytes(range(256)) * 100)
        os.write(1, b"\\xff\\x00 raw")
        for fd in (3, 4, 5, 6):
            try: os.close(fd)
            except OSError: pass
    return 1.0

def fork(completion):
    pid = os.fork()
    if pid == 0:
        if completion == "fork exits": sys.exit(3)
        if completion == "fork raises": raise ValueError
        return 5.0
    return float(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

async def later(prompts, completions, **columns):
    await asyncio.sleep(0.01)
    return [2.0] * len(completions)

def batch_sizes(prompts, completions, **columns):
    time.sleep(0.05)
    return [float(len(completions))] * len(completions)

def where(prompts, completions, **columns):
    return [float(os.getpid())] * len(completions)

class Guess:
    """Counts the turns in its metadata and in its process, and ends after three."""

    def __init__(self, options):
        self.turns, self.last = options["turns"], {}

    def seed(self, n):
        self.n = n

    async def step(self, logs, metadata):
        turns = [m["turn"] + 1 for m in metadata]
        return (
            [{"role": "environment", "content": f"turn {turn} seed {self.n}"} for turn in turns],
            [{**m, "turn": turn, "pid": os.getpid()} for m, turn in zip(metadata, turns)],
            [["stop"]] * len(logs),
            {"turns": turns, "flat": [None] * len(logs)},
            [turn >= self.turns for turn in turns],
            None,
        )

class Weighted(Guess):
    reward_weights = {"turns": 0.5, "flat": 2}

class Away(Guess):
    def step(self, logs, metadata):
        raise OutOfReach("the judge is away")

class Leaves(Guess):
    def __init__(self, options):
        sys.exit(4)

class Unsendable(Guess):
    def step(self, logs, metadata):
        return ([{"role": "environment", "content": ""}] * len(logs), [{"seen": {1}}] * len(logs), None,
                [1.0] * len(logs), [True] * len(logs), None)
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "user_code.py").write_text(USER_CODE)
    (tmp_path / "slow_code.py").write_text("import time\ntime.sleep(3600)\ndef score(p, c): return [1.0] * len(c)\n")
    (tmp_path / "late_code.py").write_text("import time\ntime.sleep(0.5)\ndef score(p, c): return [1.0] * len(c)\n")
    return tmp_path


class Running:
    """A pool under test and the processes it told of."""

    def __init__(self, pool):
        self.pool = pool

    async def ask(self, *completions, key="s", **metadata):
        rows = [row(f"{key}{n}", text, metadata) for n, text in enumerate(completions)]
        answers = await self.pool.step_rows(rows)
        return [a.type if isinstance(a, EnvFailure) else a.reward for a in answers], answers

    @property
    def pids(self):
        return [p["pid"] for p in self.pool.status()["processes"]]


def row(key, completion, metadata=None):
    messages = [{"role": "user", "content": "p"}, {"role": "assistant", "content": completion}]
    return EnvRow(key=key, messages=messages, metadata=metadata or {}, task_name=None)


@pytest.fixture
async def start(folder):
    pools = []

    async def start(
        reward="user_code:score",
        *,
        processes=1,
        events=None,
        step_deadline=60.0,
        start_deadline=120.0,
        call_member=None,
        **fields,
    ):
        spec = EnvSpec(**({"type": "reward", "reward": reward} | fields)) if reward else EnvSpec(**fields)
        source = env_source(spec, seed=11, search_path=[str(folder)])
        pool = EnvPool(
            source,
            processes=processes,
            step_deadline=step_deadline,
            start_deadline=start_deadline,
            on_event=events,
            call_member=call_member,
        )
        await pool.start()
        pools.append(pool)
        return Running(pool)

    yield start
    for pool in pools:
        await pool.close()


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "condition was not reached"
        await asyncio.sleep(0.02)


async def test_good_rows_are_scored_and_none_masks(start):
    running = await start()
    rewards, answers = await running.ask("fine", "none", "fine", answer="x")
    assert rewards == [1.0, None, 1.0]
    assert answers[0] == EnvAnswer(
        observation={"role": "environment", "content": ""},
        metadata={"answer": "x"},
        stop_strings=None,
        reward=1.0,
        terminated=True,
        answer=None,
    )


@pytest.mark.parametrize(
    ("trouble", "cause"),
    [
        ("raise", "ZeroDivisionError: no reward (user_code.py:"),
        ("undecodable", "ValueError: row ? (user_code.py:"),
        ("mute", "Mute: (its text cannot be made: RuntimeError) (user_code.py:"),
        ("nan", "a score must be finite, got nan"),
        ("wrong length", "one score per completion (1), got 2"),
        ("exit", "SystemExit: 3"),
        ("huge error", "(83886080 characters)"),
        ("huge score", "a score must be a number or None, got 'xxx"),
    ],
)
async def test_a_failing_row_is_a_data_failure_and_its_siblings_are_scored(start, capfd, trouble, cause):
    running = await start()
    rewards, answers = await running.ask("fine", trouble, "fine")
    assert rewards == [1.0, "RolloutDataFailure", 1.0]
    message = answers[1].message
    assert "user_code:score" in message and cause in message
    assert running.pool.status()["processes"][0]["starts"] == 1
    assert trouble != "raise" or re.search(r'last\):\n.*user_code.py", line 13, in score\n', capfd.readouterr().out)


async def test_a_copy_that_user_code_forks_ends_and_answers_nothing(start):
    running = await start()
    for completion, code in (("fork", 0.0), ("fork exits", 3.0), ("fork raises", 1.0)):
        assert (await running.ask(completion, "fine"))[0] == [code, 1.0]
        assert (await running.ask("none", "fine"))[0] == [None, 1.0]
    assert running.pool.status()["processes"][0]["starts"] == 1


@pytest.mark.parametrize(
    ("forged", "cause"),
    [("forge", "answered 0 rows, asked for 1"), ("forge a number", "answered with int, which is no answer")],
)
async def test_an_answer_that_is_not_one_per_row_is_infrastructure_and_the_process_is_replaced(start, forged, cause):
    running = await start()
    rewards, answers = await running.ask(forged)
    assert rewards == ["InfrastructureError"] and cause in answers[0].message
    assert (await running.ask("fine"))[0] == [1.0]


async def test_an_error_of_a_type_of_the_users_own_counts_as_the_public_one_it_is(start):
    _, answers = await (await start(None, type="user_code:Away", options={"turns": 1})).ask("x")
    assert answers[0] == EnvFailure(type="GymTransportError", message="the judge is away")


async def test_a_class_that_ends_its_process_instead_of_being_built_is_a_config_error(start):
    with pytest.raises(ConfigError, match=r"env.type: .*user_code:Leaves.* SystemExit: 4"):
        await start(None, type="user_code:Leaves", options={"turns": 1})


async def test_a_hanging_row_times_out_then_is_bad_data_and_its_siblings_are_scored(start):
    running = await start(step_deadline=STEP_SECONDS)
    first = running.pids[0]
    rewards, answers = await running.ask("fine", "hang", "fine")
    assert rewards == [1.0, "RolloutTimeout", 1.0]
    assert "runtime.deadlines.envStep = 2 s" in answers[1].message
    assert gone(first)
    rewards, answers = await running.ask("fine", "hang", "fine")
    assert rewards == [1.0, "RolloutDataFailure", 1.0]
    assert "2 times with this sample" in answers[1].message


async def test_an_environment_that_always_hangs_is_not_tried_with_every_row(start):
    running = await start(step_deadline=STEP_SECONDS)
    rewards, answers = await running.ask(*["hang"] * 12)
    assert rewards == ["RolloutTimeout"] * 12
    assert running.pool.counters["timeouts"] == 3
    assert "so did the 2 calls before it" in answers[-1].message
    assert (await running.ask("fine", key="other"))[0] == [1.0]


@pytest.mark.parametrize(
    ("trouble", "how"), [("kill", "killed by SIGKILL"), ("crash", "killed by SIGSEGV"), ("leave", "exit code 4")]
)
async def test_a_row_that_ends_its_process_is_infrastructure_and_its_siblings_are_scored(start, trouble, how):
    running = await start(processes=2)
    rewards, answers = await running.ask("fine", "fine", trouble, "fine")
    assert rewards == [1.0, 1.0, "InfrastructureError", 1.0]
    assert how in answers[2].message
    assert (await running.ask("fine"))[0] == [1.0]


async def test_a_sample_that_ends_its_process_three_times_is_bad_data(start):
    running = await start()
    kinds = [(await running.ask("leave"))[0][0] for _ in range(3)]
    assert kinds == ["InfrastructureError", "InfrastructureError", "RolloutDataFailure"]


async def test_a_process_killed_from_outside_costs_the_rows_of_a_batch_nothing(start):
    running = await start("user_code:batch_sizes")
    call = asyncio.create_task(running.ask(*["fine"] * 4))
    await wait_until(lambda: running.pool.status()["processes"][0]["busy_seconds"] is not None)
    os.kill(running.pids[0], signal.SIGKILL)
    rewards, _ = await call
    assert rewards == [1.0] * 4


async def test_a_process_killed_while_idle_is_replaced_before_it_is_needed(start):
    events = []
    running = await start(events=lambda *event: events.append(event))
    first = running.pids[0]
    os.kill(first, signal.SIGKILL)
    await wait_until(lambda: running.pids[0] not in (first, None))
    assert events == [("started", first, 0), ("ended", first, 0), ("started", running.pids[0], 0)]
    assert (await running.ask("fine"))[0] == [1.0]


async def test_what_user_code_prints_and_closes_does_not_touch_the_protocol(start, capfd):
    running = await start()
    rewards, _ = await running.ask("print", "fine")
    assert rewards[1] == 1.0
    assert (await running.ask("fine"))[0] == [1.0]
    assert "garbage" in capfd.readouterr().out


async def test_asynchronous_rewards_are_awaited(start):
    assert (await (await start("user_code:later")).ask("a", "b"))[0] == [2.0, 2.0]


async def test_rows_of_concurrent_calls_share_a_call_of_user_code(start):
    running = await start("user_code:batch_sizes")
    found = await asyncio.gather(*(running.ask("x", key=f"k{n}-") for n in range(40)))
    assert max(rewards[0] for rewards, _ in found) >= 20
    assert running.pool.counters["calls"] <= 5


async def test_rows_are_spread_over_the_processes(start):
    running = await start("user_code:where", processes=2)
    rewards, _ = await running.ask(*["x"] * 8)
    assert {int(pid) for pid in rewards} == set(running.pids)


async def test_a_user_class_keeps_its_state_in_metadata_and_a_sample_stays_in_its_process(start):
    running = await start(None, type="user_code:Guess", options={"turns": 3}, processes=2)
    rows = [row(f"k{n}", "x", {"turn": 0}) for n in range(4)]
    pids = []
    for turn in (1, 2, 3):
        answers = await running.pool.step_rows(rows)
        assert [a.observation["content"] for a in answers] == [f"turn {turn} seed 11"] * 4
        assert [a.reward for a in answers] == [{"turns": float(turn), "flat": None}] * 4
        assert [a.stop_strings for a in answers] == [["stop"]] * 4
        assert [a.terminated for a in answers] == [turn == 3] * 4
        pids.append([a.metadata["pid"] for a in answers])
        rows = [replace(r, metadata=a.metadata) for r, a in zip(rows, answers, strict=True)]
    assert pids[0] == pids[1] == pids[2]


async def test_rewards_by_name_come_with_the_weights_of_the_class(start):
    running = await start(None, type="user_code:Weighted", options={"turns": 1})
    _, answers = await running.ask("x", turn=0)
    assert answers[0].reward == {"turns": 1.0, "flat": None}
    assert answers[0].reward_weights == {"turns": 0.5, "flat": 2.0}


async def test_metadata_that_cannot_travel_is_a_data_failure_with_its_path(start):
    running = await start(None, type="user_code:Unsendable", options={"turns": 1})
    _, answers = await running.ask("x")
    assert answers[0].type == "RolloutDataFailure"
    assert "set at [0].metadata.seen" in answers[0].message
    _, answers = await running.ask("x", value={1, 2})
    assert answers[0].type == "RolloutDataFailure"
    assert "metadata cannot travel" in answers[0].message


async def test_what_user_code_started_dies_with_it(start):
    running = await start(step_deadline=STEP_SECONDS)
    pid = running.pids[0]
    call = asyncio.create_task(running.ask("orphan"))
    children, found = Path(f"/proc/{pid}/task/{pid}/children"), []
    await wait_until(lambda: found.extend(children.read_text().split()) or found)
    orphan = int(found[0])
    assert (await call)[0] == ["RolloutTimeout"]
    await wait_until(lambda: gone(orphan))


@pytest.mark.parametrize("end", ["kill", "leave", "hang"])
async def test_a_daemon_lives_as_long_as_the_process_whose_code_started_it(start, tmp_path, end):
    """A program in a session of its own, whose parent has ended: no signal to a group and no walk down the tree finds it."""
    running = await start(step_deadline=STEP_SECONDS)
    told = tmp_path / "pid"
    assert (await running.ask(f"daemon {told}"))[0] == [1.0]
    daemon = int(told.read_text())
    assert (await running.ask("fine"))[0] == [1.0] and not gone(daemon)
    await running.ask(end)
    await wait_until(lambda: gone(daemon))
    assert (await running.ask("fine"))[0] == [1.0]


async def test_a_caller_that_gives_up_leaves_no_row_behind(start):
    running = await start(step_deadline=STEP_SECONDS)
    call = asyncio.create_task(running.ask("hang"))
    queued = asyncio.create_task(running.ask("fine", key="q"))
    await wait_until(lambda: running.pool.status()["processes"][0]["busy_seconds"] is not None)
    for task in (call, queued):
        task.cancel()
    await asyncio.gather(call, queued, return_exceptions=True)
    assert (await running.ask("fine"))[0] == [1.0]
    assert running.pool.status()["queued"] == 0


async def test_limits_bound_memory_and_cpu_of_a_step(start):
    running = await start(options={"limits": {"memoryBytes": 3 << 30, "cpuSeconds": 1}}, step_deadline=STEP_SECONDS)
    rewards, answers = await running.ask("memory")
    assert rewards == ["RolloutDataFailure"] and "MemoryError" in answers[0].message
    rewards, answers = await running.ask("spin", key="c")
    assert rewards[0] in (
        "InfrastructureError",
        "RolloutTimeout",
    )  # SIGXCPU, unless the machine gave it too little time
    assert (await running.ask("fine"))[0] == [1.0]


async def test_a_slow_import_is_waited_for_and_an_endless_one_is_an_error_with_the_way_out(start):
    assert (await (await start("late_code:score")).ask("x"))[0] == [1.0]
    with pytest.raises(DeadlineExceeded, match=r"slow_code:score.*envReset = 1 s.*import less"):
        await start("slow_code:score", start_deadline=1.0)


async def test_code_that_cannot_be_imported_is_a_config_error(start):
    with pytest.raises(ConfigError, match="user_code has no 'scores'; it defines"):
        await start("user_code:scores", processes=2)


async def test_rows_fail_as_infrastructure_when_no_process_can_be_started_again(start, folder):
    running = await start()
    (folder / "user_code.py").write_text("raise ImportError('the disk went away')")
    os.kill(running.pids[0], signal.SIGKILL)
    await wait_until(lambda: running.pids == [None])
    rewards, answers = await running.ask("fine")
    assert rewards == ["InfrastructureError"]
    assert "the disk went away" in answers[0].message


async def test_closing_answers_the_rows_that_wait(start):
    running = await start()
    calls = [asyncio.create_task(running.ask("hang", key=str(n))) for n in range(3)]
    await wait_until(lambda: running.pool.status()["processes"][0]["busy_seconds"] is not None)
    pid = running.pids[0]
    await running.pool.close()
    assert [(await call)[0] for call in calls] == [["InfrastructureError"]] * 3
    assert gone(pid)


class Groups:
    """Stands in for the env worker's calls to groups of the job."""

    def __init__(self):
        self.calls = []

    async def __call__(self, call):
        self.calls.append((call.group, call.method, len(call.arguments[0])))
        if any(row["columns"] == {"answer": "nobody there"} for row in call.arguments[0]):
            raise WorkerLost("reward-model.score was lost with 3 members")
        texts = [row["messages"][-1]["content"] for row in call.arguments[0]]
        return [{"error": "no verdict"} if text == "odd" else float(len(text)) for text in texts]


async def test_a_group_of_the_job_scores_the_rows_and_its_failures_are_never_rewards(start):
    groups = Groups()
    scored = {"reward": None, "type": "reward_model", "options": {"group": "reward-model"}}
    run = await start(call_member=groups, **scored)
    assert (await run.ask("four", "to"))[0] == [4.0, 2.0]
    assert groups.calls == [("reward-model", "score", 2)]
    rewards, answers = await run.ask("fine", "odd", key="t")
    assert rewards == [4.0, "RolloutDataFailure"] and "no verdict" in answers[1].message
    groups.calls.clear()
    rewards, answers = await run.ask("one", "two", key="u", answer="nobody there")
    assert rewards == ["WorkerLost"] * 2 and "3 members" in answers[0].message
    assert len(groups.calls) == 1, "a group that is away is no row's fault: rows are not tried alone"
    scored["options"]["onFailure"] = "mask"
    run = await start(call_member=groups, **scored)
    assert (await run.ask("fine", "odd", key="v"))[0] == [4.0, None]


async def test_outside_a_job_a_call_to_a_group_is_refused(start):
    run = await start(reward=None, type="reward_model", options={"group": "judge"})
    rewards, answers = await run.ask("any")
    assert rewards == ["ConfigError"] and "calls judge.score, but no group of a job" in answers[0].message
