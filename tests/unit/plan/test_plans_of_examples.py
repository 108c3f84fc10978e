"""Launch plans of the examples and of every placement stay as they are, byte for byte: pods of a running job depend on them.

After an intended change write the digests anew: `python tests/unit/plan/test_plans_of_examples.py`.
"""

import itertools
import json
from pathlib import Path

import pytest
import yaml

from rl_core.api.job import RLJob
from rl_core.plan.launch import build_launch_plan

ROOT = Path(__file__).parents[3]
DIGESTS = Path(__file__).with_name("plan_digests.json")


def examples():
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        for index, document in enumerate(yaml.safe_load_all(path.read_text())):
            if isinstance(document, dict) and document.get("kind") == "RLJob":
                yield f"{path.relative_to(ROOT)}#{index}", document


def placements():
    alone, taking_turns = [(1, 1), (2, 3)], [(1, 1), (2, 2), (1, 3)]
    for mode, gpus, allocation in itertools.product(
        ("disaggregated", "colocated", "hybrid"), (0, 2), ("devicePlugin", "dra")
    ):
        for actors, rollouts in alone if mode == "disaggregated" else taking_turns:
            if mode == "colocated" and actors != rollouts:
                continue
            pods = {"gpus": gpus, "gpuAllocation": allocation} | ({"deviceClass": "gpu"} if allocation == "dra" else {})
            spec = {
                "model": {"path": "model"}, "data": {"train": "d.jsonl"}, "placement": {"mode": mode},
                "actor": {"replicas": actors, "processesPerPod": 2, **pods}, "rollout": {"replicas": rollouts, **pods},
                "env": {"replicas": 2}, "algorithm": {"promptsPerStep": 32},
            }  # fmt: skip
            written = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": spec}
            yield f"{mode}, gpus {gpus}, {allocation}, {actors} + {rollouts} pods", written


CASES = dict([*examples(), *placements()])


def digests(document):
    job = RLJob.model_validate(document)
    replicas = {"env": 3} if job.spec.placement.mode == "colocated" else {"rollout": 5, "env": 3}
    cases = {"cluster": {}, "local": {"host": "127.0.0.1"}, "scaled": {"epoch": 2, "replicas": replicas}}
    return {name: build_launch_plan(job, name="j", uid="u-1", **case).digest for name, case in cases.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_one_on_record(name):
    assert digests(CASES[name]) == json.loads(DIGESTS.read_text())[name]


if __name__ == "__main__":
    DIGESTS.write_text(
        json.dumps({name: digests(case) for name, case in CASES.items()}, indent=1, sort_keys=True) + "\n"
    )
