"""A job on real nodes, from `kubectl apply` to its end, and through all that its user may do to it meanwhile."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs_on_nodes import ENDED, FOREVER, SPREAD, Job, condition, example, started, unhurried
from tests.cluster.testcluster.access import Access
from tests.e2e.harness import Output, assert_trained_once

STEPS = 30
MINUTES = 60.0
"""In seconds. A machine of CI is slow and shared: the bounds here are far above what benchmarks measure."""


@pytest.fixture(scope="module")
def finished(operator: Access, training: str) -> Iterator[Job]:
    """The example, applied as it is but for a rollout on each node and its steps, and run to its end.

    It gets its number of steps when its pods were looked at. Until then it goes on, as this process may be slow.
    """
    _, manifest = example()
    manifest["spec"]["algorithm"]["steps"] = FOREVER
    manifest["spec"]["rollout"]["topologySpreadConstraints"] = SPREAD
    with started(operator, training, manifest) as job:
        job.wait_phase("Running", seconds=20 * MINUTES)
        job.wait("both rollouts", lambda status: columns(status).get("rollouts") == "2/2", seconds=9 * MINUTES)
        job.pods_then = job.pods()
        job.patch(algorithm={"steps": STEPS})
        job.wait("the end", lambda status: status.get("phase") in ENDED, seconds=20 * MINUTES)
        yield job


@pytest.fixture(scope="module")
def running(operator: Access, training: str, finished: Job) -> Iterator[Job]:
    """A job that goes on for as long as the tests of this module change it."""
    with started(operator, training, unhurried("life")) as job:
        job.wait("the second step", lambda status: status.get("step", 0) >= 2, seconds=9 * MINUTES)
        yield job


class TestFinished:
    def test_a_job_ends_in_succeeded_with_a_reward_that_rose(self, finished: Job) -> None:
        status = finished.status()
        assert status["phase"] == "Succeeded" and status["step"] >= STEPS, finished.condition("Failed")
        # The prepared model begins at 0.3; no status tells for sure what the first step had.
        assert status["reward"] > 0.7

    def test_kubectl_wait_for_complete_returns(self, finished: Job) -> None:
        finished.access.kubectl(
            "wait", "rljob/arithmetic", "-n", finished.namespace, "--for=condition=Complete", "--timeout=60s"
        )

    def test_kubectl_get_told_the_truth_all_along(self, finished: Job) -> None:
        phases = list(dict.fromkeys(seen["phase"] for seen in finished.seen if seen.get("phase")))
        assert phases == [phase for phase in ("Pending", "Starting", "Running", "Succeeded") if phase in phases]
        assert phases[-2:] == ["Running", "Succeeded"]
        steps = [seen["step"] for seen in finished.seen if "step" in seen]
        assert steps == sorted(steps)
        row = finished.row("-o", "wide")
        assert (row["PHASE"], row["STEP"], row["RESTARTS"], row["ATTEMPT"]) == (
            "Succeeded",
            f"{steps[-1]}/{STEPS}",
            "0",
            "1",
        )
        assert row["REASON"] == "TrainingFinished"
        assert float(row["REWARD"]) == pytest.approx(finished.status()["reward"])

    def test_rollouts_ran_on_both_nodes_and_only_the_actor_mounted_a_volume(self, finished: Job) -> None:
        def claims(role: str) -> list[str]:
            pods = [pod for name, pod in finished.pods_then.items() if f"-{role}-" in name]
            volumes = [volume for pod in pods for volume in pod["spec"]["volumes"]]
            return [
                volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume
            ]

        assert {role: claims(role) for role in ("actor", "rollout", "env")} == {
            "actor": ["arithmetic"],
            "rollout": [],
            "env": [],
        }
        nodes = {pod["spec"]["nodeName"] for name, pod in finished.pods_then.items() if "-rollout-" in name}
        assert nodes == {"node-1", "node-2"}

    def test_events_tell_the_story(self, finished: Job) -> None:
        deadline = time.monotonic() + 3 * MINUTES  # events are written behind the status
        words = ("describe", "rljob", "arithmetic", "-n", finished.namespace)
        while "Succeeded" not in (told := finished.access.kubectl(*words).stdout.partition("Events:")[2]):
            assert time.monotonic() < deadline, told
            time.sleep(0.5)


def test_the_example_learns_with_adapters(operator: Access, training: str, finished: Job) -> None:
    """The weights of the model are frozen, and adapters (LoRA) are trained, checkpointed and sent to the rollouts."""
    _, manifest = example()
    manifest["metadata"]["name"] = "adapters"
    manifest["spec"]["model"]["lora"] = {"rank": 8, "alpha": 16}
    manifest["spec"]["actor"]["optimizer"]["learningRate"] = 1.0e-3
    manifest["spec"]["algorithm"]["steps"] = STEPS
    job = Job(operator, training, "adapters")
    job.apply(manifest)
    status = job.wait("the end", lambda status: status.get("phase") in ENDED, seconds=20 * MINUTES)
    assert (status["phase"], status["step"]) == ("Succeeded", STEPS), job.condition("Failed")
    assert status["reward"] > 0.7
    job.delete()


def rljob(job: Job, *words: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line of `rljob WORDS` on a job, and its environment."""
    command = [sys.executable, "-m", "rl_core.cli.main", *words, "-n", job.namespace]
    return command, os.environ | {"KUBECONFIG": str(job.access.kubeconfig), "COLUMNS": "80"}


