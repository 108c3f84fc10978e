"""A group that tells the log-probabilities of the student's tokens, for on-policy distillation.

groups:
- name: teacher
  worker: rl_core.groups.teacher:Teacher
  callers: [actor]
  config: {modelPath: /models/teacher}
algorithm: {name: distill, distillation: {teacher: teacher}}
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rl_core.api.errors import ConfigError, DataError
from rl_core.data.tokenizer import Tokenizer
from rl_core.envs.base import parse_config
from rl_core.groups.model import ModelConfig, after_nothing, entries, load, token_scores
from rl_core.plan.groups import ACTOR
from rl_core.workers.worker import Worker


class TeacherConfig(ModelConfig):
    """Options of `Teacher`."""

    batch_tokens: int = Field(4096, ge=1)
    """Largest number of tokens of a forward pass, padding included; the logits of all of them are in memory at once."""


TopScores = tuple[np.ndarray, np.ndarray, np.ndarray]
"""What a teacher says of a row of T tokens: the log-probabilities of the tokens [T] float32, the K likeliest tokens in the place of each [T, K]
int32, the likeliest first, and their log-probabilities [T, K] float32. The first entry of each is 0: nothing precedes the first token."""


class Teacher(Worker):
    """Scores token sequences with a causal language model."""

    peer_methods: ClassVar[Mapping[str, frozenset[str]]] = {ACTOR: frozenset({"log_probs", "top_log_probs"})}

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Load the model of `config`.

        Raises ConfigError when it cannot be loaded, or when its tokenizer is not that of the job's model.
        """
        from transformers import AutoModelForCausalLM

        self._config = parse_config(TeacherConfig, config, where="config")
        student = Tokenizer.from_files(self.files) if self.files else None
        if student is not None:
            check_tokenizers(student, Tokenizer.from_folder(self._config.model_path))
        self._model = load(AutoModelForCausalLM, self._config, device=self.device)
        vocabulary: int = self._model.get_output_embeddings().weight.shape[0]
        self._shared = vocabulary if student is None else _tokens(student)
        """Number of ids that the student has too."""

    def log_probs(self, rows: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        """Return log p(row[t] | row[:t]) of each row of token ids [T], float32 [T]; the first entry of a row is 0.

        The logits are divided by `temperature`. Raises DataError for an empty row and for ids outside the vocabulary.
        """
        results: list[np.ndarray] = [np.zeros(0, np.float32)] * len(rows)
        for index, targets, scores in self._scored(rows, temperature):
            results[index] = after_nothing(entries(targets, scores))
        return results

    def top_log_probs(self, rows: Sequence[np.ndarray], temperature: float, top_k: int) -> list[TopScores]:
        """Return log p(row[t] | row[:t]) of each row, and those of the `top_k` likeliest tokens in the place of row[t].

        Arguments and errors as in `log_probs`; DataError also when student and teacher share fewer than `top_k` tokens.
        """
        if not 1 <= top_k <= self._shared:
            raise DataError(
                f"algorithm.distillation.topK must be in [1, {self._shared}], the tokens of student and teacher, got {top_k}; lower it"
            )
        empty = np.zeros(0, np.float32)
        results: list[TopScores] = [(empty, empty, empty)] * len(rows)
        for index, targets, scores in self._scored(rows, temperature):
            top = scores[:, : self._shared].topk(top_k, dim=-1)
            parts = (entries(targets, scores), top.indices.to(torch.int32), top.values)
            results[index] = (after_nothing(parts[0]), after_nothing(parts[1]), after_nothing(parts[2]))
        return results

    def _scored(self, rows: Sequence[np.ndarray], temperature: float) -> Iterator[tuple[int, Tensor, Tensor]]:
        yield from token_scores(self._model, rows, temperature, batch_tokens=self._config.batch_tokens)
        self.record_progress("teacher_rows", len(rows))


def _tokens(tokenizer: Tokenizer) -> int:
    """Return the number of ids of `tokenizer`, unused ones below the largest included."""
    return max(tokenizer.backend.get_vocab(with_added_tokens=True).values()) + 1


def check_tokenizers(student: Tokenizer, teacher: Tokenizer) -> None:
    """Raise ConfigError unless every token of the student has the same id for the teacher, which is given ids and no text."""
    teacher_ids = teacher.backend.get_vocab(with_added_tokens=True)
    vocabulary = student.backend.get_vocab(with_added_tokens=True)
    differing = sorted((index, token) for token, index in vocabulary.items() if teacher_ids.get(token) != index)
    if differing:
        index, token = differing[0]
        raise ConfigError(
            f"config.modelPath: a teacher must have the tokens of model.path, got {len(differing)} of {len(vocabulary)} that differ, "
            f"the first {token!r}, which is {index} for the student and {teacher_ids.get(token)} for the teacher; take a teacher of the same family"
        )
