"""The reference policy on every backend: its numbers are those of the initial model, and little is moved for them."""

import pytest
import torch

from rl_core.api.job import RLJobSpec
from rl_core.plan.model_facts import ModelFacts
from rl_core.plan.trainer_memory import trainer_host
from tests.actor_samples import make_model, make_record, make_spec
from tests.integration.fsdp_rank import Rank

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), family="qwen3", tied=False)


@pytest.fixture(
    params=[(backend, dtype) for backend in ("fsdp1", "fsdp2", "megatron") for dtype in DTYPES], ids="-".join
)
def rank(request, model):
    backend, dtype = request.param
    changes = {
        "model__dtype": dtype,
        "algorithm__loss": {"klCoefficient": 0.1},
        "actor__optimizer": {"learningRate": 1e-2},
    }
    return Rank(make_spec(model, actor__backend=backend, **changes), [[0, 1, 2, 3]], 0, 1)


def test_the_reference_scores_as_the_initial_model_and_leaves_the_trained_bits(rank):
    actor = rank.actor
    actor.load_batch([make_record(0)])
    batch = actor.engine.prepared.collated
    initial = actor.compute_log_probs(batch)
    for step in (1, 2):
        rank.train(step)
    trained, stored = actor.compute_log_probs(batch), [tensor.clone() for tensor in actor.manager._parameter_tensors()]
    assert torch.equal(actor.compute_ref_log_probs(batch), initial)
    assert not torch.equal(trained, initial) and torch.equal(actor.compute_log_probs(batch), trained)
    for tensor, before in zip(actor.manager._parameter_tensors(), stored, strict=True):
        assert torch.equal(tensor, before)
    rank.train(3)  # the gradients, which made room for the trained weights, are allocated again
    assert rank.seen["metrics"][-1]["actor/update_success"] == 1


def test_a_pass_moves_each_weight_to_the_device_once_and_none_to_the_host(rank):
    """Every write to a tensor raises its version."""
    kept = rank.actor.manager._reference
    live, held = ([tensor._version for tensor in tensors] for tensors in (kept._live, kept._held))
    with rank.actor.manager.reference():
        assert [tensor._version for tensor in kept._live] == [version + 1 for version in live]
    assert [tensor._version for tensor in kept._live] == [version + 2 for version in live]
    assert [tensor._version for tensor in kept._held] == held


def test_the_host_holds_the_reference_in_the_type_that_the_model_computes_in(rank):
    kept, cfg = rank.actor.manager._reference, rank.actor.cfg
    assert {held.dtype for held in kept._held} == {DTYPES[cfg.model.dtype]}
    facts = ModelFacts.from_config(cfg.model.path)
    without = RLJobSpec.model_validate(
        make_spec(cfg.model.path, actor__backend=cfg.actor.backend, model__dtype=cfg.model.dtype)
    )
    counted = trainer_host(cfg, facts) - trainer_host(without, facts)
    assert sum(held.nbytes for held in kept._held) == pytest.approx(counted, rel=0.15)


def test_the_trained_weights_are_back_after_a_pass_that_fails(rank):
    rank.train(1)
    stored = [tensor.clone() for tensor in rank.actor.manager._parameter_tensors()]
    with pytest.raises(ZeroDivisionError), rank.actor.manager.reference():
        raise ZeroDivisionError
    for tensor, before in zip(rank.actor.manager._parameter_tensors(), stored, strict=True):
        assert torch.equal(tensor, before)


def test_gradients_make_room_for_the_trained_weights_and_are_there_afterwards_if_they_were_before(rank):
    manager = rank.actor.manager
    manager.offload_param_and_grad(True)
    manager.load_param_and_grad(0, True)
    assert manager.has_gradients()
    with manager.reference():
        assert not manager.has_gradients()
    assert manager.has_gradients() and not manager.has_pending_gradients()
    manager.offload_param_and_grad(True)
    manager.load_param_and_grad(0, False)
    with manager.reference():
        pass
    assert not manager.has_gradients()
