"""A job keeps the defaults it was accepted under, whatever operator looks at it next."""

import json
from dataclasses import replace

from rl_core.api import defaults
from rljob_operator.reconcile import reconcile
from tests.unit.operator.simulator import CONFIG, World, make_job


def earlier():
    """Another version's defaults: eight actors would be its idea of a gang, and it lacks a field."""
    table = json.loads(defaults.present().text)
    table["RolloutSpec"]["replicas"] = 3
    del table["AlgorithmSpec"]["groupSize"]
    return defaults.read(json.dumps(table))


def look(world, kept):
    return reconcile(world.job, replace(world.observed(), defaults=kept), world.now, config=CONFIG)


def accepted_under(kept):
    job = make_job(rollout={})
    job["status"] = {"schemaVersion": kept.version, "epoch": 1, "phase": "Pending"}
    return World(job=job)


def test_a_new_job_is_accepted_under_the_defaults_of_this_operator():
    assert look(World(job=make_job()), None).status["schemaVersion"] == defaults.present().version


def test_a_job_is_resolved_by_the_defaults_it_was_accepted_under():
    kept = earlier()
    plan = look(accepted_under(kept), kept)
    assert plan.status["schemaVersion"] == kept.version
    assert [pod["metadata"]["name"] for pod in plan.create if "rollout" in pod["metadata"]["name"]] == [
        f"x-rollout-{index}" for index in range(3)
    ]
    document = next(o for o in plan.ensure if o["kind"] == "ConfigMap")
    assert json.loads(document["data"]["job.json"])["spec"]["rollout"]["replicas"] == 3


def test_lost_defaults_are_told_once_and_those_of_this_operator_are_kept_from_then_on():
    world = accepted_under(earlier())
    plan = look(world, None)
    assert plan.status["schemaVersion"] == defaults.present().version
    assert [event.reason for event in plan.events].count("DefaultsLost") == 1
    world.job["status"] = dict(plan.status)
    assert "DefaultsLost" not in [event.reason for event in look(world, defaults.present()).events]
