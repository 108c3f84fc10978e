"""A whole local run of real processes (the runner only counts steps): who is restarted, who stays, what is told, what is left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_core.api.errors import ConfigError
from rl_core.api.failure import FailurePolicySpec, StallSpec
from rl_core.launch.local import LocalCluster
from rl_core.workers import processes
from tests import ROOT
from tests.integration.local_launcher import sample_plan


class Run:
    """An output folder and what happened in it."""

    def __init__(self, folder):
        self.folder = folder
        self.cluster = None

    def start(self, **options):
        self.cluster = LocalCluster(sample_plan(), workdir=self.folder, **options).start()
        return self

    def wish(self, **wishes):
        self.folder.mkdir(exist_ok=True)
        for name, value in wishes.items():
            (self.folder / name).write_text(json.dumps(value))
        return self

    def history(self, event=None):
        path = self.folder / "history.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if event in (None, line["event"])]

    def status(self):
        path = self.folder / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def pid(self, pod, role):
        entries = json.loads((self.folder / "processes.json").read_text())
        return next((e["pid"] for e in entries if f"-{pod}-" in e["pod"] and e["role"] == role), None)

    def until(self, condition, seconds=150):
        """Return the condition's value once it is true; looks every 20 ms."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            logs = "\n".join(path.read_text()[-3000:] for path in (self.folder / "logs").glob("*"))
            alive = time.monotonic() < deadline and self.status().get("phase") != "Failed"
            assert alive, f"{self.status()}\n{self.history()}\n{logs}"
            time.sleep(0.02)
        return found

    def runs(self, epoch=0, steps=3):
        return self.until(
            lambda: (s := self.status()).get("epoch") == epoch and s["phase"] == "Generating" and s["step"] >= steps
        )

    def left(self):
        return list(processes.with_environment(f"RLJOB_OUTPUT={self.folder}"))


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path / "out")
    yield made
    if made.cluster is not None:
        made.cluster.kill()
        made.cluster.wait(60)
    assert made.left() == []


def test_a_run_that_ends_by_itself_is_finished_and_leaves_files_but_no_process(run):
    code = LocalCluster(sample_plan(), workdir=run.wish(steps=5).folder).run()
    assert code == 0 and run.left() == []
    assert run.status()["phase"] == "Finished" and run.history("saved")[0]["step"] == 5
    assert json.loads((run.folder / "processes.json").read_text()) == []
    assert (run.folder / "logs/actor-0.log").exists() and (run.folder / "logs/rollout-0.log").exists()


def test_processes_json_holds_every_process_and_stop_saves_and_ends_all(run):
    run.start().runs()
    entries = json.loads((run.folder / "processes.json").read_text())
    assert [(e["pod"].partition("-")[2], e["role"], e["index"], e["rank"]) for e in entries] == [
        ("actor-0", "actor", 0, 0),
        ("actor-0", "channel", 0, 0),
        ("actor-0", "runner", 0, 0),
        ("actor-0", "supervisor", 0, None),
        ("rollout-0", "rollout", 0, 0),
        ("rollout-0", "supervisor", 0, None),
    ]
    assert sorted(e["pid"] for e in entries) == sorted(run.left())
    with pytest.raises(ConfigError, match="in use by another run"):
        LocalCluster(sample_plan(), workdir=run.folder).start()
    run.cluster.stop()
    assert run.cluster.wait(60) == 130 and len(run.history("saved")) == 1
    assert run.status()["failure"]["message"] == "stopped on request"


def test_a_killed_rollout_process_is_lost_at_once_and_replaced_and_nothing_else_restarts(run):
    run.start().runs()
    before = {kind: run.pid("actor", kind) for kind in ("runner", "channel", "actor")}
    os.kill(run.pid("rollout", "rollout"), signal.SIGKILL)
    lost = run.until(lambda: run.history("lost"))[0]
    assert lost["name"] == "rollout:0" and lost["reason"] == "its process ended with code 137"
    run.until(lambda: [h["incarnation"] for h in run.history("joined") if h["name"] == "rollout:0"] == [[0, 0], [0, 1]])

    os.kill(run.pid("rollout", "supervisor"), signal.SIGKILL)  # the whole pod
    run.until(lambda: [h["incarnation"] for h in run.history("joined") if h["name"] == "rollout:0"][-1] == [1, 0])
    assert {kind: run.pid("actor", kind) for kind in before} == before
    assert run.status()["epoch"] == 0 and run.cluster.restarts == 0


@pytest.mark.parametrize("victim", ["runner", "channel", "actor", "supervisor"])
def test_any_killed_part_of_the_gang_restarts_it_whole_under_a_new_epoch_while_rollouts_stay(run, victim):
    run.start().runs()
    gang = {kind: run.pid("actor", kind) for kind in ("runner", "channel", "actor", "supervisor")}
    rollout = run.pid("rollout", "rollout")
    os.kill(gang[victim], signal.SIGKILL)
    run.runs(epoch=1)
    after = {kind: run.pid("actor", kind) for kind in gang}
    assert not set(gang.values()) & set(after.values()) and None not in after.values()
    assert run.pid("rollout", "rollout") == rollout
    joined = [(h["epoch"], h["name"], h["incarnation"]) for h in run.history("joined") if h["epoch"] == 1]
    assert sorted(joined) == [(1, "actor:0", [1, 0]), (1, "rollout:0", [0, 0])]
    assert run.status()["resume"] == "auto" and run.status()["restarts"] == 1


