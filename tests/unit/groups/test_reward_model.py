"""The reward model gives what transformers gives for each conversation alone."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rl_core.api.errors import ConfigError, DataError
from rl_core.groups.reward_model import RewardModel
from tests.small_models import save_classifier

TEXTS = ["a", "abc def", "the quick brown fox", "z" * 30, "no vowels", "aa"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_classifier(tmp_path_factory.mktemp("reward"))


def conversation(text):
    return [{"role": "user", "content": "say "}, {"role": "assistant", "content": text}]


def alone(folder, text):
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt")).logits.item()


@pytest.mark.parametrize("batch_tokens", [1, 40, 4096], ids=["one by one", "in some batches", "in one batch"])
def test_scores_equal_those_of_transformers_for_each_text_alone(folder, batch_tokens):
    model = RewardModel({"modelPath": str(folder), "batchTokens": batch_tokens})
    scores = model.score([{"messages": conversation(text), "columns": {}} for text in TEXTS])
    assert scores == pytest.approx([alone(folder, "say " + text) for text in TEXTS], abs=1e-5)
    assert len({round(score, 4) for score in scores}) == len(TEXTS)


def test_a_chat_template_of_the_job_is_applied(folder):
    template = "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}"
    model = RewardModel({"modelPath": str(folder), "chatTemplate": template})
    assert model.score([conversation("hey")]) == pytest.approx([alone(folder, "u say  a hey ")], abs=1e-5)


def test_a_conversation_that_is_too_long_has_an_error_and_the_others_their_scores(folder):
    model = RewardModel({"modelPath": str(folder), "maxLength": 8})
    short, long = model.score([conversation("abc"), conversation("abcdefgh")])
    assert short == pytest.approx(alone(folder, "say abc"), abs=1e-5)
    assert "1 to 8 tokens" in long["error"] and "got 11" in long["error"]
    with pytest.raises(DataError, match="role, content"):
        model.score([["not a message"]])


def test_what_is_no_reward_model_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="one label, got 3"):
        RewardModel({"modelPath": str(save_classifier(tmp_path / "three", num_labels=3))})
    with pytest.raises(ConfigError, match=r"config.modelPath must be a folder with config.json"):
        RewardModel({"modelPath": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"config.modelpath: unknown field"):
        RewardModel({"modelpath": str(folder)})
