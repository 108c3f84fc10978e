"""How long a sequence may get: the job's bound, within what the model's config.json says by whatever name."""

import pytest

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec
from rl_core.runner.limits import sequence_limit


def spec(length, **actor):
    rollout = {"maxSequenceLength": length, "sampling": {"maxNewTokens": 8}}
    return RLJobSpec.model_validate(
        {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": rollout, "actor": actor}
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
