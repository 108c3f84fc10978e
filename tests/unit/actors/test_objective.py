"""The loss as the job asks for it: clips where none is written, and options that the chosen loss does not take."""

import pytest
import torch

from rl_core.actors.backend import Scores
from rl_core.actors.objective import PolicyObjective
from rl_core.actors.rows import Columns
from rl_core.algorithms.aggregation import LossNormalizers
from rl_core.algorithms.losses import LossInputs, compute_policy_loss
from rl_core.api.algorithm import AlgorithmSpec
from rl_core.api.errors import ConfigError

OLD = torch.tensor([[-1.0, -2.0], [-0.5, -1.5]])
NEW = OLD + torch.tensor([[0.3, -0.4], [0.01, 1.2]])
GAINS = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
MASK = torch.ones(2, 2, dtype=torch.bool)


def metrics_of(loss):
    objective = PolicyObjective(AlgorithmSpec.model_validate({"loss": loss}), max_tokens=4)
    columns = Columns(input_ids=MASK.long(), loss_mask=MASK, old_log_probs=OLD, advantages=GAINS)
    return told(objective(Scores(NEW, torch.ones_like(NEW)), columns, LossNormalizers(tokens=4.0, sequences=2.0)))


def told(result):
    return {name: float(stat) for name, stat in result.metrics.items() if name not in ("loss", "entropy")}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Losses of the user that differ in the options they take."""
    (tmp_path / "own_losses.py").write_text(
        "from rl_core.algorithms import LossResult, compute_policy_loss\n"
        "def bounded(inputs, *, clip_high, dual_clip):\n"
        "    return compute_policy_loss('ppo_clip', inputs, clip_high=clip_high, dual_clip=dual_clip)\n"
        "def plain(inputs):\n    return compute_policy_loss('reinforce', inputs)\n"
        "def mean(inputs):\n    return LossResult(inputs.log_probs[inputs.mask].mean())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "gspo", "reinforce"])
def test_a_job_without_a_clip_trains_with_the_clip_of_its_loss(name):
    inputs = LossInputs(log_probs=NEW, old_log_probs=OLD, advantages=GAINS, mask=MASK)
    assert metrics_of({"name": name}) == told(compute_policy_loss(name, inputs))


def test_one_side_alone_may_be_written():
    inputs = LossInputs(log_probs=NEW, old_log_probs=OLD, advantages=GAINS, mask=MASK)
    expected = told(compute_policy_loss("gspo", inputs, clip_low=3e-4, clip_high=0.5))
    assert metrics_of({"name": "gspo", "clipHigh": 0.5}) == expected


def test_a_loss_of_the_user_gets_the_clips_and_the_dual_clip_it_takes(own):
    built_in = metrics_of({"dualClip": 2.0})
    assert metrics_of({"name": "own_losses:bounded", "dualClip": 2.0}) == built_in
    assert built_in["dual_clip_fraction"] > 0


def test_a_dual_clip_that_no_parameter_takes_is_refused(own):
    with pytest.raises(ConfigError, match=r"dualClip needs a loss with a parameter dual_clip, got own_losses:plain"):
        metrics_of({"name": "own_losses:plain", "dualClip": 2.0})


def test_a_micro_batch_without_a_trainable_token_has_no_gradient_whatever_the_users_loss_makes_of_none(own):
    """The mean of no token is NaN, and would make the whole step's gradient so."""
    objective = PolicyObjective(AlgorithmSpec.model_validate({"loss": {"name": "own_losses:mean"}}), max_tokens=4)
    for mask, gradient in ((MASK, 0.25), (torch.zeros_like(MASK), 0.0)):
        log_probs = NEW.clone().requires_grad_()
        columns = Columns(input_ids=mask.long(), loss_mask=mask, old_log_probs=OLD, advantages=GAINS)
        scores = Scores(log_probs, torch.ones_like(NEW))
        result = objective(scores, columns, LossNormalizers(tokens=4.0, sequences=2.0))
        result.loss.backward()
        assert torch.equal(log_probs.grad, torch.full((2, 2), gradient))
