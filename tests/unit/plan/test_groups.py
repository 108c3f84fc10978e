"""Groups as data: what each group of a job is, and what the keys of the groups permit."""

import importlib

import pytest

from rl_core.api.backends import ENGINES, TRAINERS
from rl_core.api.job import RLJobSpec
from rl_core.plan.groups import ACTOR, BUILT_IN, ENV, ROLLOUT, ChannelUse, Lifecycle, WeightSource, groups_of


def spec(**blocks):
    return RLJobSpec.model_validate({"model": {"path": "m"}, "data": {"train": "d.jsonl"}} | blocks)


def test_a_job_has_actors_rollouts_and_envs_in_this_order():
    groups = groups_of(
        spec(actor={"replicas": 2, "processesPerPod": 4}, rollout={"replicas": 3}, algorithm={"promptsPerStep": 32})
    )
    assert list(groups) == list(BUILT_IN) == [ACTOR, ROLLOUT, ENV] == ["actor", "rollout", "env"]
    assert {name: group.world_size for name, group in groups.items()} == {ACTOR: 8, ROLLOUT: 3, ENV: 1}
    assert {name: group.lifecycle for name, group in groups.items()} == {
        ACTOR: Lifecycle.GANG, ROLLOUT: Lifecycle.ELASTIC, ENV: Lifecycle.ELASTIC,
    }  # fmt: skip
    assert [name for name, group in groups.items() if group.pulls_weights] == [ROLLOUT]
    assert groups[ROLLOUT].weights is WeightSource.PULLS


@pytest.mark.parametrize("backend", TRAINERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_worker_classes_are_those_of_backend_and_engine(backend, engine):
    groups = groups_of(spec(actor={"backend": backend}, rollout={"engine": engine}))
    assert (groups[ACTOR].worker, groups[ROLLOUT].worker) == (TRAINERS[backend], ENGINES[engine])


def test_the_worker_class_of_envs_exists():
    module, _, name = groups_of(spec())[ENV].worker.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_choices_of_the_schema_are_those_of_the_tables():
    properties = RLJobSpec.model_json_schema()["$defs"]
    assert properties["ActorSpec"]["properties"]["backend"]["enum"] == list(TRAINERS)
    assert properties["RolloutSpec"]["properties"]["engine"]["enum"] == list(ENGINES)


def test_env_keys_use_no_channel_and_rollout_keys_only_put():
    assert not BUILT_IN[ENV].channels
    assert {use for uses in BUILT_IN[ROLLOUT].channels.values() for use in uses} == {ChannelUse.PUT}
