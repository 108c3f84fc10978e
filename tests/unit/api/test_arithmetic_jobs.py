"""examples/arithmetic: each job is valid, and differs from job.yaml in what it shows and in nothing else."""

from pathlib import Path

import pytest

from rl_core.api.defaults import short
from rl_core.cli.job_file import load_job
from rl_core.plan.launch import build_launch_plan

EXAMPLES = Path(__file__).parents[3] / "examples" / "arithmetic"
SHOWN = {
    "asynchronous.yaml": {"algorithm.maxStaleness": 2},
    "colocated.yaml": {"placement.mode": "colocated", "rollout.replicas": None},
    "critic.yaml": {
        "algorithm.name": "gae",
        "algorithm.critic.group": "critic",
        "algorithm.critic.lam": 0.95,
        "actor.optimizer.valueLearningRate": 3e-4,
        "groups": [
            {"name": "critic", "worker": "rl_core.groups.critic:Critic", "lifecycle": "gang", "callers": ["actor"]}
        ],
    },
    "inference.yaml": {
        "algorithm.recomputeLogProbs": True,
        "algorithm.inference": "inference",
        "groups": [{"name": "inference", "worker": "rl_core.groups.inference:Inference", "weights": "pulls"}],
    },
    "lora.yaml": {"model.lora.rank": 8, "model.lora.alpha": 16.0, "actor.optimizer.learningRate": 1e-3},
    "sglang.yaml": {"rollout.engine": "sglang", "rollout.replicas": None},
}
ENGINE = ["rollout.engine=sglang", "rollout.replicas=1"]


def flat(fields, path=""):
    """Return the fields that differ from their default, by YAML path."""
    found = {}
    for name, value in fields.items():
        found |= flat(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}": value}
    return found


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_is_the_quickstart_but_for_what_it_shows(name):
    quickstart, shown = (flat(short(load_job(EXAMPLES / one).spec)) for one in ("job.yaml", name))
    assert {
        path: shown.get(path) for path in {**quickstart, **shown} if quickstart.get(path) != shown.get(path)
    } == SHOWN[name]


@pytest.mark.parametrize("settings", [[], ENGINE], ids=["as written", "sglang"])
@pytest.mark.parametrize("name", ["job.yaml", *SHOWN])
def test_an_example_can_be_planned_with_either_engine(name, settings):
    job = load_job(EXAMPLES / name, settings)
    plan = build_launch_plan(job, name="sums", uid="u", epoch=0, host="127.0.0.1")
    processes = [process for pod in plan.pods for container in pod.containers for process in container.processes]
    assert {process.group for process in processes} >= {"actor", "rollout", "env"}
