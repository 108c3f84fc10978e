"""Megatron asks for no value of a tensor in a pass: on an accelerator each such question waits for the device."""

import sys

import pytest
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rl_core.actors.megatron import cpu
from tests.actor_samples import make_model, make_spec
from tests.integration.fsdp_rank import Rank

ASKS = {Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.nonzero}


class Questions(TorchFunctionMode):
    """Notes which functions of megatron's model, and of its exchange between stages, ask for values of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in ASKS:
            frame = sys._getframe(1)
            while frame.f_code.co_filename == cpu.__file__:  # which passes everything on
                frame = frame.f_back
            code = frame.f_code
            self.seen.add(f"{code.co_filename.rpartition('/megatron/core/')[2]}: {code.co_name}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recomputed", [False, True])
def test_no_layer_asks_for_the_boundaries_of_rows(tmp_path, recomputed):
    spec = make_spec(make_model(tmp_path), actor__backend="megatron", actor__gradientCheckpointing=recomputed)
    rank = Rank(spec, [[0, 1, 2, 3]], 0, 1)
    with Questions() as questions:
        rank.train(1)
    assert not {one for one in questions.seen if one.startswith(("models/", "transformer/", "pipeline_parallel/p2p"))}
