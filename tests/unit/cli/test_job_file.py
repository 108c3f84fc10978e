"""A job file: one RLJob, alone or beside other objects."""

import pytest

from rl_core.api.errors import ConfigError
from rl_core.cli.job_file import read_document

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
