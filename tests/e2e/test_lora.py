"""`examples/arithmetic/lora.yaml` learns by `rljob run`: adapters over frozen weights, with a trainer and an engine of each kind."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.harness import Run, assert_trained_once

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic"
STEPS = 10
KINDS = {
    "Megatron and hf": ({"backend": "megatron"}, {}),
    "FSDP2 and SGLang": ({"backend": "fsdp2"}, {"engine": "sglang", "maxBatch": 64}),
}
pytestmark = pytest.mark.xdist_group("lora")  # the model is made once


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory) -> Path:
    """A folder with the model, of a third of the example's size, and the data."""
    folder = tmp_path_factory.mktemp("arithmetic")
    command = [sys.executable, str(EXAMPLE / "prepare.py"), "--output", str(folder), "--quick"]
    subprocess.run(command, check=True, timeout=900)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_learn_and_are_sent_alone(arithmetic, tmp_path, kind):
    document = yaml.safe_load((EXAMPLE / "lora.yaml").read_text())
    spec, (actor, rollout) = document["spec"], KINDS[kind]
    spec["model"]["path"] = str(arithmetic / "model")
    spec["data"] = {name: str(arithmetic / file) for name, file in spec["data"].items()}
    spec["algorithm"]["steps"] = STEPS
    spec["actor"] |= actor
    spec["rollout"] |= {"replicas": 1, **rollout}
    spec["checkpoint"] = {"everySteps": None}
    del spec["validation"]
    run = Run(tmp_path, document)
    try:
        assert run.run() == 0, run.text + run.logs()
    finally:
        run.end()
    assert_trained_once(run, steps=STEPS, groups=32)
    lines = [line for line in run.lines("metrics.jsonl") if line["step"]]
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-3:]) > 6 * rewards[0], rewards
    model = (run.output / "model/model.safetensors").stat().st_size
    assert max(line["weights/bytes"] for line in lines) < 0.2 * model, "the base is sent once"
    assert lines[-1]["weights/content_check_passed_total"] >= STEPS - 1
    assert (run.output / "model/adapter/adapter_config.json").is_file()
