"""Compiled decoder layers: the same losses and gradients, one code for all layers and micro-batches, and what cannot be compiled is refused."""

import pytest
import torch
from torch._dynamo.utils import counters

from rl_core.actors.guards import unsupported_settings
from rl_core.api.errors import ConfigError
from tests.unit.actors.actor_steps import gradients, sums


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks at it
def test_compiled_layers_train_as_others(make_actor, records):
    torch._dynamo.reset()
    counters.clear()
    options = {"actor__gradientCheckpointing": True, "actor__microBatchTokens": 40}
    plain, compiled = (
        gradients(make_actor(**options), records),
        gradients(make_actor(actor__compile=True, **options), records),
    )
    assert sums(compiled[0]) == pytest.approx(sums(plain[0]), rel=1e-5, abs=1e-6)
    for name, gradient in plain[1].items():
        assert torch.allclose(compiled[1][name], gradient, atol=1e-6), name
    # What lies before attention and what lies after it, of all layers, for any number of tokens.
    assert counters["stats"]["unique_graphs"] <= 4
    assert len(counters["graph_break"]) == 1 and "packed_attention" in next(iter(counters["graph_break"]))


def test_a_machine_without_a_compiler_is_told_before_anything_is_compiled(make_actor, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"actor\.compile needs a C\+\+ compiler .* found none of g\+\+, clang\+\+"):
        make_actor(actor__compile=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"actor__backend": "megatron"}, ["actor.compile", "got megatron", "schedules"]),
        ({"actor__backend": "fsdp1"}, ["actor.compile", "got fsdp1", "one tensor"]),
        (
            {"actor__gradientCheckpointing": True, "actor__gradientCheckpointingMode": "selective"},
            ["actor.gradientCheckpointingMode must be full", "got selective"],
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused(make_spec, changes, words):
    config = {"architectures": ["Qwen2ForCausalLM"]}
    (line,) = unsupported_settings(make_spec(actor__compile=True, **changes), config)
    assert all(word in line for word in words)
    assert not list(unsupported_settings(make_spec(**changes), config))


def test_a_mixture_of_experts_is_refused(make_spec):
    config = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
    (line,) = unsupported_settings(make_spec(actor__compile=True), config)
    assert line.startswith("actor.compile must be false for a mixture of experts") and "got 8 experts" in line
    assert not list(unsupported_settings(make_spec(), config))
