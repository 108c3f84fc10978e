"""What a job may ask of its model: sequences within its length, by whatever name config.json has for it, and ids of its vocabulary."""

import pytest

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec
from rl_core.runner.limits import check_token_ids, sequence_limit


def spec(length, *, bias=None, **actor):
    rollout = {"maxSequenceLength": length, "sampling": {"maxNewTokens": 8, "logitBias": bias or {}}}
    algorithm = {"allowTruncatedSampling": bool(bias), "recomputeLogProbs": True}
    return RLJobSpec.model_validate(
        {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": rollout, "actor": actor, "algorithm": algorithm}
    )


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions", "n_ctx"])
def test_the_job_may_ask_for_less_than_the_model_has_and_for_no_more(name):
    assert sequence_limit(spec(None), {name: 64}) == 64 and sequence_limit(spec(32), {name: 64}) == 32
    with pytest.raises(ConfigError, match=f"must not exceed the model's {name} 64, got 65"):
        sequence_limit(spec(65), {name: 64})


def test_a_model_that_tells_no_length_needs_one_from_the_job():
    assert sequence_limit(spec(32), {}) == 32
    with pytest.raises(ConfigError, match="must be set for a model without max_position_embeddings"):
        sequence_limit(spec(None), {})


def test_a_micro_batch_holds_the_longest_sequence():
    with pytest.raises(ConfigError, match="microBatchTokens must hold the longest sequence of 64 tokens, got 63"):
        sequence_limit(spec(None, microBatchTokens=63), {"n_positions": 64})


def test_a_logit_bias_of_ids_that_the_model_does_not_have_is_refused():
    biased = spec(32, bias={"0": 1.0, "31": 1.0, "32": -1.0, "99": 2.0})
    check_token_ids(biased, {"vocab_size": 100})
    check_token_ids(biased, {})
    with pytest.raises(
        ConfigError, match="token ids below the model's vocab_size 32, got 32, 99; use ids of the model's tokenizer"
    ):
        check_token_ids(biased, {"vocab_size": 32})
