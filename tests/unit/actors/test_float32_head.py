"""Logits in float32 (`model.float32Head`): the product of hidden states and output weight is not rounded to bfloat16."""

import pytest
import torch

from rl_core.groups.model import token_scores
from rl_core.rollouts.hf.generic import compute_head_in_float32
from tests import actor_samples
from tests.unit.actors.actor_steps import gradients

IDS = [3, 17, 5, 22, 9, 11, 2, 14]


@pytest.fixture
def bfloat16(tmp_path):
    """The model as transformers computes it in bfloat16, its folder, and exact log-probabilities of IDS given its hidden states."""
    from transformers import AutoModelForCausalLM

    folder = actor_samples.make_model(tmp_path / "model", tied=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        hidden = model.model(torch.tensor([IDS])).last_hidden_state
        logits = hidden.double() @ model.lm_head.weight.double().T
    exact = logits[0].log_softmax(-1)[:-1].gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0]
    return model, folder, exact


def test_the_trainer_scores_tokens_by_float32_logits(make_actor, bfloat16):
    _, folder, exact = bfloat16
    found = {}
    for float32 in (True, False):
        actor = make_actor(model__path=str(folder), model__dtype="bfloat16", model__float32Head=float32)
        found[float32] = (torch.tensor(actor.score(IDS, 1), dtype=torch.float64) - exact).abs().max().item()
    assert found[True] < 1e-6 < 1e-4 < found[False]


def test_the_gradient_is_that_of_bfloat16_logits_up_to_their_rounding(make_actor, bfloat16, records):
    _, folder, _ = bfloat16
    half = {"model__path": str(folder), "model__dtype": "bfloat16"}
    _, plain = gradients(make_actor(**half), records)
    _, float32 = gradients(make_actor(**half, model__float32Head=True), records)
    for name, gradient in plain.items():
        assert not torch.equal(float32[name], gradient)
        assert (float32[name] - gradient).norm() < 0.05 * gradient.norm(), name


def test_a_group_that_scores_does_the_same(bfloat16):
    model, _, exact = bfloat16
    compute_head_in_float32(model)
    ((_, targets, scores),) = token_scores(model, [torch.tensor(IDS).numpy()], 1.0, batch_tokens=64)
    assert (scores.gather(1, targets[:, None])[:, 0].double() - exact).abs().max() < 1e-6
