"""What SGLang is given of an adapter, and the arguments with which it takes adapters."""

import hashlib

import pytest
import torch

from rl_core.api.errors import ConfigError, InfrastructureError
from rl_core.api.job import RLJobSpec
from rl_core.api.lora import LoraSpec
from rl_core.plan.engine_arguments import check_engine_arguments
from rl_core.rollouts.sglang import setup
from rl_core.rollouts.sglang.adapters import AdapterTensors, digest
from rl_core.rollouts.sglang.weight_target import weight_buffer

LAYER = "model.layers.{}.self_attn.{}_proj.weight"
SHAPES = {LAYER.format(layer, part): ((8 if part == "q" else 4, 6), "bfloat16") for layer in (0, 1) for part in "qkv"}
SHAPES |= {"model.layers.0.mlp.gate_proj.weight": ((10, 6), "bfloat16"), "model.layers.0.mlp.up_proj.weight": ((10, 6), "bfloat16")}  # fmt: skip


def job(**changes):
    rollout = {"engine": "sglang", **changes.pop("rollout", {})}
    lora = {"rank": 2, "alpha": 6.0, "targets": ["q_proj", "up_proj"], "layers": [0]}
    spec = {"model": {"path": "p", "lora": lora}, "data": {"train": "t"}, "rollout": rollout, **changes}
    return RLJobSpec.model_validate(spec)


def test_the_other_parts_of_a_fused_layer_are_zeros_and_nothing_else_is_added():
    known = AdapterTensors(job().model.lora, SHAPES)
    q, up = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
    assert known.shapes == {
        f"{q}.lora_A.weight": ((2, 6), "float32"),
        f"{q}.lora_B.weight": ((8, 2), "float32"),
        f"{up}.lora_A.weight": ((2, 6), "float32"),
        f"{up}.lora_B.weight": ((10, 2), "float32"),
    }
    given = {name: torch.randn(shape) for name, (shape, _) in known.shapes.items()}
    whole = known.complete(given)
    assert {name for name in whole if name not in given} == {
        f"model.layers.0.{part}.lora_{matrix}.weight"
        for part in ("self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj")
        for matrix in "AB"
    }
    assert all(torch.equal(whole[name], given.get(name, torch.zeros_like(whole[name]))) for name in whole)
    assert whole["model.layers.0.self_attn.k_proj.lora_B.weight"].shape == (4, 2)
    assert known.config["r"] == 2 and known.config["lora_alpha"] == 6.0
    buffer = weight_buffer(SHAPES, known)
    assert buffer.bytes.numel() >= known.nbytes > sum(tensor.nbytes for tensor in whole.values())
    buffer.close()


@pytest.mark.parametrize("change", ["missing", "more", "of another rank"])
def test_an_adapter_that_is_not_that_of_the_job_is_named(change):
    known = AdapterTensors(LoraSpec(rank=2), SHAPES)
    given = {name: torch.zeros(shape) for name, (shape, _) in known.shapes.items()}
    name = "model.layers.1.self_attn.k_proj.lora_A.weight"
    if change == "missing":
        del given[name]
    elif change == "more":
        given[name := "model.layers.7.self_attn.k_proj.lora_A.weight"] = torch.zeros(2, 6)
    else:
        given[name] = torch.zeros(3, 6)
    with pytest.raises(InfrastructureError, match=name):
        known.complete(given)


def test_a_digest_is_the_sha_256_of_the_bytes():
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t()
    assert digest(tensor) == hashlib.sha256(torch.tensor([1.0, 3.0, 2.0, 4.0]).numpy().tobytes()).hexdigest()


def test_an_engine_is_started_for_two_adapters_of_the_jobs_rank_and_targets(tmp_path):
    options = setup.options(job(), tmp_path, "cpu", 64)
    assert (options["enable_lora"], options["max_lora_rank"]) == (True, 2)
    assert options["lora_target_modules"] == ["q_proj", "up_proj"]
    assert options["max_loras_per_batch"] == options["max_loaded_loras"] == 2
    merged = setup.options(job(weights={"syncer": "patch"}), tmp_path, "cpu", 64)
    assert "enable_lora" not in merged


@pytest.mark.parametrize("name", ["enable_lora", "max_lora_rank", "max_loaded_loras"])
def test_a_job_cannot_set_the_engines_adapters_itself(name):
    with pytest.raises(ConfigError, match=rf"{name}.*spec\.model\.lora"):
        check_engine_arguments(job(rollout={"engineArgs": {name: 1}}))
