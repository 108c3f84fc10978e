"""`kill -9` in mid-step of every kind of process: the run ends well and no group is trained twice."""

import json
import os
import signal

import pytest

from rl_core.cli.local_control import connect
from tests.e2e import later_version
from tests.e2e.harness import assert_nothing_left, assert_trained_once

QUIET = {"everySteps": 1000, "beforeTraining": False}


def test_each_kind_of_process_is_killed_in_turn_and_every_group_is_trained_once(start):
    """A rollout and an env are replaced in the same epoch. Each part of the gang restarts the gang from the newest checkpoint under a new
    epoch, and the rollouts stay."""
    run = start(pause=0.2, algorithm={"steps": 4000}, rollout={"replicas": 2}, validation=QUIET)
    run.start()
    run.at_step(2)
    for match in ({"role": "rollout", "index": 1}, {"role": "env"}):
        pid = run.kill(**match)
        run.until(lambda: [p for p in run.processes(**match) if p["pid"] != pid], "a replacement")  # noqa: B023
    run.at_step(run.live_step() + 2)
    assert run.status()["epoch"] == 0
    rollouts = {p["pid"] for p in run.processes(role="rollout")}
    for epoch, role in enumerate(("runner", "channel", "actor"), 1):
        run.at_step(run.live_step() + 3)
        run.kill(role=role)
        run.until(lambda: run.status().get("epoch") == epoch, f"epoch {epoch}")  # noqa: B023
        run.until(lambda: run.lines("ledger.jsonl")[-1]["epoch"] == epoch, f"a step of epoch {epoch}")  # noqa: B023
        assert {p["pid"] for p in run.processes(role="rollout")} == rollouts
    last = run.end_soon()
    assert "rollout-1 ended by signal SIGKILL (code 137): started again" in run.text
    assert_trained_once(run, steps=last, groups=4)
    epochs = [line["epoch"] for line in run.lines("ledger.jsonl")]
    assert epochs == sorted(epochs) and (epochs[0], epochs[-1]) == (0, 3)


def test_a_gang_killed_before_its_first_checkpoint_begins_again_and_the_files_with_it(start):
    """Processes that are stopped meanwhile are named at once and taken back, and what happened in the first epoch is not forgotten in
    the second."""
    run = start(
        algorithm={"steps": 15},
        checkpoint={"everySteps": 100},
        validation=QUIET,
        runtime={"deadlines": {"heartbeat": 0.5, "suspect": 1.5}},
    )
    run.start()
    run.at_step(2)
    stopped = [run.processes(role=role)[0]["pid"] for role in ("env", "actor", "channel")]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    silent = {("hub", "env:0"), ("hub", "actor:0")}
    run.until(lambda: silent <= {(w["who"], w["on"]) for w in run.status()["waits"]}, "the silent ones")
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    run.at_step(3)
    assert run.status()["epoch"] == 0 and set(stopped) <= {p["pid"] for p in run.processes()}
    run.kill(role="actor")
    assert run.wait() == 0, run.text + run.logs()
    assert "env:0 has been silent for" in run.text and run.status()["failures"]["actor/restart"] == 1
    assert "restarting the actors at step 0, as there is no checkpoint yet: " in run.text
    assert_trained_once(run, steps=15, groups=4)
    assert {line["epoch"] for line in run.lines("ledger.jsonl")} == {1}


def test_a_run_that_begins_from_another_one_has_its_ledger_and_restarts_there_until_it_has_saved(start, tmp_path):
    """The other one is of an earlier version, which lacked a field of `algorithm`; so are the rollouts of this one, whose image is older."""
    first = start(algorithm={"steps": 2}, validation=QUIET, folder="first")
    assert first.run() == 0, first.text + first.logs()
    run = start(
        algorithm={"steps": 15},
        checkpoint={"everySteps": 100, "resumeFrom": {"job": "out", "step": 2}},
        rollout={"env": {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(later_version.ROOT)}},
        validation=QUIET,
        folder="second",
    )
    run.output, run.tree = first.output.with_name("second"), later_version.build(tmp_path / "later")
    run.start()
    run.at_step(4)
    run.kill(role="actor")
    assert run.wait() == 0, run.text + run.logs()
    assert_trained_once(run, steps=15, groups=4)
    ledger, before = run.lines("ledger.jsonl"), first.lines("ledger.jsonl")
    assert json.loads((run.output / ".rljob/job.json").read_text())["spec"]["algorithm"]["laterField"] == 3
    assert ledger[: len(before)] == before and {line["epoch"] for line in ledger[len(before) :]} == {1}


def test_restarts_are_bounded(start):
    run = start(
        algorithm={"steps": 200},
        failurePolicy={"maxRestarts": 0},
        validation=QUIET,
    )
    run.start()
    run.at_step(1)
    run.kill(role="actor")
    assert run.wait() == 3
    assert "maxRestarts" in run.text


def history(run):
    """Return what must be equal between two runs: per step the groups, and the rewards."""
    groups = sorted((line["step"], line["group_id"], line["attempt"] >= 1) for line in run.lines("ledger.jsonl"))
    rewards = [(line["step"], line["reward/mean"]) for line in run.lines("metrics.jsonl") if line["step"]]
    return groups, rewards


