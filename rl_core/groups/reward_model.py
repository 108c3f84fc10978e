"""A group that scores conversations with a Hugging Face model for sequence classification.

groups:
- name: reward-model
  worker: rl_core.groups.reward_model:RewardModel
  callers: [env]
  config: {modelPath: /models/reward}
env: {type: reward_model, options: {group: reward-model}}
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field

from rl_core.api.errors import ConfigError, DataError
from rl_core.envs.base import parse_config
from rl_core.groups.model import ModelConfig, batches, conversation_ids, load, load_tokenizer, padded
from rl_core.plan.groups import ACTOR, ENV, ROLLOUT
from rl_core.workers.worker import Worker


class RewardModelConfig(ModelConfig):
    """Options of `RewardModel`."""

    batch_tokens: int = Field(16384, ge=1)
    """Largest number of tokens of a forward pass, padding included; a longer row has one of its own."""
    chat_template: str | None = None
    """Jinja chat template; null = that of the tokenizer. Where neither has one, the contents of the messages are joined."""
    max_length: int | None = Field(None, ge=1)
    """Tokens of a conversation; a longer one is a failure of its sample. null = the positions of the model."""


class RewardModel(Worker):
    """Scores conversations: the logit of a classifier with one label."""

    peer_methods: ClassVar[Mapping[str, frozenset[str]]] = dict.fromkeys((ENV, ROLLOUT, ACTOR), frozenset({"score"}))

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Load the model of `config`. Raises ConfigError when it cannot be loaded or has several labels."""
        from transformers import AutoModelForSequenceClassification

        self._config = parse_config(RewardModelConfig, config, where="config")
        self._model = load(AutoModelForSequenceClassification, self._config, device=self.device)
        self._tokenizer = load_tokenizer(self._config)
        settings = self._model.config
        if settings.num_labels != 1:
            raise ConfigError(
                f"config.modelPath: a reward model must have one label, got {settings.num_labels} in {self._config.model_path}; "
                "train one with num_labels=1"
            )
        pad = self._tokenizer.pad_token_id if settings.pad_token_id is None else settings.pad_token_id
        if pad is None:
            raise ConfigError(
                f"config.modelPath: {self._config.model_path} must name a padding token, got none; set pad_token_id in config.json"
            )
        settings.pad_token_id = self._pad = pad
        self._limit = self._config.max_length or getattr(settings, "max_position_embeddings", None) or 2**31

    def score(self, rows: Sequence[Mapping[str, Any] | Sequence[Mapping[str, Any]]]) -> list[float | dict[str, str]]:
        """Return the score of each row: a conversation of {role, content}, or a mapping with one in `messages`.

        A row that is too long has `{"error": why}` instead.
        """
        ids = [self._ids(row) for row in rows]
        scores: list[float | dict[str, str]] = [
            {"error": f"a conversation must have 1 to {self._limit} tokens for the reward model, got {len(row)}"}
            for row in ids
        ]
        usable = [index for index, row in enumerate(ids) if 1 <= len(row) <= self._limit]
        for batch in batches([len(ids[index]) for index in usable], tokens=self._config.batch_tokens):
            selected = [usable[index] for index in batch]
            tokens, mask = padded([ids[index] for index in selected], pad=self._pad, device=self.device)
            with torch.inference_mode():
                logits = self._model(input_ids=tokens, attention_mask=mask).logits[:, 0].float().tolist()
            for index, logit in zip(selected, logits, strict=True):
                scores[index] = logit
        self.record_progress("scores", len(rows))
        return scores

    def _ids(self, row: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[int]:
        messages = row["messages"] if isinstance(row, Mapping) else row
        if not all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in messages):
            raise DataError(
                f"a conversation must be a list of {{role, content}}, got {messages!r:.200}; correct the call"
            )
        return conversation_ids(self._tokenizer, messages, template=self._config.chat_template)
