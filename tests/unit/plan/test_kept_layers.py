"""Which decoder layers keep activations: gradients flow down to the lowest adapter, and through every pipeline stage but the first."""

import pytest

from rl_core.api.job import RLJobSpec
from rl_core.plan.kept_layers import kept_layers

LAYERS = 8


def kept(*, layers, backend="fsdp2", **actor):
    lora = {"model": {"path": "m", "lora": {"layers": layers}}} if layers != "trained" else {"model": {"path": "m"}}
    spec = RLJobSpec.model_validate({**lora, "data": {"train": "t"}, "actor": {"backend": backend, **actor}})
    return [(one.trained, one.frozen, one.lowest) for one in kept_layers(spec, LAYERS)]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [("trained", (8, 0, 0)), (None, (7, 0, 1)), ([7], (0, 0, 1)), ([3, 5], (1, 3, 1)), ([0], (0, 7, 1))],
)
def test_layers_below_the_lowest_adapter_keep_nothing(layers, expected):
    assert kept(layers=layers) == [expected]


def test_a_layer_under_fsdp1_keeps_all_that_its_single_parameter_wants():
    assert kept(layers=[3, 5], backend="fsdp1") == [(2, 3, 0)]


def test_every_pipeline_stage_but_the_first_sends_gradients_to_the_one_before():
    stages = {"backend": "megatron", "replicas": 2, "parallel": {"pipeline": 2}}
    assert kept(layers=[2, 6], **stages) == [(0, 2, 2), (1, 3, 0)]
    assert kept(layers=[6], **stages) == [(0, 0, 0), (1, 3, 0)]


def test_megatron_recomputes_the_layers_below_too():
    assert kept(layers=[6], backend="megatron", gradientCheckpointing=True) == [(1, 7, 0)]


def test_stages_that_interleave_are_counted_as_if_all_layers_kept_something():
    spec = {"backend": "megatron", "replicas": 2, "parallel": {"pipeline": 2, "virtualPipeline": 2}}
    assert kept(layers=[6], **spec) == [(1.25, 8.75, 0)]
