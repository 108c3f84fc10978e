"""examples/agent on real nodes: the job goes on when a rollout's pod is deleted in the middle of a conversation."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import yaml

from rl_core.samples.reader import SampleReader
from rljob_operator.cli.connection import Connection
from rljob_operator.cli.runner_files import RunnerFiles
from tests.cluster.jobs_on_nodes import SPREAD, USER, Job, host_claim
from tests.cluster.testcluster.access import Access
from tests.e2e.harness import Output, assert_trained_once
from tests.e2e.test_agent import tokens_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "agent"
STEPS, GROUPS, SIZE = 8, 16, 8
MINUTES = 60.0
WATCHED = """
import json, pathlib, secrets, threading, time

import calculator
import openai

FOLDER = pathlib.Path("/data/runs")
THREAD = threading.local()
calculate = calculator.calculate


class Client(openai.OpenAI):
    # Asks for the ids of each answer, and notes them.
    def post(self, path, *, body, **options):
        answer = super().post(path, body={**body, "return_token_ids": True}, **options)
        THREAD.ids += answer.choices[0].token_ids
        return answer


def hold(call):
    # The first conversation that calls the calculator waits until the test says `go`.
    held, go = FOLDER / "held", FOLDER / "go"
    try:
        with held.open("x") as file:
            file.write(THREAD.prompt)
    except FileExistsError:
        return calculate(call)
    while not go.exists():
        time.sleep(0.05)
    return calculate(call)


calculator.OpenAI, calculator.calculate = Client, hold


def run(row, **endpoint):
    THREAD.ids, THREAD.prompt = [], row["prompt"][0]["content"]
    result = calculator.run(row, **endpoint)
    (FOLDER / f"{secrets.token_hex(8)}.json").write_text(json.dumps(THREAD.ids))
    return result
"""
"""The example's program with a note of what its client saw."""


def job_document() -> dict:
    """Return the example's job with the program `watched`, which keeps its notes on the volume; few steps, all samples kept."""
    _, job = yaml.safe_load_all((EXAMPLE / "rljob.yaml").read_text())
    spec = job["spec"]
    spec["code"] = {"configMap": "agent-files"}
    spec["algorithm"]["steps"] = STEPS
    spec["samples"] = {"groups": GROUPS}
    spec["rollout"]["topologySpreadConstraints"] = SPREAD
    spec["env"] |= {name: spec["actor"][name] for name in ("volumes", "volumeMounts")} | {"agent": "watched:run"}
    del spec["validation"], spec["data"]["validation"]
    return job


def until(condition: Callable[[], object], job: Job, what: str) -> object:
    """Return the first true value of `condition`; a job that has failed meanwhile says why."""
    deadline = time.monotonic() + 9 * MINUTES
    while not (value := condition()):
        status = job.status()
        failed = status.get("phase") == "Failed"
        assert not failed and time.monotonic() < deadline, (what, job.condition("Failed").get("message"))
        time.sleep(0.2)
    return value


def owner_of(job: Job, group: str) -> str:
    """Return the rollout that holds the group by the runner's ledger, "" for none."""
    runner = RunnerFiles(Connection(job.access.client, namespace=job.namespace), job.name)
    status, _ = runner.ask({"have": {}, "folders": []})
    return next((held["owner"] or "" for held in status["ledger"]["groups"] if held["id"] == group), "")


def test_the_agent_learns_and_a_conversation_outlives_the_pod_of_its_rollout(
    operator: Access, training: str, submit: Callable[[dict], Job]
) -> None:
    folder = host_claim(operator, training, "agent")
    runs = folder / "runs"
    runs.mkdir()
    os.chown(runs, USER, USER)
    files = {name: (EXAMPLE / name).read_text() for name in ("calculator.py", "prepare.py")} | {"watched.py": WATCHED}
    code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "agent-files"}, "data": files}
    operator.apply(code, namespace=training)
    job = submit(job_document())

    held = runs / "held"
    prompt = until(lambda: held.exists() and held.read_text(), job, "a conversation that waits for its tool")
    rows = [json.loads(line) for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
    group = f"0-{[row['prompt'][0]['content'] for row in rows].index(prompt)}"
    owner = until(lambda: owner_of(job, group), job, f"the owner of group {group}")
    pod = f"agent-rollout-{owner.split()[0].partition(':')[2]}"
    uid = job.pods("rollout")[pod]["metadata"]["uid"]
    operator.kubectl("delete", "pod", pod, "-n", training, "--grace-period=1", "--wait=false")
    until(lambda: owner_of(job, group) != owner, job, f"the loss of {owner}")
    (runs / "go").touch()
    job.wait_replaced(pod, uid, seconds=9 * MINUTES)
    status = job.wait("the end", lambda status: status.get("phase") in ("Succeeded", "Failed"), seconds=20 * MINUTES)
    assert (status["phase"], status["step"], status["totalRestarts"], status["epoch"]) == ("Succeeded", STEPS, 0, 1)

    [path] = (folder / "checkpoints").glob("agent-*")
    output = Output(path)
    assert_trained_once(output, steps=STEPS, groups=GROUPS)
    lines = [line for line in output.lines("metrics.jsonl") if line["step"]]
    assert lines[-1]["env/sessions_moved_total"] >= 1
    rewards = [line["reward/mean"] for line in lines]
    assert rewards[-1] > rewards[0] + 0.1, rewards
    # What each program saw is what was trained, token for token, and no program ran twice.
    reader = SampleReader(path)
    reader.refresh()
    trained = [tokens_of(reader.read(found))[0] for found in reader.every("train")]
    seen = [tuple(json.loads(file.read_text())) for file in runs.glob("*.json")]
    assert Counter(trained) == Counter(seen) and len(trained) == STEPS * GROUPS * SIZE
