"""The loss over a teacher's candidates is the reverse KL with a bin for the rest: TRL's, and that over all tokens where they are all there."""

import pytest
import torch

from rl_core.algorithms.losses import top_k_distillation_loss

VOCABULARY = 24
MASK = torch.tensor([[True, True, False, True], [False, True, True, False]])


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(0)
    return [2 * torch.randn(2, 4, VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(2)]


def ours(student, teacher, top_k, **options):
    teacher_log_probs, candidates = teacher.log_softmax(-1).topk(top_k)
    log_probs = student.log_softmax(-1).gather(-1, candidates).float()
    return top_k_distillation_loss(log_probs, teacher_log_probs.float(), MASK, **options)


def trl(student, teacher, top_k):
    from trl.experimental.sdpo.loss_utils import add_tail_bucket, compute_divergence

    teacher_log_probs, candidates = teacher.log_softmax(-1).topk(top_k)
    log_probs = student.log_softmax(-1).gather(-1, candidates)
    return compute_divergence(add_tail_bucket(log_probs), add_tail_bucket(teacher_log_probs), alpha=1.0)


@pytest.mark.parametrize("top_k", [1, 5, 12])
def test_value_and_gradient_are_those_of_trl(logits, top_k, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    student, teacher = logits[0].requires_grad_(), logits[1]
    expected = trl(student, teacher, top_k)[MASK].mean()
    expected.backward()
    wanted, student.grad = student.grad, None
    result = ours(student, teacher, top_k)
    result.loss.backward()
    torch.testing.assert_close(result.loss.double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(student.grad, wanted, atol=1e-6, rtol=0)
    assert float(result.metrics["distill/top_k_kl"]) == pytest.approx(expected.item(), rel=1e-5)
    assert not student.grad[~MASK].any()


def test_over_all_tokens_it_is_the_reverse_kl(logits):
    student, teacher = (values.log_softmax(-1) for values in logits)
    whole = (student.exp() * (student - teacher)).sum(-1)[MASK].mean()
    found = ours(*logits, VOCABULARY).loss.double()
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=0)


def test_without_the_bin_probability_would_leave_the_candidates(logits):
    """A student that gives the candidates half of its probability in the teacher's proportions is punished by the bin alone."""
    teacher_log_probs, _ = logits[1].log_softmax(-1).topk(3)
    log_probs = (teacher_log_probs.float() - 0.7).requires_grad_()
    loss = top_k_distillation_loss(log_probs, teacher_log_probs.float(), MASK).loss
    assert (log_probs.exp() * (log_probs - teacher_log_probs)).sum() < 0 < loss
    loss.backward()
    assert (log_probs.grad[MASK].sum(-1) < 0).all(), "a step downhill raises the candidates"


def test_a_teacher_that_is_certain_leaves_the_gradient_finite():
    teacher = torch.tensor([[[0.0, -40.0]]])
    log_probs = torch.tensor([[[-1e-8, -25.0]]], requires_grad=True)
    result = top_k_distillation_loss(log_probs, teacher, torch.tensor([[True]]))
    result.loss.backward()
    assert torch.isfinite(result.loss) and torch.isfinite(log_probs.grad).all()
