"""Examples with groups of their own as jobs on two nodes, and a pod of such a group killed while it works."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests import ROOT
from tests.cluster.jobs_on_nodes import FOREVER, REWARD, SHARED, Job, finish, readable_by_pods
from tests.cluster.testcluster.access import Access
from tests.e2e.harness import Output, assert_trained_once

MINUTES = 60.0
STORAGE = {
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": SHARED}}],
    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
}


Begun = Callable[..., tuple[Job, dict, dict[str, dict]]]
"""Takes the name of an example and pods of its job; returns the job, its status with two steps in a checkpoint, and those pods, ready."""


def example(name: str) -> dict:
    """Return the job of an example, whose code is the ConfigMap of its name and whose pods of actors and groups mount the shared volume."""
    job = yaml.safe_load((ROOT / "examples" / name / "job.yaml").read_text())
    spec, label = job["spec"], job["metadata"]["name"]
    spec["model"]["path"], spec["data"]["train"] = "/data/model", "/data/data/train.jsonl"
    spec["code"] = {"configMap": f"code-{label}"}
    spec.setdefault("actor", {}).update(STORAGE)
    for group in spec["groups"]:
        group |= STORAGE
    spec["checkpoint"] = {"path": "/data/checkpoints", "everySteps": 1}
    return job


def code(name: str, *files: Path, **more: str) -> dict:
    """Return the ConfigMap with the code of a job."""
    data = {path.name: path.read_text() for path in files} | {f"{module}.py": text for module, text in more.items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"code-{name}"}, "data": data}


@pytest.fixture(scope="module")
def manifests(operator: Access, training: str, shared: Path) -> dict[str, dict]:
    """Three jobs by the names of their examples. They go on until their tests end them."""
    pipeline, rejection, rewarded = example("pipeline"), example("own_program"), example("reward_model")
    for job in (pipeline, rejection, rewarded):
        job["spec"]["algorithm"]["steps"] = FOREVER
    for group in pipeline["spec"]["groups"]:
        group["lifecycle"] = "gang"
    spec = rejection["spec"]
    spec["algorithm"] |= {"promptsPerStep": 8}
    sampler, learner = spec["groups"]
    sampler["config"] = {"reward": "reward:letter_a", "maxNewTokens": 8}
    learner["config"] = {"learningRate": 3.0e-3, "epochs": 4}
    folder = shared / "rewarded"
    subprocess.run(
        [sys.executable, ROOT / "examples" / "reward_model" / "prepare.py", "--output", folder], check=True, timeout=600
    )
    readable_by_pods(folder)
    spec = rewarded["spec"]
    del spec["code"]
    spec["model"]["path"], spec["data"]["train"] = "/data/rewarded/model", "/data/rewarded/data/train.jsonl"
    spec["groups"][0]["config"]["modelPath"] = "/data/rewarded/reward-model"
    small = {"requests": {"cpu": "50m", "memory": "128Mi"}}
    spec["rollout"]["resources"] = spec["env"]["resources"] = small
    examples = ROOT / "examples"
    operator.apply(
        code("pipeline", examples / "pipeline" / "pipeline.py", examples / "pipeline" / "program.py"),
        code("own-program", examples / "own_program" / "program.py", reward=REWARD),
        namespace=training,
    )
    return {"pipeline": pipeline, "own_program": rejection, "reward_model": rewarded}


@pytest.fixture(scope="module")
def begun(operator: Access, training: str, manifests: dict[str, dict]) -> Iterator[Begun]:
    """Start the jobs, which run side by side. What it returns waits for one of them."""
    jobs = {name: Job(operator, training, manifest["metadata"]["name"]) for name, manifest in manifests.items()}

    def begin(example: str, *pods: str) -> tuple[Job, dict, dict[str, dict]]:
        job = jobs[example]
        job.start(manifests[example])

        def has_begun(status: dict) -> bool:
            return status.get("phase") == "Failed" or (status.get("checkpoint", {}).get("lastStep") or 0) >= 2

        status = job.wait("a checkpoint", has_begun, seconds=15 * MINUTES)
        assert status["phase"] != "Failed", job.condition("Failed")
        return job, status, job.ready_pods(*(f"{job.name}-{pod}" for pod in pods), seconds=9 * MINUTES)

    try:
        for name, job in jobs.items():
            job.start(manifests[name])
        yield begin
    finally:
        for job in jobs.values():
            job.delete()


def finish_after(more: int, job: Job, shared: Path, *, restarts: int) -> Output:
    """Let the job end after some steps more; return what it left on the volume, in which each step has its line."""
    steps = job.status()["step"] + more
    output = finish(job, shared, steps=steps, restarts=restarts)
    assert {line["step"] for line in output.lines("metrics.jsonl")} >= set(range(1, steps + 1))
    return output


def test_a_killed_scorer_of_the_pipeline_restarts_all_gangs_from_the_checkpoint_and_no_row_is_missing(
    begun: Begun, shared: Path
) -> None:
    job, then, before = begun("pipeline", "actor-0", "reader-0", "reader-1", "scorer-0", "scorer-1")
    assert set(job.pods()) == set(before)
    job.kill("pipeline-scorer-1")
    job.wait("a new epoch", lambda status: status["epoch"] > then["epoch"], seconds=3 * MINUTES)
    for name, pod in before.items():
        job.wait_replaced(name, pod["metadata"]["uid"], seconds=9 * MINUTES)
    job.wait_steps(2, seconds=9 * MINUTES)
    for line in finish_after(50, job, shared, restarts=then["totalRestarts"] + 1).lines("metrics.jsonl"):
        rows = range(100 * (line["step"] - 1), 100 * line["step"])
        assert line["reward/mean"] == sum(row * row for row in rows) / 100


def test_a_killed_sampler_is_replaced_alone_and_its_task_goes_to_another_one(begun: Begun, shared: Path) -> None:
    job, then, before = begun("own_program", "actor-0", "sampler-0", "sampler-1", "learner-0")
    job.wait_replaced("own-program-sampler-0", job.kill("own-program-sampler-0"), seconds=9 * MINUTES)
    assert job.status()["epoch"] == then["epoch"]
    after = job.pods()
    changed = {name for name in after if after[name]["metadata"]["uid"] != before[name]["metadata"]["uid"]}
    assert changed == {"own-program-sampler-0"}
    lines = finish_after(100, job, shared, restarts=then["totalRestarts"]).lines("metrics.jsonl")
    assert lines[-1]["failures_total/sampler/lost"] == 1
    assert max(line["reward/mean"] for line in lines) > lines[0]["reward/mean"] + 0.2


def test_a_step_waits_for_the_successor_of_a_killed_reward_model(begun: Begun, shared: Path) -> None:
    job, then, _ = begun("reward_model", "reward-model-0")
    job.wait_replaced("reward-model-reward-model-0", job.kill("reward-model-reward-model-0"), seconds=9 * MINUTES)
    assert job.status()["epoch"] == then["epoch"]
    output = finish_after(20, job, shared, restarts=then["totalRestarts"])
    lines = output.lines("metrics.jsonl")
    assert lines[-1]["failures_total/reward-model/lost"] == 1
    assert_trained_once(output, steps=lines[-1]["step"], groups=8)
