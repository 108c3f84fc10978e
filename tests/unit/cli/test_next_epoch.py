"""The epoch in which a run begins in a folder that another one has used."""

import json

import pytest

from rl_core.cli.run import next_epoch


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
