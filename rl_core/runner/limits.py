"""Limits that a model sets for a job: the length of sequences, and the ids of tokens."""

from collections.abc import Mapping
from typing import Any

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec
from rl_core.plan.model_facts import LENGTH_NAMES


def sequence_limit(spec: RLJobSpec, model_config: Mapping[str, Any]) -> int:
    """Return the greatest number of tokens that a prompt and its completion may have together.

    It is rollout.maxSequenceLength, or the model's limit if that is null. Raises ConfigError if neither is known, if the job's limit
    exceeds the model's, or if the result exceeds actor.microBatchTokens.
    """
    limit = spec.rollout.max_sequence_length
    name = next((name for name in LENGTH_NAMES if model_config.get(name)), LENGTH_NAMES[0])
    model_limit = int(model_config.get(name) or 0)
    if limit is None and not model_limit:
        raise ConfigError(f"rollout.maxSequenceLength must be set for a model without {name}, got null; set it")
    if limit is not None and model_limit and limit > model_limit:
        raise ConfigError(
            f"rollout.maxSequenceLength must not exceed the model's {name} {model_limit}, got {limit}; lower it"
        )
    length = limit or model_limit
    if length > spec.actor.micro_batch_tokens:
        raise ConfigError(
            f"actor.microBatchTokens must hold the longest sequence of {length} tokens, got {spec.actor.micro_batch_tokens}; "
            "raise it or set rollout.maxSequenceLength"
        )
    return length


def check_token_ids(spec: RLJobSpec, model_config: Mapping[str, Any]) -> None:
    """Raise ConfigError if rollout.sampling.logitBias has ids outside the model's vocabulary, which no engine accepts.

    A model whose config.json has no vocab_size is not checked.
    """
    vocabulary = int(model_config.get("vocab_size") or 0)
    invalid = [token for token in spec.rollout.sampling.logit_bias if int(token) >= vocabulary]
    if vocabulary and invalid:
        raise ConfigError(
            f"rollout.sampling.logitBias must have token ids below the model's vocab_size {vocabulary}, got {', '.join(invalid[:10])}; "
            "use ids of the model's tokenizer"
        )
