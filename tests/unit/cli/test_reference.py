"""The committed reference is the schema's, and is itself a valid job with every field at its default."""

import yaml

from rl_core.api.job import RLJob, RLJobSpec
from rl_core.cli.reference import MARKDOWN_PATH, YAML_PATH, fields_of, render_markdown, render_yaml


def test_the_committed_files_equal_what_the_schema_generates():
    assert YAML_PATH.read_text() == render_yaml()
    assert MARKDOWN_PATH.read_text() == render_markdown()


def test_the_reference_job_is_valid_and_all_defaults():
    job = RLJob.model_validate(yaml.safe_load(render_yaml()))
    bare = RLJobSpec.model_validate({"model": {"path": "model"}, "data": {"train": "data/train.jsonl"}})
    assert job.spec == bare


def test_every_field_has_a_meaning():
    assert [path for path, _, _, meaning in fields_of(RLJobSpec) if not meaning] == []