def test_a_new_epoch_is_told_before_the_old_gang_is_ended_and_a_stall_restarts_it_once(run):
    run.start(policy=FailurePolicySpec(stall=StallSpec(action="RestartJob"))).runs()
    old = Path(f"/proc/{run.pid('actor', 'runner')}")
    told = []
    run.cluster._listeners.append(lambda status: told.append((status["phase"], status["epoch"], old.exists())))
    run.wish(stall={"reason": "Deadlock", "message": "who waits for whom", "since": 1000})
    run.until(lambda: run.history("joined") and run.history("joined")[-1]["epoch"] == 1)
    run.wish(stall=None)
    run.runs(epoch=1)
    assert [entry for entry in told if entry[0] == "Restarting"] == [("Restarting", 1, True)]
    assert run.cluster.restarts == 1 and run.cluster.epoch == 1


def test_a_restart_names_the_newest_checkpoint_though_the_runner_before_did_not_know_it_yet(run):
    run.wish(checkpoint={"lastStep": 2}).start().runs()
    said = []
    run.cluster._say = said.append
    run.until(lambda: run.status().get("checkpoint"))
    run.wish(checkpoint=None)  # as a runner that still loads
    os.kill(run.pid("actor", "actor"), signal.SIGKILL)
    run.runs(epoch=1)
    assert not run.status().get("checkpoint")
    os.kill(run.pid("actor", "runner"), signal.SIGKILL)
    run.runs(epoch=2)
    assert [line.partition(":")[0] for line in said] == ["restarting the actors from the newest checkpoint"] * 2


def test_bad_input_of_the_runner_ends_the_run_at_once_with_2(run):
    run.wish(bad_input=True).start()
    assert run.cluster.wait(60) == 2 and run.cluster.restarts == 0
    assert run.status()["phase"] == "Failed" and "runner ended with code 2" in run.status()["failure"]["message"]


def test_a_gang_that_keeps_failing_ends_the_run_when_its_restarts_are_used_up(run):
    run.wish(steps=0, code=3).start(policy=FailurePolicySpec(max_restarts=1))
    assert run.cluster.wait(60) == 3 and run.cluster.restarts == 1
    assert "maxRestarts" in run.status()["failure"]["message"] and run.status()["epoch"] == 1


def test_a_reported_stall_restarts_the_role_waited_for(run):
    run.start().runs()
    run.wish(stall={"reason": "WaitingForRollout", "message": "rollout:0 is silent", "since": 1000})
    run.until(lambda: [h["incarnation"] for h in run.history("joined") if h["name"] == "rollout:0"][-1] == [1, 0])
    run.wish(stall=None)
    assert run.status()["epoch"] == 0 and run.cluster.restarts == 0


def test_a_stop_ends_what_does_not_end_by_itself_within_its_grace(run):
    run.start().runs()
    os.kill(run.pid("actor", "runner"), signal.SIGSTOP)
    run.cluster.stop(grace=1.0)
    assert run.cluster.wait(100) == 130 and run.left() == [] and run.history("saved") == []


def test_a_kill_does_not_wait_for_what_a_stop_waits_for(run):
    run.start().runs()
    os.kill(run.pid("actor", "runner"), signal.SIGSTOP)
    run.cluster.stop(grace=1000.0)
    run.cluster.kill()
    assert run.cluster.wait(100) == 130 and run.left() == [] and run.history("saved") == []


@pytest.fixture
def launcher(run):
    """A launcher in a process of its own, up and counting."""
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.local_launcher", str(run.folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    run.until(lambda: (run.folder / "logs").is_dir())
    run.runs()
    yield started
    if started.poll() is None:
        started.kill()
    started.communicate()


def test_nothing_is_left_of_a_run_whose_launcher_is_killed(run, launcher):
    assert len(run.left()) == 6
    launcher.kill()
    run.until(lambda: run.left() == [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_the_first_signal_saves_and_ends_everything_with_130(run, launcher, number):
    launcher.send_signal(number)
    assert launcher.wait(60) == 130 and run.left() == []
    assert len(run.history("saved")) == 1 and "checkpoint" in launcher.stdout.read()


def test_a_second_ctrl_c_ends_at_once_what_would_not_end(run, launcher):
    os.kill(run.pid("actor", "runner"), signal.SIGSTOP)
    launcher.send_signal(signal.SIGINT)
    assert "again to end at once" in launcher.stdout.readline()
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60) == 130 and run.left() == [] and run.history("saved") == []
