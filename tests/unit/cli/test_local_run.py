"""A run that is started from Python is followed step by step, and its failures are raised."""

import subprocess
import sys

import pytest
import yaml

from rl_core import RLJob, start_run
from rl_core.api.errors import ConfigError
from rl_core.cli.local_run import LocalRun, RunFailed

STEPS = """
import sys, time
for step in range(int(sys.argv[2]), 3):
    with open(sys.argv[1], "a") as file:
        file.write('{"step": %d, "reward/' % step)
        file.flush()
        time.sleep(0.05)
        file.write('mean": 0.5}\\n')
print("what went wrong")
raise SystemExit(int(sys.argv[3]))
"""


def started(folder, *, first=0, code=0, done=-1):
    log = folder / "log"
    with log.open("wb") as printed:
        command = [sys.executable, "-c", STEPS, str(folder / "metrics.jsonl"), str(first), str(code)]
        process = subprocess.Popen(command, stdout=printed)
    return LocalRun(process, folder, log, done=done)


def test_each_step_is_yielded_once_and_whole(tmp_path):
    assert list(started(tmp_path).follow()) == [{"step": step, "reward/mean": 0.5} for step in range(3)]


def test_a_resumed_run_yields_the_steps_that_come_after(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    assert [line["step"] for line in started(tmp_path, first=2, done=1).follow()] == [2]


def test_a_failed_run_raises_with_its_last_lines(tmp_path):
    steps = started(tmp_path, code=4).follow()
    with pytest.raises(RunFailed, match="exit code 4\nwhat went wrong") as failed:
        list(steps)
    assert failed.value.code == 4


def test_an_interrupted_run_is_no_failure(tmp_path):
    started(tmp_path, code=130).wait()


def test_the_record_of_a_finished_run_is_not_overwritten(tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first/metrics.jsonl").write_text('{"step": 7}\n')
    (tmp_path / "first.yaml").write_text("the job of the run")
    (tmp_path / "first.log").write_text("what it printed")
    spec = {"model": {"path": "nowhere"}, "data": {"train": "rows.jsonl"}}
    job = RLJob.model_validate(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "a"}, "spec": spec}
    )
    with pytest.raises(ConfigError, match=r"holds a run \(at step 7\)"):
        start_run(job, output=tmp_path / "first", code=tmp_path)
    assert (tmp_path / "first.yaml").read_text() == "the job of the run"
    assert (tmp_path / "first.log").read_text() == "what it printed"


def test_a_job_that_is_refused_raises_what_the_command_says_and_is_kept_as_it_was_given(tmp_path):
    spec = {"model": {"path": "nowhere"}, "data": {"train": "rows.jsonl"}, "algorithm": {"steps": 3}}
    job = RLJob.model_validate(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "a"}, "spec": spec}
    )
    run = start_run(job, output=tmp_path / "out/first", code=tmp_path)
    with pytest.raises(RunFailed, match=r"spec\.model\.path"):
        run.wait(120)
    kept = yaml.safe_load((tmp_path / "out/first.yaml").read_text())["spec"]
    assert kept == spec | {"model": {"path": f"{tmp_path}/nowhere"}, "data": {"train": f"{tmp_path}/rows.jsonl"}}
