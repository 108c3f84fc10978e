"""A job file: one RLJob, alone or beside other objects."""

from pathlib import Path

import pytest

from rl_core.api.errors import ConfigError
from rl_core.cli.job_file import JobProblems, read_document
from rl_core.cli.validate import validate_file

JOB = "apiVersion: rljob.dev/v1alpha1\nkind: RLJob\nmetadata: {name: %s}\nspec: {}\n"
CLAIM = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: work}\n"


@pytest.mark.parametrize(
    "text", [JOB % "a", f"{CLAIM}---\n{JOB % 'a'}", f"---\n{JOB % 'a'}---\n"], ids=["alone", "beside", "marked"]
)
def test_the_one_job_of_a_file_is_read_and_overridden(tmp_path, text):
    (tmp_path / "job.yaml").write_text(text)
    found = read_document(tmp_path / "job.yaml", ["algorithm.steps=3"])
    assert found["metadata"]["name"] == "a" and found["spec"] == {"algorithm": {"steps": 3}}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{JOB % 'a'}---\n{JOB % 'b'}", r"got 2 \(a, b\)"),
        (f"{CLAIM}---\n{CLAIM}", r"got 0 \(none\)"),
        ("", "must hold one mapping"),
    ],
    ids=["two jobs", "no job", "empty"],
)
def test_a_file_with_two_jobs_or_none_is_refused(tmp_path, text, told):
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_document(tmp_path / "job.yaml", [])


def test_what_lies_on_volumes_of_the_actor_is_left_to_the_pods(capsys):
    """The cluster's example is valid on a machine that has neither its model nor its data."""
    file = Path(__file__).parents[3] / "examples" / "arithmetic" / "rljob.yaml"
    assert validate_file(file, []) == 0
    told = capsys.readouterr().out
    assert "valid (arithmetic: grpo, 60 steps)" in told and "spec.model.path, spec.data.train" in told
    with pytest.raises(JobProblems, match=r"spec\.model\.path"):
        validate_file(file, [f"actor.{field}=[]" for field in ("volumes", "volumeMounts", "initContainers")])