class TestLife:
    def test_its_samples_are_read_through_the_runner(self, running: Job) -> None:
        """By the commands of a person with a kubeconfig; the truth are the files in the pod."""
        words = ("exec", "life-actor-0", "-n", running.namespace, "-c", "actor", "--", "sh", "-c")
        lines = running.access.kubectl(
            *words, f"cat /data/checkpoints/{running.folder}/samples/*.jsonl"
        ).stdout.splitlines()
        sample = next(kept for line in lines if (kept := json.loads(line))["split"] == "train")
        command, env = rljob(running, "samples", "life", "--step", str(sample["step"]), "--group", sample["group"])
        printed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3 * MINUTES, check=False)
        assert printed.returncode == 0, printed.stderr
        assert (
            sample["messages"][0]["content"].splitlines()[0] in printed.stdout
            and f"group {sample['group']}" in printed.stdout
        )
        command, env = rljob(running, "view", "life", "--no-browser")
        page = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        try:
            assert page.stdout is not None
            url = page.stdout.readline().split()[0]
            (run,) = json.load(urllib.request.urlopen(f"{url}api/runs", timeout=MINUTES))
            assert run["name"] == "life"
            query = f"run=0&step={sample['step']}&group={sample['group']}&sample={sample['index']}"
            assert json.load(urllib.request.urlopen(f"{url}api/sample?{query}", timeout=MINUTES)) == sample
        finally:
            page.kill()
            page.wait(timeout=MINUTES)

    def test_scaling_up_adds_a_rollout_that_serves_the_weights_of_now(self, running: Job) -> None:
        before = running.status()
        running.access.kubectl("scale", "rljob/life", "-n", running.namespace, "--replicas=3")
        status = running.wait(
            "three rollouts",
            lambda status: status["rollout"]["readyReplicas"] == 3 and status.get("lag") == 0,
            seconds=6 * MINUTES,
        )
        assert status["epoch"] == before["epoch"]

    def test_scaling_down_drains_the_highest_first_and_training_goes_on(self, running: Job) -> None:
        before = running.status()
        running.access.kubectl("scale", "rljob/life", "-n", running.namespace, "--replicas=2")
        running.wait("two rollouts", lambda status: columns(status)["rollouts"] == "2/2", seconds=6 * MINUTES)
        words = ("-n", running.namespace, "--for=delete", "--timeout=300s")
        running.access.kubectl("wait", "pod/life-rollout-2", *words)
        assert set(running.pods("rollout")) == {"life-rollout-0", "life-rollout-1"}
        assert running.wait_steps(2, seconds=3 * MINUTES)["totalRestarts"] == before["totalRestarts"]

    def test_a_changed_number_of_steps_is_applied_without_a_restart(self, running: Job) -> None:
        uid = running.pods("actor")["life-actor-0"]["metadata"]["uid"]
        running.patch(algorithm={"steps": 90_000})
        status = running.wait(
            "the change applied",
            lambda status: (
                status.get("totalSteps") == 90_000 and status.get("appliedGeneration") == status["observedGeneration"]
            ),
            seconds=3 * MINUTES,
        )
        assert status["phase"] == "Running"
        assert running.pods("actor")["life-actor-0"]["metadata"]["uid"] == uid

    def test_suspend_saves_a_checkpoint_and_frees_all_pods_and_resume_goes_on_from_it(self, running: Job) -> None:
        before = running.status()
        running.patch(suspend=True)
        status = running.wait_phase("Suspended", seconds=9 * MINUTES)
        assert not running.pods()
        assert condition(status, "Suspended")["status"] == "True"
        saved = status["checkpoint"]["lastStep"]
        assert saved >= before["step"]
        running.patch(suspend=False)
        status = running.wait(
            "steps again", lambda status: status["phase"] == "Running" and status["step"] > saved, seconds=9 * MINUTES
        )
        assert (status["epoch"], status["restarts"]) == (before["epoch"] + 1, before["restarts"])

    def test_through_all_of_it_each_group_was_trained_once(self, running: Job, tmp_path: Path) -> None:
        """The rollout that joined and the one that drained included, and the steps after the resume."""
        last = running.status()["step"]
        for name in ("ledger.jsonl", "metrics.jsonl"):
            words = ("exec", "life-actor-0", "-n", running.namespace, "-c", "actor", "--", "sh", "-c")
            text = running.access.kubectl(*words, f"cat /data/checkpoints/{running.folder}/{name}").stdout
            told = [line for line in text.splitlines() if json.loads(line)["step"] <= last]
            (tmp_path / name).write_text("".join(f"{line}\n" for line in told))
        assert_trained_once(Output(tmp_path), steps=last, groups=8)


def columns(status: dict) -> dict:
    return status.get("columns", {})
