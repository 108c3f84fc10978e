"""A group that tells the log-probabilities of the student's tokens, for on-policy distillation.

groups:
- name: teacher
  worker: rl_core.groups.teacher:Teacher
  callers: [actor]
  config: {modelPath: /models/teacher}
algorithm: {name: distill, distillation: {teacher: teacher}}
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from rl_core.api.errors import ConfigError, DataError
from rl_core.data.tokenizer import Tokenizer
from rl_core.envs.base import parse_config
from rl_core.groups.model import ModelConfig, batches, load, padded
from rl_core.plan.groups import ACTOR
from rl_core.workers.worker import Worker


class TeacherConfig(ModelConfig):
    """Options of `Teacher`."""

    batch_tokens: int = Field(4096, ge=1)
    """Largest number of tokens of a forward pass, padding included; the logits of all of them are in memory at once."""


class Teacher(Worker):
    """Scores token sequences with a causal language model."""

    peer_methods: ClassVar[Mapping[str, frozenset[str]]] = {ACTOR: frozenset({"log_probs"})}

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Load the model of `config`.

        Raises ConfigError when it cannot be loaded, or when its tokenizer is not that of the job's model.
        """
        from transformers import AutoModelForCausalLM

        self._config = parse_config(TeacherConfig, config, where="config")
        if self.files:
            check_tokenizers(Tokenizer.from_files(self.files), Tokenizer.from_folder(self._config.model_path))
        self._model = load(AutoModelForCausalLM, self._config, device=self.device)
        self._vocabulary = self._model.get_output_embeddings().weight.shape[0]

    def log_probs(self, rows: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        """Return log p(row[t] | row[:t]) of each row of token ids [T], float32 [T]; the first entry of a row is 0.

        The logits are divided by `temperature`. Raises DataError for an empty row and for ids outside the vocabulary.
        """
        for index, row in enumerate(rows):
            if not len(row) or row.min() < 0 or row.max() >= self._vocabulary:
                raise DataError(
                    f"row {index} must hold token ids in [0, {self._vocabulary}), got {len(row)} ids up to {max(row, default=None)}"
                )
        found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(rows)
        for batch in batches([len(row) for row in rows], tokens=self._config.batch_tokens):
            ids, mask = padded([rows[index].tolist() for index in batch], pad=0, device=self.device)
            with torch.inference_mode():
                logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits
                for place, index in enumerate(batch):
                    scores = (logits[place, : len(rows[index]) - 1].float() / temperature).log_softmax(dim=-1)
                    chosen = scores.gather(1, ids[place, 1 : len(rows[index]), None]).squeeze(1)
                    found[index] = np.concatenate([np.zeros(1, np.float32), chosen.cpu().numpy()])
        self.record_progress("teacher_rows", len(rows))
        return found


def check_tokenizers(student: Tokenizer, teacher: Tokenizer) -> None:
    """Raise ConfigError unless every token of the student has the same id for the teacher, which is given ids and no text."""
    known = teacher.backend.get_vocab(with_added_tokens=True)
    vocabulary = student.backend.get_vocab(with_added_tokens=True)
    differing = sorted((index, token) for token, index in vocabulary.items() if known.get(token) != index)
    if differing:
        index, token = differing[0]
        raise ConfigError(
            f"config.modelPath: a teacher must have the tokens of model.path, got {len(differing)} of {len(vocabulary)} that differ, "
            f"the first {token!r}, which is {index} for the student and {known.get(token)} for the teacher; take a teacher of the same family"
        )
