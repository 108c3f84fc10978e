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
from rl_core.groups.model import ModelConfig, batches, load, padded
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
        self._vocabulary: int = self._model.get_output_embeddings().weight.shape[0]
        self._shared = self._vocabulary if student is None else _tokens(student)
        """Number of ids that the student has too."""

    def log_probs(self, rows: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        """Return log p(row[t] | row[:t]) of each row of token ids [T], float32 [T]; the first entry of a row is 0.

        The logits are divided by `temperature`. Raises DataError for an empty row and for ids outside the vocabulary.
        """
        found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(rows)
        for index, targets, scores in self._scored(rows, temperature):
            found[index] = _after_nothing(_of(targets, scores))
        return found

    def top_log_probs(self, rows: Sequence[np.ndarray], temperature: float, top_k: int) -> list[TopScores]:
        """Return log p(row[t] | row[:t]) of each row, and those of the `top_k` likeliest tokens in the place of row[t].

        Arguments and errors as in `log_probs`; DataError also when student and teacher share fewer than `top_k` tokens.
        """
        if not 1 <= top_k <= self._shared:
            raise DataError(
                f"algorithm.distillation.topK must be in [1, {self._shared}], the tokens of student and teacher, got {top_k}; lower it"
            )
        empty = np.zeros(0, np.float32)
        found: list[TopScores] = [(empty, empty, empty)] * len(rows)
        for index, targets, scores in self._scored(rows, temperature):
            top = scores[:, : self._shared].topk(top_k, dim=-1)
            parts = (_of(targets, scores), top.indices.to(torch.int32), top.values)
            found[index] = (_after_nothing(parts[0]), _after_nothing(parts[1]), _after_nothing(parts[2]))
        return found

    def _scored(self, rows: Sequence[np.ndarray], temperature: float) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (index of a row, its tokens after the first [T - 1], log-probabilities of all tokens in their places [T - 1, V])."""
        for index, row in enumerate(rows):
            if not len(row) or row.min() < 0 or row.max() >= self._vocabulary:
                raise DataError(
                    f"row {index} must hold token ids in [0, {self._vocabulary}), got {len(row)} ids up to {max(row, default=None)}"
                )
        for batch in batches([len(row) for row in rows], tokens=self._config.batch_tokens):
            ids, mask = padded([rows[index].tolist() for index in batch], pad=0, device=self.device)
            with torch.inference_mode():
                logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            for place, index in enumerate(batch):
                scores = (logits[place, : len(rows[index]) - 1].float() / temperature).log_softmax(dim=-1)
                yield index, ids[place, 1 : len(rows[index])], scores
        self.record_progress("teacher_rows", len(rows))


def _tokens(tokenizer: Tokenizer) -> int:
    """Return the number of ids of `tokenizer`, unused ones below the largest included."""
    return max(tokenizer.backend.get_vocab(with_added_tokens=True).values()) + 1


def _of(targets: Tensor, scores: Tensor) -> Tensor:
    """Return the entries of `scores` [T, V] at `targets` [T]."""
    return scores.gather(1, targets.unsqueeze(1)).squeeze(1)


def _after_nothing(values: Tensor) -> np.ndarray:
    """Return `values` [T - 1, ...] on the CPU after a first entry of 0, [T, ...]."""
    whole: np.ndarray = torch.cat([values.new_zeros(1, *values.shape[1:]), values]).cpu().numpy()
    return whole


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
