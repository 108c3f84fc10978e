"""What a Megatron trainer asks of an accelerator, as far as it can be seen without one."""

import os

import pytest

from rl_core.actors.megatron.manager import MegatronModelManager
from rl_core.api.errors import RLJobError
from tests.actor_samples import make_model, make_spec
from tests.integration.fsdp_rank import Rank


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adamw_is_fused_so_that_a_step_needs_no_temporaries(model, dtype):
    manager = Rank(make_spec(model, actor__backend="megatron", model__dtype=dtype), [[]], 0, 1).actor.manager
    groups = manager.optimizer.param_groups
    assert groups and all(group["fused"] and not group["foreach"] for group in groups)


@pytest.mark.parametrize(("tensor", "expected"), [(2, "1"), (1, None)])
def test_tensor_parallel_layers_send_in_order_to_the_device(model, monkeypatch, tensor, expected):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    changes = {"actor__gpus": 1, "actor__replicas": tensor, "actor__parallel": {"tensor": tensor}}
    with pytest.raises(RLJobError, match="accelerator|CUDA|gpus"):
        MegatronModelManager(make_spec(model, actor__backend="megatron", **changes), tensor, 0)
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected
