"""Which checkpoints a job may go on from: those that computed the same, also when another version wrote them."""

import copy

import pytest

from rl_core.api.job import RLJobSpec
from rl_core.runner.invariants import changes, state_of


def spec_of(**algorithm):
    return RLJobSpec.model_validate({"model": {"path": "/m"}, "data": {"train": "/t"}, "algorithm": algorithm})


def without(state, field):
    """The state as a version saved it that had no such field of `algorithm`."""
    old = copy.deepcopy(state)
    del old["mathematics"]["algorithm"][field]
    old["changed"].get("algorithm", {}).pop(field, None)
    return old


def test_a_checkpoint_from_before_a_field_was_added_is_as_good_as_one_at_its_default():
    old = without(state_of(spec_of()), "groupSize")
    assert changes(old, spec_of()) == []
    assert changes(old, spec_of(groupSize=4)) == ["algorithm.groupSize: None (saved), 4 (now)"]


def test_a_checkpoint_with_a_field_that_this_version_lacks_is_refused_only_where_the_field_was_set():
    state = state_of(spec_of())
    state["mathematics"]["algorithm"]["laterField"] = 3
    assert changes(state, spec_of()) == []
    state["changed"]["algorithm"] = {"laterField": 3}
    assert changes(state, spec_of()) == ["algorithm.laterField: 3 (saved), None (now)"]


def test_a_default_that_another_version_changed_is_told_as_a_change():
    state = state_of(spec_of())
    state["mathematics"]["algorithm"]["groupSize"] = 16
    assert changes(state, spec_of()) == ["algorithm.groupSize: 16 (saved), 8 (now)"]
    assert changes(state, spec_of(groupSize=16)) == []


@pytest.mark.parametrize("field", ["steps", "maxDroppedGroups"])
def test_fields_that_may_change_are_not_looked_at(field):
    assert changes(state_of(spec_of()), spec_of(**{field: 7})) == []
