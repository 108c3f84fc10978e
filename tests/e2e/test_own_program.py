"""A program and a group of the user in a real run: real hub, launcher, supervisors and processes."""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from rl_core.cli.local_control import connect
from tests import ROOT
from tests.e2e.harness import Run, rljob

CODE = """
import os, pathlib, time

from rl_core.runner.group_program import GroupProgram
from rl_core.workers.worker import Worker

FOLDER = pathlib.Path(__file__).parent


class Counter(Worker):
    def __init__(self, config):
        self.factor = config["factor"]

    def times(self, number):
        go, held = FOLDER / f"go-{number}", FOLDER / f"held-{number}"
        if number in (23, 33) and not go.exists():
            held.write_text(f"{self.rank} {os.getpid()}")
            while not go.exists():
                time.sleep(0.05)
        return self.factor * number


class Totals(GroupProgram):
    def __init__(self, run, saving, members):
        super().__init__(run, saving, members)
        self.totals = []
        saving.register("totals", self)

    def state_dict(self):
        return {"totals": self.totals}

    def load_state_dict(self, state):
        self.totals = state["totals"]

    def loop(self):
        for step in self.steps():
            with step as metrics:
                numbers = [10 * (self.progress.step + 1) + k for k in range(5)]
                self.totals.append(sum(self.each("counter", "times", numbers)))
                metrics["reward/mean"] = float(self.totals[-1])
                metrics["totals"] = float(len(self.totals))
"""
GROUP = {"name": "counter", "worker": "own:Counter", "replicas": 2, "config": {"factor": 3}}
SPEC = {
    "program": "own:Totals",
    "groups": [GROUP],
    "rollout": {"replicas": 0, "minReplicas": 0},
    "env": {"type": "math", "reward": None, "replicas": 0},
    "algorithm": {"steps": 3},
}


def total(step):
    return 3 * sum(10 * step + k for k in range(5))


def test_a_call_to_a_killed_member_goes_to_another_and_the_group_grows_while_it_runs(start):
    run = start(**SPEC)
    folder = run.job.parent
    (folder / "own.py").write_text(CODE)
    run.start()
    _, pid = map(int, run.until(lambda: _read(folder / "held-23"), "the call that is held").split())
    status = connect(run.output).status()
    assert counter(run) == (2, 2) and status["step"] == 1
    assert [role["name"] for role in status["roles"]] == ["actor", "rollout", "env", "counter"]
    assert {m["name"] for m in status["members"]} == {"actor:0", "counter:0", "counter:1"}
    scaled = rljob("scale", str(run.output), "--group", "counter", "--replicas", "3")
    assert scaled.returncode == 0, scaled.stderr
    refused = rljob("scale", str(run.output), "--group", "counters", "--replicas", "3")
    assert refused.returncode == 2 and "(rollout, env, counter), got counters" in " ".join(refused.stderr.split())
    os.kill(pid, signal.SIGKILL)
    (folder / "go-23").touch()
    run.until(lambda: counter(run) == (3, 3), "a third counter and the successor of the killed one")
    (folder / "go-33").touch()
    assert run.wait() == 0, run.text + run.logs()
    lines = run.lines("metrics.jsonl")
    assert [(line["step"], line["reward/mean"], line["totals"]) for line in lines] == [
        (step, total(step), step) for step in (1, 2, 3)
    ]
    assert lines[-1]["failures_total/counter/lost"] == 1 and lines[-1]["epoch"] == 0
    assert run.status()["checkpoint"]["lastStep"] == 3 and run.processes() == []


def test_an_interrupted_program_saves_the_state_that_it_registered_and_is_resumed_with_it(start):
    """The interrupt comes in the middle of a step, while the program waits for a call."""
    run = start(**SPEC)
    folder = run.job.parent
    (folder / "own.py").write_text(CODE)
    run.start()
    run.until(lambda: _read(folder / "held-23"), "the call that is held")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text + run.logs()
    assert run.status()["checkpoint"]["lastStep"] == 1 and run.processes() == []
    (folder / "go-23").touch()
    (folder / "go-33").touch()
    assert run.run("--resume", "auto") == 0, run.text + run.logs()
    lines = run.lines("metrics.jsonl")
    assert [(line["reward/mean"], line["totals"]) for line in lines] == [(total(step), step) for step in (1, 2, 3)]


