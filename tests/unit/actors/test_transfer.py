"""A micro-batch reaches its device in two copies, and no operation on it waits for the device.

The device `meta` stands for an accelerator: its tensors have no values, so whatever would have to ask the device for a value raises.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_core.actors import hf
from rl_core.actors.forward import attach_scoring
from rl_core.actors.fsdp.backend import FSDPBackend
from rl_core.actors.objective import PolicyObjective
from rl_core.actors.rows import Columns, StepRows
from rl_core.actors.transfer import to_device, to_host
from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.stats import merge_stats
from rl_core.api.job import RLJobSpec
from tests.actor_samples import make_model, make_spec

META = torch.device("meta")


class Crossings(TorchDispatchMode):
    """Notes the copies from the CPU to the device `meta` and back."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            device = torch.device(kwargs["device"])
            if device != args[0].device:
                (self.there if device == META else self.back).append(args[0].shape)
                if device.type == "cpu":
                    return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            (self.there if args[0].device == META else self.back).append(args[0].shape)
        return func(*args, **kwargs)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return RLJobSpec.model_validate(make_spec(make_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture
def backend(spec, monkeypatch):
    """The FSDP backend with a model on the device `meta`, for which torch has no autocast."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    with META:
        model = hf.build_model(hf.read_config(spec.model.path), dtype=torch.float32)
    attach_scoring(model)
    manager = SimpleNamespace(
        cfg=spec,
        model=model,
        compute_device=META,
        has_critic=False,
        ranks=SimpleNamespace(size=1),
        residency=SimpleNamespace(require_loaded=lambda *_: None),
        before_micro_batch=lambda *_: nullcontext(),
    )
    return FSDPBackend(manager)


def rows(length: int) -> StepRows:
    ids, mask = torch.randint(0, 24, (4, length)), torch.ones(4, length, dtype=torch.bool)
    floats = {name: torch.randn(4, length) for name in ("old_log_probs", "advantages", "weights", "rollout_log_probs")}
    columns = Columns(input_ids=ids, loss_mask=mask, **floats)
    return StepRows(numbers=[0, 1, 2, 3], lengths=[length] * 4, columns=columns)


def test_a_micro_batch_is_trained_with_two_copies_and_without_waiting_for_the_device(backend, spec):
    objective = PolicyObjective(spec.algorithm, max_tokens=16).with_mismatch_metrics
    with Crossings() as seen:
        stats = backend.forward_backward(
            [rows(9), rows(12), rows(5)], objective, LossNormalizers(88.0, 12.0), proceed=lambda: None
        )
        assert (len(seen.there), len(seen.back)) == (2 * 3, 0)
        merge_stats(stats)
    assert len(seen.back) == 1, "the statistics of all micro-batches are read together"
    assert all(parameter.grad is not None for parameter in backend.manager.model.parameters())


def test_scores_of_all_micro_batches_leave_the_device_together(backend):
    with Crossings() as seen:
        scored = backend.score_rows([rows(9), rows(12), rows(5)], proceed=lambda: None)
    assert (len(seen.there), len(seen.back)) == (3, 1)
    assert [one.log_probs.shape for one in scored] == [(4, 9), (4, 12), (4, 5)]


def test_tensors_of_any_type_and_shape_keep_their_values_in_one_buffer(monkeypatch):
    """A second CPU device is what the buffer is copied to."""
    tensors = {
        "mask": torch.tensor([[True, False, True]]),
        "ids": torch.arange(5).reshape(1, 5),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "half": torch.randn(3, 7).bfloat16()[:, ::2],
    }
    other = SimpleNamespace(type="other")
    whole, copies = torch.Tensor.to, []

    def to(tensor, device, **options):
        copies.append((tensor.dtype, options))
        return whole(tensor, "cpu", copy=True)

    monkeypatch.setattr(torch.Tensor, "to", to)
    found = to_device(tensors, other)
    assert copies == [(torch.uint8, {"non_blocking": True})]
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)
    assert to_device(tensors, torch.device("cpu"))["ids"] is tensors["ids"]


def test_host_copies_keep_their_shapes():
    assert to_host([]) == []
    here = [torch.randn(2, 3)]
    assert to_host(iter(here))[0] is here[0]
