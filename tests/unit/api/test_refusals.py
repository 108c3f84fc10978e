"""Bad jobs are refused by the schema with field, rule, value and way out; the same table goes to a real API server elsewhere."""

import pytest

from rl_core.api.job import RLJob, RLJobSpec
from rl_core.cli.problems import find_problems
from tests.cluster.bad_jobs import CASES, GOOD, SAME, merged


@pytest.mark.parametrize("case", CASES)
def test_a_bad_job_is_refused_at_its_field(case):
    change, field, message, words = CASES[case]
    job, problems = find_problems(merged(GOOD, {"spec": change}))
    assert job is None and problems
    if words is SAME:
        assert any(message in problem for problem in problems), problems
    else:
        path = field.replace("[", ".").replace("]", "")
        assert any(problem.startswith(path) for problem in problems), problems


def test_a_pod_field_is_the_same_for_each_role():
    fields = {"image": "r.test/i:1", "gpus": 2, "shmSize": "1Gi", "tolerations": [{"operator": "Exists"}]}
    spec = RLJobSpec.model_validate(GOOD["spec"] | dict.fromkeys(("actor", "rollout", "env"), fields))
    for role in (spec.actor, spec.rollout, spec.env):
        assert role.model_dump(by_alias=True, include={"image", "gpus", "shm_size"}) == {
            "image": "r.test/i:1",
            "gpus": 2,
            "shmSize": "1Gi",
        }


def test_zero_switches_off_what_null_does():
    for off in (0, None):
        spec = RLJobSpec.model_validate(GOOD["spec"] | {"actor": {"gradClip": off}, "checkpoint": {"everySteps": off}})
        assert spec.actor.grad_clip is None and spec.checkpoint.every_steps is None


def test_a_job_that_writes_the_defaults_of_idle_settings_is_valid():
    idle = {
        "dynamicSampling": {"enabled": False, "minStd": 0.0},
        "overlong": {"filter": False, "keepInBaseline": False, "buffer": None, "penalty": 1.0, "penaltyCap": None},
    }
    assert RLJobSpec.model_validate(GOOD["spec"] | {"algorithm": idle}) == RLJobSpec.model_validate(GOOD["spec"])


def test_the_status_is_never_a_reason_to_refuse_a_job():
    job = RLJob.model_validate(GOOD | {"status": {"phase": "OfANewerOperator", "unknown": 1}})
    assert "status" not in job.model_dump(by_alias=True)
