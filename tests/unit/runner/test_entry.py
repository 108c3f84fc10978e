"""How the runner's process ends: with a documented code and its reason in status.json, whatever went wrong."""

import json

import pytest

from rl_core.api.errors import ConfigError, DataError, InfrastructureError
from rl_core.runner import __main__ as entry

JOB = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "j"},
    "spec": {"model": {"path": "/m"}, "data": {"train": "t.jsonl"}},
}


@pytest.fixture
def output(tmp_path, monkeypatch):
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    given = {"NAME": "j", "UID": "u", "ROLE": "runner", "EPOCH": "2", "OUTPUT": str(tmp_path), "CONTROL_PORT": "0"}
    for name, value in (given | {"CONFIG": str(tmp_path / "job.json")}).items():
        monkeypatch.setenv(f"RLJOB_{name}", value)
    for module, name in (
        (entry.faulthandler, "enable"),
        (entry.faulthandler, "register"),
        (entry, "configure_logging"),
    ):
        monkeypatch.setattr(module, name, lambda *given: None)
    return tmp_path


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("no tokenizer"), 2, "no tokenizer"),
        (DataError("line 3"), 4, "line 3"),
        (InfrastructureError("the volume is gone"), 3, "the volume is gone"),
        (
            ExceptionGroup("two ranks", [InfrastructureError("gone"), DataError("line 3")]),
            4,
            "two ranks (2 sub-exceptions)",
        ),
        (OSError("no such device"), 3, "OSError: no such device (test_entry.py:"),
        (KeyError("a bug"), 3, "KeyError: 'a bug' (test_entry.py:"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_whatever_ends_the_runner_is_told(output, monkeypatch, error, code, message):
    def build(job, identity, **more):
        raise error

    monkeypatch.setattr(entry, "build", build)
    assert entry.main() == code
    status = json.loads((output / "status.json").read_text())
    assert (status["phase"], status["epoch"]) == ("Failed", 2)
    assert status["failure"].pop("message").startswith(message)
    assert status["failure"] == {"type": type(error).__name__, "exitCode": code}


def test_a_job_of_another_release_is_no_reason_to_restart(output):
    (output / "job.json").write_text(json.dumps(JOB | {"spec": JOB["spec"] | {"unknown": 1}}))
    assert entry.main() == 2
    assert "unknown" in json.loads((output / "status.json").read_text())["failure"]["message"]
