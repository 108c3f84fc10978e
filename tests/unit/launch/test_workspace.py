"""What status.json says at the end of a run, whoever ended it."""

import fcntl
import threading

import pytest

from rl_core.api.errors import ConfigError
from rl_core.launch import workspace
from rl_core.launch.workspace import INTERRUPTED, Workspace, is_abandoned


@pytest.mark.parametrize(
    ("code", "told", "phase"),
    [
        (0, {"phase": "Finished", "step": 6}, "Finished"),
        (0, {"phase": "Suspended", "step": 4}, "Suspended"),
        (0, {"phase": "Training", "step": 6}, "Finished"),
        (3, {"phase": "Training", "step": 4}, "Failed"),
        (INTERRUPTED, {"phase": "Finished", "step": 4}, "Suspended"),
        (INTERRUPTED, {"phase": "Finished", "step": 6}, "Finished"),
        (INTERRUPTED, {"phase": "Training", "step": 4}, "Failed"),
        (INTERRUPTED, {"phase": "Failed", "step": 4}, "Failed"),
    ],
)
def test_a_run_with_steps_left_is_never_told_as_finished_by_an_interrupt(tmp_path, code, told, phase):
    space = Workspace(tmp_path)
    space.write_status({"epoch": 0, "totalSteps": 6, **told}, restarts=0)
    status = space.final_status(code, "stopped on request", epoch=0)
    assert status["phase"] == phase
    assert ("failure" in status) == (code != 0)
    if code == INTERRUPTED:
        assert status["failure"]["type"] == "Interrupted"


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("Interrupted", "SIGTERM: ended at step 4", "stalled: no progress; SIGTERM: ended at step 4"),
        ("Interrupted", "stalled: no progress: ended at step 4", "stalled: no progress: ended at step 4"),
        ("Interrupted", "SIGTERM at actor:1: ended at step 4", "SIGTERM at actor:1: ended at step 4"),
        ("ZeroDivisionError", "division by zero", "division by zero"),
    ],
)
def test_the_failure_of_a_terminated_runner_begins_with_the_reason_of_the_launcher(tmp_path, kind, message, expected):
    space = Workspace(tmp_path)
    space.write_status({"epoch": 0, "phase": "Failed", "failure": {"type": kind, "message": message}}, restarts=0)
    assert space.final_status(3, "stalled: no progress", epoch=0)["failure"]["message"] == expected


def test_a_run_without_a_status_has_failed(tmp_path):
    status = Workspace(tmp_path).final_status(3, "", epoch=2)
    assert (status["phase"], status["epoch"], status["failure"]["message"]) == ("Failed", 2, "the launcher failed")


def test_a_folder_is_one_run_at_a_time_and_who_only_looks_is_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr(workspace, "LOCK_SECONDS", 30.0)
    looking = (tmp_path / workspace.PRIVATE / "lock").open
    Workspace(tmp_path).lock()  # closed with the object
    with looking() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.2, lambda: fcntl.flock(file, fcntl.LOCK_UN)).start()
        run = Workspace(tmp_path)
        run.lock()
    assert not is_abandoned(tmp_path)
    monkeypatch.setattr(workspace, "LOCK_SECONDS", 0.01)
    with pytest.raises(ConfigError, match="in use by another run"):
        Workspace(tmp_path).lock()
    run.close()
    assert is_abandoned(tmp_path)
