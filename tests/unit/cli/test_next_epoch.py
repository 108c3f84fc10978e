"""How a run begins in a folder that another one has used, and what it says of the next one when it fails."""

import json

import pytest

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJob
from rl_core.cli.run import check_output, next_epoch, report


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_fresh_folder_begins_with_0_and_a_used_one_goes_on(tmp_path):
    assert next_epoch(tmp_path) == 0
    write(tmp_path / "status.json", json.dumps({"epoch": 4}))
    assert next_epoch(tmp_path) == 5


@pytest.mark.parametrize("torn", ["", '{"epo', "[]", "null"], ids=["empty", "cut", "list", "null"])
def test_a_torn_status_does_not_begin_again_at_an_epoch_that_the_checkpoints_have_passed(tmp_path, torn):
    write(tmp_path / "status.json", torn)
    write(tmp_path / "checkpoints" / "step-0000003" / "manifest.json", json.dumps({"epoch": 3}))
    write(tmp_path / "checkpoints" / "step-0000005" / "manifest.json", torn)
    assert next_epoch(tmp_path) == 4


@pytest.mark.parametrize(
    ("written", "text", "way_on"),
    [
        ("checkpoints/step-00000015/manifest.json", "", "; continue with --output {0} --resume auto"),
        ("metrics.jsonl", '{"step": 0}\n{"step": 1}\n', "; begin again at step 0 with --output {0} --resume auto"),
        ("metrics.jsonl", '{"step": 0}\n', "; no step was trained: start it again with the same command"),
        ("metrics.jsonl", "", "; no step was trained: start it again with the same command"),
    ],
    ids=["saved", "trained", "validated", "nothing"],
)
def test_a_run_that_failed_says_whether_it_goes_on_from_a_checkpoint(tmp_path, capsys, written, text, way_on):
    """Also where the status of the failed attempt names none, because it ended before it loaded one."""
    (tmp_path / "status.json").write_text(json.dumps({"step": 15, "failure": {"message": "other data"}}))
    write(tmp_path / written, text)
    spec = {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"promptsPerStep": 1, "steps": 1}}
    job = RLJob.model_validate(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "own"}, "spec": spec}
    )
    assert report(job, tmp_path, 2) == 2
    assert way_on.format(tmp_path) in capsys.readouterr().err
    if "same command" in way_on:
        check_output(tmp_path, "none")
    else:
        with pytest.raises(ConfigError, match="holds a run"):
            check_output(tmp_path, "none")