BROKEN = """
import time

from rl_core.runner.group_program import GroupProgram
from rl_core.workers.worker import Worker


class Square(Worker):
    def __init__(self, config): ...

    def fail(self):
        raise KeyError("no such row")

    def hang_at(self, rank):
        while self.rank == rank:
            time.sleep(1)


class Fault(GroupProgram):
    def loop(self):
        for step in self.steps():
            with step as metrics:
                self.fault(self.run.groups["square"], metrics)


class Raises(Fault):
    def fault(self, group, metrics):
        metrics["reward/mean"] = 1 / 0


class MemberRaises(Fault):
    def fault(self, group, metrics):
        self.stops.wait(group.execute_on(1).fail())


class NoNumber(Fault):
    def fault(self, group, metrics):
        metrics["reward/mean"] = "high"


class MemberHangs(Fault):
    def fault(self, group, metrics):
        self.stops.wait(group.hang_at(1))


class Hangs(Fault):
    def fault(self, group, metrics):
        time.sleep(3600)


class Forgets(Fault):
    def fault(self, group, metrics):
        group.execute_on(0).fail()
        time.sleep(0.5)
"""


@pytest.mark.parametrize(
    ("program", "code", "message"),
    [
        ("Raises", 3, r"ZeroDivisionError: division by zero \(own.py:28 in fault\)"),
        ("MemberRaises", 3, "square rank 1: fail raised KeyError: 'no such row'"),
        ("NoNumber", 2, "metrics\\['reward/mean'\\] of a step must be a number, got 'high'"),
        ("MemberHangs", 3, r"stalled: WaitingForSquare: no progress .* runner waits for square \(hang_at at rank 1, "),
        (
            "Hangs",
            3,
            "stalled: WaitingForActor: no progress .* nobody declares a wait; the program runs own.py:\\d+ in fault",
        ),
        ("Forgets", 0, "square.fail failed and nobody waited for its result: RemoteError: square rank 0: fail raised"),
    ],
)
def test_what_is_wrong_with_a_program_is_reported_with_its_place_and_nothing_is_left(start, program, code, message):
    stall = {"seconds": 4.0 if "Hangs" in program else 300.0, "action": "FailJob"}
    group = {"name": "square", "worker": "own:Square", "replicas": 2}
    spec = SPEC | {"program": f"own:{program}", "groups": [group], "algorithm": {"steps": 1}}
    run = start(**spec, failurePolicy={"stall": stall, "maxRestarts": 0})
    (run.job.parent / "own.py").write_text(BROKEN)
    assert run.run() == code, run.text + run.logs()
    assert re.search(message, run.text if code else run.logs()), run.text + run.logs()
    assert run.processes() == []


KEYS = """
from rl_core.api.errors import RLJobError
from rl_core.runner.group_program import GroupProgram
from rl_core.workers.worker import Worker


class Vault(Worker):
    peer_methods = {"declared": frozenset({"open"})}

    def __init__(self, config): ...

    def where(self):
        return self.address

    def open(self):
        return "opened"

    def empty(self):
        return "empty"


class Caller(Worker):
    def __init__(self, config): ...

    def ask(self, address, method):
        try:
            return self.peer(address, "vault").call_sync(method, timeout=5)
        except RLJobError as error:
            return f"{type(error).__name__}: {error}"


class Ask(GroupProgram):
    def loop(self):
        groups = self.run.groups
        for step in self.steps():
            with step:
                [address] = self.stops.wait(groups["vault"].where())
                for group, method in (("declared", "open"), ("declared", "empty"), ("undeclared", "open")):
                    [answer] = self.stops.wait(groups[group].ask(address, method))
                    print(group, method, answer, flush=True)
"""


