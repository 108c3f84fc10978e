"""What `rljob run|status|top` tell a person about a local run beyond its numbers."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rl_core.api.job import RLJob
from rl_core.api.validation_metric import ACCURACY, REWARD, validation_metric
from rl_core.cli.local_view import read_status, render, show_top
from rl_core.cli.main import app
from rl_core.cli.progress import ProgressDisplay, step_line, waiting_line
from rl_core.cli.run import read_step, success_text
from rl_core.launch.workspace import Workspace


@pytest.fixture
def space(tmp_path):
    space = Workspace(tmp_path)
    space.open(uid="u", job=None)
    yield space
    space.close()


def tell(space, **status):
    (space.folder / "status.json").write_text(json.dumps(status))


def test_a_run_is_told_as_it_says_while_its_launcher_lives(space):
    tell(space, phase="Generating", step=3)
    assert read_status(space.folder) == {"phase": "Generating", "step": 3}


def test_a_run_whose_launcher_was_killed_is_failed_and_says_how_to_go_on(space):
    tell(space, phase="Generating", step=3)
    space.close()
    status = read_status(space.folder)
    assert status["phase"] == "Failed" and "--resume auto" in status["failure"]["message"]


def test_a_run_that_told_its_end_keeps_it(space):
    tell(space, phase="Finished", step=3)
    space.close()
    assert read_status(space.folder) == {"phase": "Finished", "step": 3}


@pytest.mark.parametrize(
    ("phases", "told"),
    [(("Generating", "Training", "Failed"), 1), (("Failed",), 0), (("Restarting",), 0)],
    ids=["goes on", "has ended", "last status of the epoch before"],
)
def test_a_refused_checkpoint_is_told_once_while_the_run_goes_on(tmp_path, capsys, phases, told):
    refused = {"checkpoint": {"error": "step 2: No space left on device"}}
    display = ProgressDisplay(tmp_path, total=4, live=False)
    for phase in phases:
        display.update({"phase": phase, "step": 2, **refused})
    assert capsys.readouterr().out.count("No space left") == told


def test_a_line_that_is_none_does_not_end_the_lines_of_the_steps(tmp_path, capsys):
    lines = ['{"step": 1, "reward/mean": 0.5}', '{"step": 2, "rew', 'mean": 0.5}', "7", '{"step": 3}']
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    display = ProgressDisplay(tmp_path, total=4, live=False)
    display._ended.set()
    display._follow(0)
    shown = capsys.readouterr().out
    assert [step for step in (1, 2, 3) if f"step {step}/4" in shown] == [1, 3]


def test_the_step_of_a_run_that_was_ended_before_it_had_resumed_is_that_of_its_history(space):
    tell(space, phase="Finished", step=0)
    (space.folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_step(space.folder) == 2
    (space.folder / "metrics.jsonl").unlink()
    assert read_step(space.folder) == 0
    (space.folder / "status.json").unlink()
    assert read_step(space.folder) == "?"


@pytest.mark.parametrize(
    ("use", "holders", "row"),
    [
        ("generating", [{"name": "rollout:0", "expiresIn": 13.0}], ["generating", "rollout:0", "2.5", "s", "13.0", "s", "7"]),
        (None, [], ["a", "hand-over", "nobody", "2.5", "s", "-", "s", "7"]),
    ],
    ids=["held", "moving"],
)  # fmt: skip
def test_top_shows_who_has_the_devices_that_roles_share(use, holders, row):
    devices = {"use": use, "token": 7, "seconds": 2.5, "handOverSeconds": 0.1, "holders": holders}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render({"phase": "Generating", "devices": devices}))
    assert row in [line.split() for line in console.export_text().splitlines()]


def test_top_shows_who_holds_how_many_groups_and_the_oldest_of_each():
    groups = [
        {"id": "0-1", "state": "leased", "owner": "rollout:0 (0.0)", "seconds": 2.0, "attempt": 1},
        {"id": "0-2", "state": "leased", "owner": "rollout:0 (0.0)", "seconds": 9.0, "attempt": 3},
        {"id": "0-3", "state": "consumed", "owner": None, "seconds": 1.0, "attempt": 1},
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render({"phase": "Generating", "ledger": {"groups": groups}}))
    rows = [line.split() for line in console.export_text().splitlines() if "0-" in line]
    assert rows == [
        ["rollout:0", "(0.0)", "2", "0-2", "9.0", "s", "3"],
        ["consumed", "1", "0-3", "1.0", "s", "1"],
    ]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_quiet_run_says_every_five_seconds_what_it_waits_for(tmp_path, capsys):
    clock = Clock()
    display = ProgressDisplay(tmp_path, total=4, live=False, clock=clock)
    for clock.now in (4.0, 5.0, 6.0, 10.0):
        display.tell_waiting()
    wait = {"who": "runner", "on": "rollout-0", "what": "load of the model", "seconds": 11.2}
    display.update({"phase": "Starting", "step": 0, "waits": [wait]})
    for clock.now in (14.0, 15.0):
        display.tell_waiting()
    lines = capsys.readouterr().out.splitlines()
    assert [line[10:] for line in lines] == [
        "starting for 5 s: the runner loads its libraries",
        "starting for 10 s: the runner loads its libraries",
        "Starting: runner waits for rollout-0: load of the model (11 s)",
    ]


def test_a_run_that_is_ending_no_longer_reports_what_it_waits_for(tmp_path, capsys):
    clock, ending = Clock(), []
    display = ProgressDisplay(tmp_path, total=4, live=False, clock=clock, ending=lambda: bool(ending))
    silent = {"who": "hub", "on": "rollout-0", "what": "a heartbeat", "seconds": 6.0}
    missing = [{"name": "rollout-0", "pod": "a-rollout-0", "role": "rollout", "since": 1.0}]
    display.update({"phase": "Training", "step": 2})
    clock.now = 5.0
    display.tell_waiting()
    assert "Training, step 2" in capsys.readouterr().out
    ending.append(True)
    clock.now = 60.0
    display.tell_waiting()
    display.update({"phase": "Degraded", "step": 2, "missing": missing, "waits": [silent]})
    clock.now = 120.0
    display.tell_waiting()
    assert capsys.readouterr().out == ""


def test_samples_of_a_folder_that_is_no_output_folder_are_refused(tmp_path):
    (tmp_path / "job.yaml").write_text("kind: RLJob\n")
    result = CliRunner().invoke(app, ["samples", str(tmp_path)])
    assert result.exit_code == 2 and f"{tmp_path} must be the output folder of a run" in result.stderr
    (tmp_path / "status.json").write_text('{"phase": "Pending"}')
    result = CliRunner().invoke(app, ["samples", str(tmp_path)])
    assert result.exit_code == 2 and "must hold samples that match, got none" in result.stderr


def test_a_disabled_tracker_is_reported_once_with_the_reason(tmp_path, capsys):
    display = ProgressDisplay(tmp_path, total=4, live=False)
    for _ in range(2):
        display.update({"phase": "Training", "step": 1, "disabledTrackers": {"wandb": "UsageError: No API key"}})
    assert capsys.readouterr().out == (
        "tracker wandb is disabled, its metrics are in metrics.jsonl only: UsageError: No API key\n"
    )
    display.update({"phase": "Training", "step": 2, "disabledTrackers": {"jsonl": "TypeError: no JSON"}})
    assert capsys.readouterr().out == (
        "tracker jsonl is disabled, metrics.jsonl lacks the further steps: TypeError: no JSON\n"
    )


def test_a_wait_for_weights_in_a_start_is_no_line_of_its_own(tmp_path, capsys):
    display = ProgressDisplay(tmp_path, total=4, live=False)
    wait = {"who": "runner", "on": "rollout:", "what": "to serve version 74", "seconds": 0.0}
    display.update({"phase": "Degraded", "step": 74, "waits": [wait]})
    assert capsys.readouterr().out == ""


def test_a_step_in_which_nothing_can_be_learned_from_the_rewards_says_so():
    assert "all rewards are equal" in step_line({"step": 1, "reward/mean": 0.5, "reward/std": 0.0}, 2)
    assert "equal" not in step_line({"step": 1, "reward/mean": 0.5, "reward/std": 0.1}, 2)


@pytest.mark.parametrize(
    ("steps", "line"),
    [
        ([6], "validation accuracy: 0.600 after"),
        ([0], "validation accuracy: 0.000 before training"),
        ([3, 6], "validation accuracy: 0.300 at step 3, 0.600 after"),
    ],
)
def test_only_a_validation_before_training_is_called_before(tmp_path, steps, line):
    lines = [{"step": step, "val/accuracy": step / 10} for step in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert line in success_text(tmp_path, {}, ACCURACY).splitlines()


def test_a_measure_over_few_prompts_says_over_how_many():
    line = step_line({"step": 0, "val/reward_mean": 1.0, "val/errors": 31.0, "val/prompts": 32.0}, 2, REWARD)
    assert "val reward 1.000 over 1 of 32 prompts" in line
    assert "over" not in step_line(
        {"step": 0, "val/reward_mean": 1.0, "val/errors": 0.0, "val/prompts": 32.0}, 2, REWARD
    )


def test_a_degraded_run_names_the_members_that_are_missing(tmp_path, capsys):
    display = ProgressDisplay(tmp_path, total=4, live=False)
    missing = [
        {"name": name, "pod": "a-rollout-0", "role": "rollout", "since": 1.0} for name in ("rollout-0", "rollout-1")
    ]
    for _ in range(2):
        display.update({"phase": "Degraded", "step": 2, "missing": missing})
    (line,) = capsys.readouterr().out.splitlines()
    assert line[10:] == (
        "Degraded, step 2: rollout-0, rollout-1 ended or are unreachable and are started again; unfinished prompt groups are generated again"
    )


def test_once_steps_finish_the_pauses_between_such_lines_grow(tmp_path, capsys):
    clock = Clock()
    display = ProgressDisplay(tmp_path, total=4, live=False, clock=clock)
    role = {"name": "rollout", "ready": 1, "desired": 2}
    display.update({"phase": "Generating", "step": 2, "roles": [role]})
    for clock.now in map(float, range(40)):
        display.tell_waiting()
    assert capsys.readouterr().out.count("Generating, step 2: ready are rollout 1/2") == 3  # at 5, 15 and 35 s


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"type": "math"}, "accuracy"),
        ({"type": "reward", "reward": "exact"}, "accuracy"),
        ({"type": "reward", "reward": "mine:score"}, "reward"),
        ({"type": "mine:Game"}, "reward"),
    ],
)
def test_validation_is_called_accuracy_only_where_the_environment_judges(tmp_path, env, told):
    spec = {"model": {"path": "m"}, "data": {"train": "t"}, "env": env}
    head = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "a"}}
    measured = validation_metric(RLJob.model_validate(head | {"spec": spec}))
    lines = [{"step": n, "val/accuracy": 0.0, "val/reward_mean": n - 0.05} for n in range(2)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    shown = {"accuracy": "0.000 before, 0.000 after", "reward": "-0.050 before, 0.950 after"}[told]
    text = success_text(tmp_path, {}, measured)
    assert f"validation {told}: {shown}" in text
    assert text.splitlines()[2] == f"look at it: rljob view {tmp_path}"
    assert f"val {told}" in step_line(lines[1], 2, measured)
    assert "model:" not in text  # a program without an actor trains none
    (tmp_path / "model").mkdir()
    assert f"model: {tmp_path / 'model'}" in success_text(tmp_path, {}, measured).splitlines()


def test_the_line_of_a_step_tells_what_was_lost():
    lost = {"step": 1, "reward/missing": 8.0, "ledger/dropped": 6.0, "val/errors": 1.0, "trackers/disabled": 1.0}
    assert step_line(lost, 2).split("  ")[1:] == [
        "step 1/2",
        "no sample has a reward",
        "dropped 6",
        "val errors 1",
        "disabled trackers 1",
    ]
    fine = {"step": 1, "reward/mean": 0.5, "reward/missing": 1.0, "ledger/dropped": 0.0, "val/errors": 0.0}
    assert step_line(fine, 2).split("  ")[1:] == ["step 1/2", "reward 0.500"]


def test_the_line_of_an_embodied_step_tells_return_speed_and_successes_if_there_are_some():
    spec = {
        "program": "embodied", "model": {"path": "m"}, "data": {"train": "none"}, "algorithm": {"name": "gae", "critic": {}},
        "env": {"type": "gymnasium", "options": {"id": "CartPole-v1"}},
    }  # fmt: skip
    job = RLJob.model_validate(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "a"}, "spec": spec}
    )
    metrics = {"step": 1, "env/success_once": 0.0, "val/return": 21.5, "perf/env_steps_per_second": 812.4}
    line = step_line(metrics, 2, validation_metric(job))
    assert "val return 21.500" in line and "env steps/s 812" in line and "success" not in line
    assert "success 0.250" in step_line(metrics | {"env/success_once": 0.25}, 2, validation_metric(job))


@pytest.mark.parametrize(("reward", "told"), [("mine:score", "0.730"), ("exact", "0.000")])
def test_top_shows_the_validation_metric_of_the_console(tmp_path, capsys, reward, told):
    spec = {"model": {"path": "m"}, "data": {"train": "t"}, "env": {"type": "reward", "reward": reward}}
    head = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "a"}}
    space = Workspace(tmp_path)
    space.open(uid="u", job=RLJob.model_validate(head | {"spec": spec}))
    tell(space, phase="Finished", metrics={"val/accuracy": 0.0, "val/reward_mean": 0.73})
    assert show_top(tmp_path, once=True) == 0
    assert told in capsys.readouterr().out.split()
    space.close()


def test_the_tables_fit_80_columns():
    status = {
        "phase": "Initializing", "step": 1000, "totalSteps": 1000, "reward": -0.123, "policyVersion": 1000, "epoch": 12,
        "roles": [{"name": "rollout", "lag": 12, "ready": 16, "desired": 16}], "checkpoint": {"lastStep": 1000},
        "metrics": {"val/accuracy": 0.123, "perf/tokens_per_second": 123456, "time/step": 123.45},
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=80)
    console.print(render(status))
    text = console.file.getvalue()
    words = "PHASE STEP REWARD VAL VER LAG ROLLOUTS SAVED TRY TOK/S S/STEP Initializing 1000/1000 123456 123.45"
    assert "…" not in text and all(word in text for word in words.split())


FULL = "the exported model could not be written to o/model: No space left on device, 0 bytes free; free space"


def test_a_wait_for_disk_space_is_told_at_once_and_each_30_s_with_its_cause(tmp_path, capsys):
    now = [100.0]
    display = ProgressDisplay(tmp_path, total=12, live=False, clock=lambda: now[0])
    idle = {"who": "rollout:0", "on": "ledger", "what": "prompts", "seconds": 14.0}
    for second in range(0, 70, 5):
        now[0] = 100.0 + second
        waits = [idle, {"who": "runner", "on": "disk space", "what": "the exported model", "seconds": float(second)}]
        status = {"phase": "Checkpointing", "step": 12, "waits": waits, "checkpoint": {"error": FULL}}
        display.update(status)
        assert waiting_line(status, 1.0).endswith(
            f"step 12: runner waits for disk space: the exported model ({second} s)"
        )
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[2] for line in lines] == [
        f"no disk space for the exported model since {seconds} s: {FULL}; the write is repeated, and the run goes on by itself when there is space"
        for seconds in (0, 30, 60)
    ]
    display.update({"phase": "Finished", "step": 12, "waits": [], "checkpoint": {"error": FULL}})
    assert capsys.readouterr().out == ""
