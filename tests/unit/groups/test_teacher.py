"""The teacher gives what transformers gives, is compared with the student at start, and its gradient is that of the reverse KL."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_core.algorithms.advantages import distill_advantages
from rl_core.algorithms.losses import LossInputs, compute_policy_loss
from rl_core.api.errors import ConfigError, DataError
from rl_core.data.tokenizer import Tokenizer, read_files
from rl_core.groups.teacher import Teacher, check_tokenizers
from rl_core.runner.teacher_signal import TEACHER_SHARE, RewardSignal, TeacherSignal
from tests.small_models import NAMES, save_policy

ROWS = [np.array([3, 9, 4, 20, 7]), np.array([5]), np.arange(2, 32), np.array([8, 8, 1])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("teacher"), seed=3)


@pytest.mark.parametrize("batch_tokens", [1, 64, 4096])
def test_log_probabilities_equal_those_of_transformers_for_each_row_alone(folder, batch_tokens):
    teacher, model = (
        Teacher({"modelPath": str(folder), "batchTokens": batch_tokens}),
        AutoModelForCausalLM.from_pretrained(folder),
    )
    for row, found in zip(ROWS, teacher.log_probs(ROWS, 0.7), strict=True):
        ids = torch.from_numpy(row)[None]
        with torch.no_grad():
            scores = (model(ids).logits[0, :-1] / 0.7).log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        assert found.dtype == np.float32 and found[0] == 0.0
        np.testing.assert_allclose(found[1:], scores.numpy(), atol=1e-5)


def test_the_likeliest_tokens_are_those_of_transformers(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    teacher = Teacher({"modelPath": str(folder), "batchTokens": 64})
    for row, found, alone in zip(ROWS, teacher.top_log_probs(ROWS, 0.7, 5), teacher.log_probs(ROWS, 0.7), strict=True):
        log_probs, candidates, of_candidates = found
        np.testing.assert_array_equal(log_probs, alone)
        assert candidates.shape == of_candidates.shape == (len(row), 5)
        assert not candidates[0].any() and not of_candidates[0].any()
        with torch.no_grad():
            top = (model(torch.from_numpy(row)[None]).logits[0, :-1] / 0.7).log_softmax(-1).topk(5)
        np.testing.assert_array_equal(candidates[1:], top.indices.numpy())
        np.testing.assert_allclose(of_candidates[1:], top.values.numpy(), atol=1e-5)
    with pytest.raises(DataError, match=r"topK must be in \[1, 43\].* got 44"):
        teacher.top_log_probs(ROWS, 0.7, 44)


def test_tokens_that_the_student_lacks_are_no_candidates(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Teacher, "files", read_files(folder), raising=False)
    more = save_policy(tmp_path / "more", names=[*NAMES, "#"])
    teacher = Teacher({"modelPath": str(more)})
    for _, candidates, of_candidates in teacher.top_log_probs(ROWS, 1.0, len(NAMES)):
        assert candidates.max() < len(NAMES)
        assert np.all(np.exp(of_candidates[1:]).sum(-1) < 1.0), "the rest is that of the token that the student lacks"


def test_ids_that_the_teacher_does_not_know_are_refused(folder):
    teacher = Teacher({"modelPath": str(folder)})
    for row in (np.array([len(NAMES)]), np.array([-1]), np.array([], dtype=np.int64)):
        with pytest.raises(DataError, match="row 1 must hold token ids in"):
            teacher.log_probs([ROWS[0], row])


def test_a_teacher_with_other_tokens_is_refused_and_one_with_more_is_not(folder, tmp_path, monkeypatch):
    student = Tokenizer.from_folder(folder)
    swapped = [*NAMES[:2], NAMES[3], NAMES[2], *NAMES[4:]]
    more = save_policy(tmp_path / "more", names=[*NAMES, "#"])
    check_tokenizers(student, Tokenizer.from_folder(more))
    with pytest.raises(ConfigError, match=r"1 of 44 that differ, the first '#', which is 43 .* None for the teacher"):
        check_tokenizers(Tokenizer.from_folder(more), student)
    with pytest.raises(ConfigError, match="2 of 43 that differ, the first 'a', which is 2 .* 3 for the teacher"):
        check_tokenizers(student, Tokenizer.from_folder(save_policy(tmp_path / "swapped", names=swapped)))
    monkeypatch.setattr(Teacher, "files", read_files(folder), raising=False)  # those of the student
    Teacher({"modelPath": str(more)})
    with pytest.raises(ConfigError, match="2 of 43 that differ"):
        Teacher({"modelPath": str(tmp_path / "swapped")})


def test_the_expected_gradient_is_that_of_trls_reverse_kl(monkeypatch):
    """Each token of the vocabulary is one row, weighted by its probability, so the sum over rows is the expectation."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    torch.manual_seed(0)
    vocabulary = 24
    student, teacher = (torch.randn(1, 1, vocabulary, dtype=torch.float64) for _ in range(2))
    student.requires_grad_(True)
    GKDTrainer.generalized_jsd_loss(student, teacher, beta=1.0, reduction="sum").backward()
    wanted, student.grad = student.grad, None
    log_probs = student.log_softmax(-1).view(vocabulary, 1)
    mask = torch.ones(vocabulary, 1, dtype=torch.bool)
    advantages = distill_advantages(
        teacher.log_softmax(-1).view(vocabulary, 1).float(),
        log_probs.float(),
        mask,
        torch.zeros(vocabulary),
        torch.arange(vocabulary),
    ).advantages
    weights = log_probs.detach().exp()
    for loss in ("reinforce", "ppo_clip"):
        inputs = LossInputs(
            log_probs=log_probs.float(),
            old_log_probs=log_probs.detach().float(),
            advantages=advantages * weights.float(),
            mask=mask,
            aggregation="seq-mean-token-sum",
        )
        (compute_policy_loss(loss, inputs).loss * vocabulary).backward(retain_graph=True)
        torch.testing.assert_close(student.grad, wanted, atol=1e-6, rtol=0)
        student.grad = None