def test_with_per_group_batching_a_disturbed_run_trains_the_same_groups_with_the_same_rewards(start):
    """A rollout is killed, the run is suspended and resumed, and the actor is killed while checkpoints are saved in the background."""
    spec = {
        "algorithm": {"steps": 15},
        "rollout": {"replicas": 2, "batching": "perGroup"},
        "checkpoint": {"everySteps": None},
        "validation": QUIET,
    }
    calm = start(folder="calm", **spec)
    assert calm.run() == 0, calm.text + calm.logs()
    disturbed = start(folder="disturbed", **spec)
    disturbed.start()
    disturbed.at_step(2)
    disturbed.kill(role="rollout", index=0)
    disturbed.at_step(4)
    pids = [entry["pid"] for entry in disturbed.processes()]
    assert connect(disturbed.output).finish("suspend")
    assert disturbed.wait() == 0, disturbed.text + disturbed.logs()
    status = disturbed.status()
    assert status["phase"] == "Suspended" and status["suspended"] and 4 <= status["step"] < 12
    assert status["epoch"] == 0 and status["checkpoint"]["lastStep"] == status["step"]
    assert not (disturbed.output / "model").exists()
    assert_nothing_left(disturbed, pids)
    saving = ("checkpoint.everySteps=1", "checkpoint.asynchronous=true")
    disturbed.start("--resume", "auto", *(word for change in saving for word in ("--set", change)))
    disturbed.at_step(status["step"] + 2)
    disturbed.kill(role="actor")
    assert disturbed.wait() == 0, disturbed.text + disturbed.logs()
    assert disturbed.status()["epoch"] > 0 and disturbed.status()["phase"] == "Finished"
    groups, rewards = history(calm)
    assert history(disturbed)[0] == groups
    assert [value for _, value in history(disturbed)[1]] == pytest.approx([value for _, value in rewards], abs=1e-6)


def test_a_full_disk_costs_older_checkpoints_before_their_time_and_neither_a_step_nor_the_newest(start, small_disk):
    run = start(
        algorithm={"steps": 8},
        actor={"processesPerPod": 2},  # both meet the disk
        checkpoint={"everySteps": 1, "keep": 40, "path": str(small_disk)},
    )
    assert run.run() == 0, run.text + run.logs()
    assert "deleted before its time to make room" in run.text and "Traceback" not in run.text, run.text
    assert run.status()["epoch"] == 0 and run.status()["checkpoint"]["deletedForRoom"]
    assert (run.status()["checkpoint"]["lastStep"], run.status()["checkpoint"]["lag"]) == (8, 0)
    assert_trained_once(run, steps=8, groups=4)
    assert (run.output / "model/model.safetensors").is_file()
    complete = [path for path in small_disk.glob("step-*") if (path / "manifest.json").is_file()]
    assert small_disk / "step-00000008" in complete and not list(small_disk.glob(".step-*"))
    for path in complete:
        manifest = json.loads((path / "manifest.json").read_text())
        assert all((path / name).stat().st_size == file["bytes"] for name, file in manifest["files"].items())


def test_a_full_output_folder_holds_the_run_until_there_is_room(start, small_disk):
    """What is left holds the start; ledger and metrics use it up, and the last checkpoint and the model find no room at all."""
    filler = small_disk / "filler"
    filler.write_bytes(bytes((4 << 20) - (400 << 10)))
    checkpoints = {"everySteps": 1000, "path": str(small_disk / "saved")}
    run = start(algorithm={"steps": 60}, checkpoint=checkpoints)
    run.output = small_disk / "out"
    run.start()
    run.at_step(1)
    runner = connect(run.output)  # no status.json can be written either
    run.until(lambda: ((runner.status() or {}).get("checkpoint") or {}).get("error"), "a write that is refused")
    filler.unlink()
    assert run.wait() == 0, run.text + run.logs()
    assert_trained_once(run, steps=60, groups=4)
    assert run.status()["epoch"] == 0 and (run.output / "model/model.safetensors").is_file()


def test_a_stall_is_found_named_and_acted_on(start, tmp_path, tiny):
    """A reward that hangs once, with deadlines too long to help: the stall rule restarts what is waited for."""
    (tmp_path / "hang.py").write_text(
        "import os, pathlib, time\n"
        "MARK = pathlib.Path(__file__).with_suffix('.done')\n\n"
        "def reward(prompts, completions, **columns):\n"
        "    if 'RLJOB_OUTPUT' in os.environ and not MARK.exists():\n"  # not when `rljob run` tries it at first
        "        MARK.touch()\n"
        "        time.sleep(3600)\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    run = start(
        algorithm={"steps": 3},
        env={"type": "reward", "reward": "hang:reward"},
        runtime={"deadlines": {"envStep": 1000.0}},
        failurePolicy={"stall": {"seconds": 8.0}},
        validation=QUIET,
    )
    run.env["PYTHONPATH"] = str(tmp_path)
    run.start()
    named = lambda: {(w["who"], w["on"]) for w in run.status().get("waits", [])} >= {("env:0", "env:0/child-0")}  # noqa: E731
    run.until(named, "the wait for the process that hangs")
    assert run.status()["stall"] is None
    stall = run.until(lambda: run.status().get("stall"), "a stall")
    assert stall["reason"] == "WaitingForEnv" and "env" in stall["message"]
    assert run.wait() == 0, run.text + run.logs()
    assert_trained_once(run, steps=3, groups=4)
