"""`rljob run --resume` says what it continues and what is different, and refuses before it writes."""

import json
import re
from pathlib import Path

import pytest

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJob
from rl_core.cli.resume import resume_line
from rl_core.runner.checkpoints import STATE_FILE
from rl_core.runner.invariants import INVARIANT_FIELDS, MAY_CHANGE, state_of


def job(**spec):
    head = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "a"}}
    return RLJob.model_validate(head | {"spec": {"model": {"path": "m"}, "data": {"train": "t"}, **spec}})


@pytest.fixture
def run(tmp_path):
    """A folder with checkpoints of the steps 2 and 10, and one that was not completed."""
    for step in (2, 10, 12):
        folder = tmp_path / f"checkpoints/step-{step}"
        folder.mkdir(parents=True)
        (folder / STATE_FILE).write_text(json.dumps({"step": step, **state_of(job().spec)}))
        if step < 12:
            (folder / "manifest.json").write_text("{}")
    return tmp_path


def test_a_run_without_a_checkpoint_says_that_it_starts_at_step_0(run, tmp_path):
    assert resume_line(job(), run, "none") == ""
    expected = f"{tmp_path}/empty/checkpoints holds no checkpoint: starts at step 0"
    assert resume_line(job(), tmp_path / "empty", "auto") == expected


def test_the_step_and_the_folder_are_named(run):
    assert resume_line(job(), run, "auto") == f"resumes at step 10 of {run}"
    assert resume_line(job(), run, str(run / "checkpoints/step-2")).startswith(f"resumes at step 2 of {run}")


def test_newer_checkpoints_are_named_with_the_place_where_they_are_kept(run):
    expected = (
        f"; the newer checkpoints of step 10 are set aside as {run}/checkpoints/lost-step-*, "
        f"and their metrics in {run}/metrics.lost.jsonl"
    )
    assert resume_line(job(), run, str(run / "checkpoints/step-2")).endswith(expected)
    other = run / "elsewhere"
    assert "set aside" not in resume_line(job(), other, str(run / "checkpoints/step-2"))


def test_a_run_that_has_made_its_steps_is_told_how_to_go_on(run):
    expected = "; nothing is left to train: raise algorithm.steps above 10"
    assert resume_line(job(algorithm={"steps": 10}), run, "auto").endswith(expected)
    assert resume_line(job(algorithm={"steps": 4}), run, "auto").endswith(expected)


def test_every_field_that_has_another_value_is_named(run):
    changed = job(actor={"optimizer": {"learningRate": 5e-4}}, model={"path": "other"})
    assert resume_line(changed, run, "auto") == (
        f"resumes at step 10 of {run}; different: actor.optimizer.learningRate 1e-06 -> 0.0005, model.path m -> other"
    )


def test_a_job_that_computes_something_else_is_refused(run):
    before = sorted(run.rglob("*"))
    with pytest.raises(ConfigError, match=r"algorithm.groupSize: 8 \(saved\), 4 \(now\)"):
        resume_line(job(algorithm={"groupSize": 4}), run, "auto")
    assert sorted(run.rglob("*")) == before


def test_the_page_lists_every_field_that_must_be_equal_with_its_exceptions():
    page = (Path(__file__).parents[3] / "docs/running.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| must be equal(?:, except (.+))? \|$", page, re.MULTILINE)
    whole = job().spec.model_dump(mode="json", by_alias=True)
    assert [field for field, _ in rows] == list(INVARIANT_FIELDS)
    for field, exceptions in rows:
        block = whole
        for part in field.split("."):
            block = block[part]
        assert set(re.findall(r"`(\w+)`", exceptions)) == (
            MAY_CHANGE & set(block) if isinstance(block, dict) else set()
        )
