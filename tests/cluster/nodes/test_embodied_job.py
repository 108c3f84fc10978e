"""The embodied example on real nodes, with env workers on both of them, while an env pod and then a rollout pod are deleted."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster.jobs_on_nodes import SPREAD, Job
from tests.cluster.testcluster.access import Access

EXAMPLE = Path(__file__).parents[3] / "examples" / "embodied" / "rljob.yaml"
MINUTES = 60.0
NUM_ENVS, HORIZON = 8, 32
RECORDED = {
    "numbered.py": """
import secrets

import gymnasium
import numpy as np


class Numbered(gymnasium.Wrapper):
    \"\"\"A CartPole each of whose observations has a number that no other one has; the task is solved after 15 steps.\"\"\"

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.number, self.length = secrets.randbits(30) << 32, 0

    def numbered(self, states):
        self.number += 1
        return {"states": states, "number": np.array([self.number])}

    def reset(self, **options):
        self.length = 0
        states, info = super().reset(**options)
        return self.numbered(states), info

    def step(self, action):
        self.length += 1
        states, reward, terminated, truncated, info = super().step(action)
        return self.numbered(states), reward, terminated, truncated, {"success": self.length >= 15}
""",
    "recording.py": """
from pathlib import Path

import torch

from rl_core.policies.mlp import MLPPolicy


class Recording(MLPPolicy):
    \"\"\"An MLP that writes down the numbers of the observations that it is trained on.\"\"\"

    step = 0

    def set_global_step(self, step):
        self.step = step

    def predict(self, obs, mode="train"):
        actions, result = super().predict(obs, mode)
        result["forward_inputs"]["number"] = obs["number"]
        return actions, result

    def forward_train(self, inputs):
        if torch.is_grad_enabled():
            with Path("/data/trained").open("a") as file:
                file.writelines(f"{self.step} {number}\\n" for number in inputs["number"].flatten().tolist())
        return super().forward_train(inputs)
""",
}


def manifests() -> tuple[list[dict], dict]:
    """Return the example as it is but for an env worker on each node, one pass over the data, and records of what is trained."""
    claim, policy, job = yaml.safe_load_all(EXAMPLE.read_text())
    policy["data"]["config.json"] = policy["data"]["config.json"].replace('"mlp"', '"recording:Recording"')
    code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "recorded"}, "data": RECORDED}
    spec = job["spec"]
    spec["code"] = {"configMap": "recorded"}
    spec["algorithm"] |= {"steps": 100_000, "updateEpochs": 1, "optimizerStepsPerBatch": 1}
    spec["env"] |= {"replicas": 2, "topologySpreadConstraints": SPREAD}
    spec["env"]["options"] |= {"id": "numbered:Numbered", "numEnvs": NUM_ENVS, "horizon": HORIZON}
    spec["validation"]["everySteps"] = 100_000
    return [claim, policy, code], job


@pytest.fixture(scope="module")
def disturbed(operator: Access, training: str) -> Iterator[Job]:
    """The job, after an env pod and then a rollout pod were deleted and others took their places."""
    others, manifest = manifests()
    operator.apply(*others, namespace=training)
    job = Job(operator, training, "cartpole")
    job.apply(manifest)
    job.wait("the third step", lambda status: status.get("step", 0) >= 3, seconds=9 * MINUTES)
    job.pods_then = job.pods()
    for pod in ("cartpole-env-1", "cartpole-rollout-0"):
        operator.kubectl("delete", "pod", pod, "-n", training, "--wait=false")
        job.wait_replaced(pod, job.pods_then[pod]["metadata"]["uid"], seconds=9 * MINUTES)
        job.wait_steps(3, seconds=3 * MINUTES)
    yield job
    job.delete()


def test_the_job_goes_on_without_a_restart(disturbed: Job) -> None:
    homes = {name: pod["spec"]["nodeName"] for name, pod in disturbed.pods_then.items()}
    assert {homes["cartpole-env-0"], homes["cartpole-env-1"]} == {"node-1", "node-2"}
    status = disturbed.status()
    assert (status["phase"], status["epoch"], status["totalRestarts"]) == ("Running", 1, 0)


def test_each_transition_is_trained_once_and_no_step_has_more_than_its_own(disturbed: Job) -> None:
    words = ("exec", "cartpole-actor-0", "-n", disturbed.namespace, "-c", "actor", "--", "cat", "/data/trained")
    text = disturbed.access.kubectl(*words).stdout
    rows = [tuple(map(int, line.split())) for line in text.splitlines()[:-1]]
    assert max(Counter(number for _, number in rows).values()) == 1
    sizes = Counter(step for step, _ in rows)
    assert sorted(sizes) == list(range(len(sizes)))
    last = max(sizes)
    whole = 2 * NUM_ENVS * HORIZON
    assert max(sizes.values()) == whole
    # A step has less where an env worker was lost in it, or was not there.
    assert sizes[0] == sizes[last - 1] == whole


def test_kubectl_get_shows_return_and_success(disturbed: Job) -> None:
    row = disturbed.row("-o", "wide")
    assert 9 <= float(row["REWARD"]) <= 500
    assert 0 < float(row["SUCCESS"]) <= 1
