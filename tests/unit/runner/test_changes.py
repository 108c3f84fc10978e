"""PUT /control: the mutable fields are taken, the operator's and pods' are not looked at, every other difference is named."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rl_core.api.job import MUTABLE_FIELDS, OPERATOR_FIELDS, RLJob, RLJobSpec
from rl_core.api.problems import problem_lines
from rl_core.runner.changes import AppliedSpec, differences, for_elastic_roles, merge

BASE = {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"replicas": 2, "maxReplicas": 8}}
MUTABLE = {
    "rollout.replicas": 5,
    "rollout.minReplicas": 2,
    "rollout.maxReplicas": 16,
    "rollout.autoscale": {"min": 2, "max": 8, "targetIdle": 0.3},
    "env.replicas": 3,
    "algorithm.steps": 7,
    "algorithm.maxStaleness": 0,
    "actor.optimizer.learningRate": 3.0e-5,
    "checkpoint.everySteps": 5,
    "checkpoint.keep": 9,
}
NOT_OURS = {
    "suspend": True,
    "ttlSecondsAfterFinished": 60,
    "activeDeadlineSeconds": 600,
    "failurePolicy.maxRestarts": 9,
    "actor.image": "other:1",
    "rollout.nodeSelector": {"a": "b"},
    "env.terminationGracePeriodSeconds": 5,
    "rollout.gpus": 1,
}


@pytest.fixture
def spec():
    return RLJobSpec.model_validate(BASE)


def plain(spec):
    return spec.model_dump(mode="json", by_alias=True)


def put(whole, path, value):
    *blocks, field = path.split(".")
    for block in blocks:
        whole = whole[block]
    whole[field] = value


def get(whole, path):
    for part in path.split("."):
        whole = whole[part]
    return whole


@given(
    changed=st.dictionaries(st.sampled_from(sorted(MUTABLE)), st.none()),
    noise=st.dictionaries(st.sampled_from(sorted(NOT_OURS)), st.none()),
)
def test_exactly_the_mutable_fields_of_what_is_sent_are_taken(changed, noise):
    present = RLJobSpec.model_validate(BASE)
    wanted = plain(present)
    for path in changed:
        put(wanted, path, MUTABLE[path])
    for path in noise:
        put(wanted, path, NOT_OURS[path])
    merged = plain(merge(present, wanted))
    expected = plain(present)
    for path in changed:
        put(expected, path, MUTABLE[path])
    assert merged == expected


def test_every_field_that_the_schema_calls_mutable_is_tried_above():
    assert set(MUTABLE_FIELDS) == {p if not p.startswith("checkpoint") else "checkpoint" for p in MUTABLE}
    assert {path.partition(".")[0] for path in NOT_OURS} >= set(OPERATOR_FIELDS) - {
        "managedBy",
        "startDeadlineSeconds",
        "deletionPolicy",
        "scheduling",
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.path", "n"),
        ("algorithm.name", "rloo"),
        ("rollout.sampling.temperature", 0.5),
        ("actor.gpus", 1),
        ("actor.optimizer.weightDecay", 0.5),
        ("extensions", ["mine"]),
    ],
)
def test_another_difference_is_refused_with_field_values_and_the_way_out(spec, path, value):
    wanted = plain(spec)
    put(wanted, path, value)
    with pytest.raises(ValueError) as told:
        merge(spec, wanted)
    text = str(told.value)
    assert f"spec.{path} cannot change while the job runs, got {value!r}" in text and "suspend the job" in text
    assert repr(get(plain(spec), path)) in text


def test_all_refused_fields_are_told_at_once_and_an_invalid_spec_by_its_rule(spec):
    wanted = plain(spec)
    put(wanted, "model.path", "n")
    put(wanted, "data.train", "u")
    with pytest.raises(ValueError, match=r"spec\.data\.train .*; spec\.model\.path"):
        merge(spec, wanted)
    put(wanted, "rollout.minReplicas", 7)
    with pytest.raises(ValueError, match=r"spec\.rollout: minReplicas must not exceed replicas 2, got 7"):
        merge(spec, wanted)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("algorithm.steps", "ten"),
        ("algorithm.steps", 0),
        ("rollout.engine", "sgl"),
        ("rollout.minReplicas", 7),
        ("weights.onUpdate", "keep_kv"),
    ],
)
def test_an_invalid_change_is_refused_in_the_words_of_validate(spec, path, value):
    wanted = plain(spec)
    put(wanted, path, value)
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "a"}, "spec": wanted}
    with pytest.raises(ValueError) as told:
        merge(spec, wanted)
    with pytest.raises(ValidationError) as refused:
        RLJob.model_validate(job)
    assert str(told.value) == "; ".join(problem_lines(refused.value)), told.value
    assert "Input should" not in str(told.value) and "Value error" not in str(told.value)


def test_steps_that_the_warm_up_does_not_fit_into_are_refused():
    present = RLJobSpec.model_validate({**BASE, "actor": {"optimizer": {"schedule": {"warmupSteps": 10}}}})
    wanted = plain(present)
    put(wanted, "algorithm.steps", 10)
    with pytest.raises(ValueError, match=r"warmupSteps must be below the run's 10"):
        merge(present, wanted)


def test_a_change_is_taken_once_the_newest_wins_and_an_older_one_is_ignored(spec):
    changes = AppliedSpec(spec)
    assert changes.take() is None

    def replicas(count):
        wanted = copy.deepcopy(plain(spec))
        put(wanted, "rollout.replicas", count)
        return wanted

    changes.offer(3, replicas(3))
    changes.offer(5, replicas(5))
    changes.offer(4, replicas(4))
    taken = changes.take()
    assert (taken.generation, taken.spec.rollout.replicas) == (5, 5) and changes.take() is None
    changes.offer(4, {"not": "looked at"})
    assert changes.take() is None
    changes.offer(5, replicas(5))
    assert changes.take().generation == 5


def test_a_refused_change_leaves_the_waiting_one(spec):
    changes = AppliedSpec(spec)
    changes.offer(2, plain(spec))
    with pytest.raises(ValueError):
        changes.offer(3, {"nonsense": 1})
    assert changes.take().generation == 2


@pytest.mark.parametrize("path", sorted({**MUTABLE, **NOT_OURS}.keys() - {"rollout.gpus"}))
def test_rollouts_and_envs_are_built_from_what_cannot_change(spec, path):
    value = {**MUTABLE, **NOT_OURS}[path]
    wanted = plain(spec)
    put(wanted, path, value)
    changed = RLJobSpec.model_validate(wanted)
    assert list(differences(plain(for_elastic_roles(spec)), plain(for_elastic_roles(changed)))) == []
    assert for_elastic_roles(spec).rollout.sampling == spec.rollout.sampling


def test_the_staleness_of_an_asynchronous_job_changes_but_not_whether_it_is_one():
    asynchronous = RLJobSpec.model_validate(BASE | {"algorithm": {"maxStaleness": 1}})
    wanted = plain(asynchronous)
    put(wanted, "algorithm.maxStaleness", 3)
    merged = merge(asynchronous, wanted)
    assert merged.algorithm.max_staleness == 3
    assert for_elastic_roles(merged) == for_elastic_roles(asynchronous), "rollouts keep their engines"
    put(wanted, "algorithm.maxStaleness", 0)
    with pytest.raises(
        ValueError, match="maxStaleness cannot go between 0 and more while the job runs, got 0 in place of 1"
    ):
        merge(asynchronous, wanted)