def test_a_group_answers_its_declared_callers_what_it_names_and_nobody_else(start):
    groups = [
        {"name": "vault", "worker": "own:Vault", "callers": ["declared"]},
        {"name": "declared", "worker": "own:Caller"},
        {"name": "undeclared", "worker": "own:Caller"},
    ]
    run = start(**SPEC | {"program": "own:Ask", "groups": groups, "algorithm": {"steps": 1}})
    (run.job.parent / "own.py").write_text(KEYS)
    assert run.run() == 0, run.text + run.logs()
    for line in (
        "declared open opened",
        "declared empty ConfigError: role declared may not call 'empty' of vault:0 at ",
        "undeclared open DeadlineExceeded: open at .* the server refused this process's key",
    ):
        assert re.search(line, run.logs()), run.logs()


MESSAGES = """
from rl_core.runner.group_program import GroupProgram
from rl_core.workers.worker import Worker


class Talker(Worker):
    def __init__(self, config): ...

    def tell(self, group):
        try:
            self.send([group] * 100_000, group, 0, timeout=30)
        except ValueError as error:
            return str(error)

    def pretend(self):
        try:
            self._mail._messages.channel.put("forged", key=("one:0", "other:0"), timeout=30)
        except ValueError as error:
            return str(error)

    def hear(self, group):
        return len(self.recv(group, 0, timeout=30))

    def all_hear(self):
        return self.broadcast("all", groups=["one", "other"], src=("one", 0), timeout=30)


class Talk(GroupProgram):
    def loop(self):
        one, other = self.run.groups["one"], self.run.groups["other"]
        for step in self.steps():
            with step:
                for call in (one.tell("other"), other.hear("one"), one.tell("otter"), other.pretend()):
                    print("got", *self.stops.wait(call), flush=True)
                calls = [one.all_hear(), other.all_hear()]
                print("got", *(self.stops.wait(call) for call in calls), flush=True)
"""


def test_members_of_a_job_send_by_name_as_themselves_and_to_groups_of_the_job_only(start):
    groups = [
        {"name": "one", "worker": "own:Talker", "callers": ["other"]},
        {"name": "other", "worker": "own:Talker", "callers": ["one"]},
    ]
    run = start(**SPEC | {"program": "own:Talk", "groups": groups, "algorithm": {"steps": 1}})
    (run.job.parent / "own.py").write_text(MESSAGES)
    assert run.run() == 0, run.text + run.logs()
    for line in (
        "got None",
        "got 100000",
        r"got group must be one of the job \(.*one, other.*\), got 'otter'",
        "got the key of group other permits to put messages of its own members only, got one:0 to other:0",
        r"got \['all'\] \['all'\]",
    ):
        assert re.search(line, run.logs()), run.logs()


def counter(run):
    """Return the counters that the job asks for and those that are ready, as the runner tells them now."""
    (role,) = [role for role in connect(run.output).status()["roles"] if role["name"] == "counter"]
    return role["desired"], role["ready"]


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_the_example_of_rejection_sampling_learns(tmp_path, tiny):
    example = ROOT / "examples" / "own_program"
    document = yaml.safe_load((example / "job.yaml").read_text())
    spec = document["spec"]
    spec["model"]["path"], spec["data"]["train"] = str(tiny / "model"), str(tiny / "data" / "train.jsonl")
    spec["algorithm"] |= {"promptsPerStep": 8, "steps": 8}
    sampler, learner = spec["groups"]
    sampler["config"] = {"reward": "reward:letter_a", "maxNewTokens": 8}
    learner["config"] = {"learningRate": 3.0e-3, "epochs": 4}
    run = Run(tmp_path / "run", document, python_path=tiny)
    shutil.copy(example / "program.py", run.job.parent)
    try:
        assert run.run() == 0, run.text + run.logs()
        rewards = [line["reward/mean"] for line in run.lines("metrics.jsonl")]
        assert len(rewards) == 8 and rewards[-1] > rewards[0] + 0.2, rewards
        assert all(line["reward/best"] >= line["reward/mean"] for line in run.lines("metrics.jsonl"))
    finally:
        run.end()