def test_rewards_are_added_by_weight_and_the_share_of_the_teacher_is_told():
    teacher, student = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]]), torch.tensor([[-2.0, -2.0], [-1.0, -4.0]])
    mask, rewards, groups = torch.tensor([[True, True], [True, False]]), torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    pure = distill_advantages(teacher, student, mask, rewards, groups)
    assert pure.advantages.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert float(pure.metrics["distill/teacher_share"]) == 1.0
    assert float(pure.metrics["distill/reverse_kl"]) == pytest.approx(-1 / 3)
    mixed = distill_advantages(teacher, student, mask, rewards, groups, reward_weight=2.0)
    grpo = 0.5 / (0.5**0.5 + 1e-6)
    torch.testing.assert_close(mixed.advantages, torch.tensor([[1 + 2 * grpo, 2 * grpo], [-2 * grpo, 0.0]]))
    assert float(mixed.metrics["distill/teacher_share"]) == pytest.approx(1 / (1 + 6 * grpo))
    silent = distill_advantages(student + 1e-6, student, mask, rewards, groups, reward_weight=1.0)
    assert float(silent.metrics["distill/teacher_share"]) == 0.0
    torch.testing.assert_close(silent.advantages, torch.tensor([[grpo, grpo], [-grpo, 0.0]]))


def test_three_steps_without_a_signal_of_the_teacher_end_the_run():
    signal = TeacherSignal()
    for share in (0.0, 0.0, 0.5, 0.0, 0.0):
        signal.observe({TEACHER_SHARE: share})
    signal = TeacherSignal()
    for _ in range(4):
        signal.observe({"loss": 1.0})
    signal.observe({TEACHER_SHARE: 0.0})
    signal.observe({TEACHER_SHARE: 0.0})
    with pytest.raises(ConfigError, match="0 for 3 steps"):
        signal.observe({TEACHER_SHARE: 0.0})


def test_three_steps_without_a_reward_end_the_run():
    signal, silent = RewardSignal(), {"reward/missing": 4.0}
    taught = silent | {TEACHER_SHARE: 1.0}
    for metrics in (
        silent,
        silent,
        silent | {"reward/mean": 0.0},
        {},
        silent,
        silent,
        taught,
        taught,
        taught,
        silent,
        silent,
    ):
        signal.observe(metrics)
    with pytest.raises(ConfigError, match="got None for all samples of 3 steps"):
        signal.observe(silent)
