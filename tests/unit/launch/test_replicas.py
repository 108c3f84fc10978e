"""Who changes the number of rollouts of a local run: a person by `rljob scale`, the launcher by rollout.autoscale."""

import json

import pytest

from rl_core.api.errors import ConfigError
from rl_core.launch.replicas import follow_workload, set_replicas


class FakeControl:
    """Stands in for the runner's control port."""

    def __init__(self):
        self.told, self.hears, self.refusal = [], True, ""

    def change(self, generation, spec):
        if self.refusal:
            raise ConfigError(self.refusal)
        self.told.append((generation, spec["rollout"]["replicas"], spec["env"]["replicas"]))
        return self.hears


@pytest.fixture
def config(tmp_path):
    spec = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "rollout": {"replicas": 2, "autoscale": {"min": 1, "max": 8, "targetIdle": 0.2}},
        "env": {"replicas": 1},
    }
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"spec": spec}))
    return path


def status(desired=2, *, starved=0.0, trainer=0.6):
    rollouts = [{"name": f"rollout:{rank}"} for rank in range(2)]
    window = {"full": True, "seconds": 60.0, "starved": starved, "actorStarved": trainer, "rollouts": rollouts}
    return {"workload": window, "roles": [{"name": "rollout", "desired": desired}], "appliedGeneration": 3}


def kept(config):
    return json.loads(config.read_text())["spec"]["rollout"]["replicas"]


def test_a_number_that_the_runner_takes_is_kept_for_a_restart_of_the_actors(config):
    control = FakeControl()
    assert set_replicas(control, config, {"rollout": 5, "env": 2}, applied=3) is True
    assert control.told == [(4, 5, 2)] and kept(config) == 5


def test_a_number_that_nobody_hears_is_not_kept(config):
    control = FakeControl()
    control.hears = False
    assert set_replicas(control, config, {"rollout": 5}, applied=3) is False and kept(config) == 2
    assert follow_workload(control, config, status()) == "" and kept(config) == 2


def test_only_elastic_groups_of_the_job_are_scaled(config):
    job = json.loads(config.read_text())
    groups = [
        {"name": "scorer", "worker": "own:Scorer"},
        {"name": "reader", "worker": "own:Reader", "lifecycle": "gang"},
    ]
    config.write_text(json.dumps({"spec": job["spec"] | {"groups": groups}}))
    assert set_replicas(FakeControl(), config, {"scorer": 3}, applied=3)
    scorer, reader = json.loads(config.read_text())["spec"]["groups"]
    assert scorer["replicas"] == 3 and "replicas" not in reader
    for name in ("reader", "actor", "sampler"):
        with pytest.raises(ConfigError, match=rf"elastic groups of the job \(rollout, env, scorer\), got {name}; name"):
            set_replicas(FakeControl(), config, {name: 3}, applied=3)


def test_rollouts_follow_who_waits_for_whom(config):
    control = FakeControl()
    assert "rollout.replicas 2 -> 4" in follow_workload(control, config, status())
    assert control.told == [(4, 4, 1)] and kept(config) == 4
    assert follow_workload(control, config, status()) == "", "the window is of two rollouts, and four are wanted"


def test_nothing_is_decided_while_a_persons_number_is_on_its_way(config):
    control = FakeControl()
    assert follow_workload(control, config, status(desired=3)) == "" and control.told == []


def test_a_refusal_ends_nothing(config, caplog):
    control = FakeControl()
    control.refusal = "spec.rollout.replicas must be another"
    assert follow_workload(control, config, status()) == "" and kept(config) == 2
    assert "must be another" in caplog.text


def test_a_status_that_tells_nothing_moves_nothing(config):
    assert follow_workload(FakeControl(), config, {}) == ""


def test_a_run_without_the_rule_is_left_alone(config):
    job = json.loads(config.read_text())
    job["spec"]["rollout"]["autoscale"] = None
    config.write_text(json.dumps(job))
    control = FakeControl()
    assert follow_workload(control, config, status()) == "" and control.told == []
