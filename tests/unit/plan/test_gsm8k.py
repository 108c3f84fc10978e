"""The jobs of examples/gsm8k, which no machine here can run: valid, planned over the right devices, rendered, and within their memory."""

import json
from pathlib import Path

import pytest

from rl_core.actors.guards import unsupported_settings
from rl_core.api.errors import CapacityError
from rl_core.cli import plan, validate
from rl_core.cli.job_file import JobProblems, load_job
from rl_core.cli.validate import validate_file
from rl_core.plan.launch import build_launch_plan
from rl_core.plan.model_facts import ModelFacts
from tests.unit.operator.manifest_samples import make_job, make_pods

EXAMPLES = Path(__file__).parents[3] / "examples" / "gsm8k"
COMMON = {"vocab_size": 151936, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_dropout": 0.0}
SHAPES = {
    "rljob.yaml": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 1536, "intermediate_size": 8960,
        "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 131072,
        "tie_word_embeddings": True, "use_sliding_window": False,
    },
    "qwen3-8b.yaml": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "tie_word_embeddings": False, "attention_bias": False, "use_sliding_window": False,
    },
}  # fmt: skip
SHAPES["lora-24gb.yaml"] = SHAPES["rljob.yaml"]
"""The config.json of the models, as far as plan and guards look at it."""
PARAMETERS = {"rljob.yaml": 1_543_714_304, "qwen3-8b.yaml": 8_190_735_360, "lora-24gb.yaml": 1_543_714_304}
"""As published."""
RANKS = {
    "rljob.yaml": "actor: fsdp2, 4 ranks = data 4 x tensor 1 x pipeline 1",
    "qwen3-8b.yaml": "actor: megatron, 8 ranks = data 1 x tensor 4 x pipeline 2",
    "lora-24gb.yaml": "actor: fsdp2, 1 ranks = data 1 x tensor 1 x pipeline 1",
}
DEVICES = {"rljob.yaml": 8, "qwen3-8b.yaml": 16, "lora-24gb.yaml": 1}
MEMORY = {"rljob.yaml": 74.5, "qwen3-8b.yaml": 74.5, "lora-24gb.yaml": 22.4}
"""GiB of the devices that the README names."""
TOO_SMALL = {"rljob.yaml": 12, "qwen3-8b.yaml": 15, "lora-24gb.yaml": 10}


@pytest.fixture(params=SHAPES)
def name(request):
    return request.param


@pytest.fixture
def job(name):
    return load_job(EXAMPLES / name, [])


@pytest.fixture
def facts(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(COMMON | SHAPES[name]))
    return ModelFacts.from_config(tmp_path)


@pytest.fixture
def asked(monkeypatch):
    """Return the references that the hub is asked for. It has all of them."""
    found = []
    monkeypatch.setattr(validate, "hub_problem", lambda reference, data: found.append((reference, data)) or "")
    return found


def test_it_is_valid_and_its_model_and_prompts_are_looked_for_on_the_hub(name, job, asked):
    assert validate_file(EXAMPLES / name, []) == 0
    assert asked == [(job.spec.model.path, False), (job.spec.data.train, True), (job.spec.data.validation, True)]
    assert all(reference.startswith("hf://") for reference, _ in asked)


def test_the_backend_has_what_the_model_needs(name, job):
    assert list(unsupported_settings(job.spec, COMMON | SHAPES[name])) == []


def test_its_ranks_are_laid_out_as_the_readme_says(name, job):
    assert plan.layout_line(job.spec.actor) == RANKS[name]
    launch = build_launch_plan(job, name=job.metadata.name, uid="u")
    ranks = [
        process
        for pod in launch.pods
        for container in pod.containers
        for process in container.processes
        if process.name.startswith("actor-")
    ]
    assert len(ranks) == job.spec.actor.world_size and all(len(process.visible_devices) == 1 for process in ranks)


def test_its_pods_ask_for_the_devices_of_the_nodes(name, job):
    written = job.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    pods = make_pods(make_job(name=job.metadata.name, **written))
    asked = [
        int(container["resources"].get("limits", {}).get("nvidia.com/gpu", 0))
        for pod in pods.values()
        for container in pod["spec"]["containers"]
    ]
    assert sum(asked) == DEVICES[name]
    actors = [pod for name, pod in pods.items() if "-actor-" in name]
    mounted = [[mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]] for pod in actors]
    assert len(actors) == job.spec.actor.replicas
    on_claim = (job.spec.checkpoint.path or "").startswith("/data/")
    assert all(("/data" in paths) == on_claim for paths in mounted)


def test_plan_shows_its_memory_and_refuses_it_on_devices_that_are_too_small(
    name, facts, tmp_path, asked, monkeypatch, capsys
):
    """Of the model nothing but config.json is fetched."""
    assert facts.parameters == pytest.approx(PARAMETERS[name], rel=0.01)
    monkeypatch.setattr(validate, "fetch_config", lambda reference: tmp_path)
    assert plan.show_plan(EXAMPLES / name, [], device_memory=MEMORY[name]) == 0
    shown = capsys.readouterr().out
    assert RANKS[name] in shown and "memory per process" in shown
    with pytest.raises(CapacityError, match=r"of device memory, got \d\d\.00 GiB available"):
        plan.show_plan(EXAMPLES / name, [], device_memory=TOO_SMALL[name])
    assert "memory per process" in capsys.readouterr().out, "the table comes before the refusal"
    assert validate_file(EXAMPLES / name, [], device_memory=MEMORY[name]) == 0
    with pytest.raises(JobProblems, match=r"of device memory, got \d\d\.00 GiB available"):
        validate_file(EXAMPLES / name, [], device_memory=TOO_SMALL[name])
