"""Versions of the schema: a job keeps the defaults it was accepted under, and what travels can be read by another version."""

import json

import pytest

from rl_core.api import defaults, document
from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec
from rl_core.api.roles import ActorSpec

BARE = {"model": {"path": "/m"}, "data": {"train": "/t"}}
RICH = BARE | {
    "algorithm": {"steps": 10, "loss": {"klCoefficient": 0.1}},
    "failurePolicy": {
        "maxRestarts": 1,
        "klBlowUp": {"above": 1.0, "action": "Pause"},
        "rules": [{"exitCodes": [3], "action": "FailJob"}],
    },
    "actor": {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "shared"}}]},
    "env": {"options": {"a": {"b": [1]}}},
}


def spec_of(raw, kept=None):
    return RLJobSpec.model_validate(raw, context=kept.context if kept else None)


def earlier(**changes):
    """The defaults of a version with other values: `Class_field`, None = it had no such field."""
    table = json.loads(defaults.present().text)
    for name, value in changes.items():
        cls, _, field = name.partition("_")
        if value is None:
            del table[cls][field]
        else:
            table[cls][field] = value
    return defaults.read(json.dumps(table, sort_keys=True, separators=(",", ":")))


@pytest.mark.parametrize("raw", [BARE, RICH], ids=["bare", "rich"])
def test_the_short_form_of_a_job_is_what_its_author_wrote(raw):
    assert defaults.short(spec_of(raw)) == raw


@pytest.mark.parametrize("raw", [BARE, RICH], ids=["bare", "rich"])
def test_resolving_by_the_present_defaults_is_resolving(raw):
    assert spec_of(raw, defaults.present()) == spec_of(raw)


def test_a_kept_default_wins_over_the_one_of_the_code_wherever_it_stands():
    kept = earlier(StallSpec_action="Pause", FailureRule_countTowardsLimit=False, KlBlowUpSpec_steps=7)
    spec = spec_of(RICH, kept)
    policy = spec.failure_policy
    assert (policy.stall.action, policy.rules[0].count_towards_limit, policy.kl_blow_up.steps) == ("Pause", False, 7)
    assert (
        spec_of(RICH | {"failurePolicy": {"stall": {"action": "FailJob"}}}, kept).failure_policy.stall.action
        == "FailJob"
    )
    assert defaults.short(spec, kept.table) == RICH, "the kept defaults are no changes"


def test_a_field_that_the_kept_version_lacks_takes_the_default_of_the_code_and_one_the_code_lacks_is_left_out():
    kept = earlier(StallSpec_action=None, StallSpec_later=3)
    assert spec_of(BARE, kept).failure_policy.stall.action == "RestartRole"
    assert spec_of(BARE | {"failurePolicy": {"stall": {"later": 3}}}, kept) == spec_of(BARE, kept)
    with pytest.raises(ValueError, match="later"):
        spec_of(BARE | {"failurePolicy": {"stall": {"later": 4}}}, kept)


def test_versions_differ_by_a_field_or_a_default_alone():
    now = defaults.present()
    others = {earlier(StallSpec_action="Pause").version, earlier(StallSpec_action=None).version}
    assert len({now.version, *others}) == 3 and defaults.read(now.text).version == now.version


def test_a_reader_that_lacks_a_field_leaves_its_default_out():
    written = document.write(spec_of(RICH))
    written["algorithm"]["laterField"] = written["failurePolicy"]["rules"][0]["later"] = {"deep": 1}
    assert document.read(RLJobSpec, json.dumps(written)) == spec_of(RICH)


def test_a_reader_that_lacks_a_field_refuses_another_value_by_name():
    written = document.write(spec_of(RICH))
    for tree in (written, written["changed"]):
        tree["algorithm"]["laterField"] = 5
        tree["failurePolicy"]["rules"][0]["later"] = True
    with pytest.raises(
        ConfigError, match=r"algorithm\.laterField: 5, failurePolicy\.rules\.0\.later: True.*image of the release"
    ):
        document.read(RLJobSpec, written)


def test_unknown_fields_of_a_document_that_does_not_tell_its_changes_are_refused():
    with pytest.raises(ConfigError, match="laterField"):
        document.read(RLJobSpec, BARE | {"laterField": 1})


def test_what_is_wrong_besides_unknown_fields_is_told_too():
    with pytest.raises(ValueError, match="steps"):
        document.read(RLJobSpec, document.write(spec_of(BARE)) | {"algorithm": {"steps": "many"}})


def test_any_part_of_the_schema_travels():
    part = spec_of(RICH).actor
    assert document.read(ActorSpec, document.text(part)) == part
