"""What the workers of this package have in common: their options, and the loading of a Hugging Face model for inference."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from rl_core.api.base import Spec
from rl_core.api.errors import ConfigError, DataError
from rl_core.envs.base import Log


class ModelConfig(Spec):
    """Options that every worker with a model has."""

    model_path: str = Field(min_length=1)
    """Folder of the model with its tokenizer; relative paths start at the job file."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights; null = bfloat16 on an accelerator and float32 on a CPU."""


def load(auto: Any, config: ModelConfig, *, device: str) -> Any:
    """Return the model of `config`, read with the transformers class `auto`, for inference on `device`.

    Raises ConfigError when the folder holds no such model.
    """
    folder = Path(config.model_path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"config.modelPath must be a folder with config.json, got {folder}; correct the path")
    dtype = config.dtype or ("float32" if device == "cpu" else "bfloat16")
    try:
        model = auto.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"config.modelPath: {folder} cannot be loaded: {error}; save the model again") from error
    return model.to(device).eval().requires_grad_(False)


def load_tokenizer(config: ModelConfig) -> Any:
    """Return the transformers tokenizer of `config`. Raises ConfigError when the folder holds none."""
    try:
        return AutoTokenizer.from_pretrained(config.model_path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"config.modelPath: {config.model_path} must hold a tokenizer, got {error}; save it with save_pretrained"
        ) from error


def conversation_ids(tokenizer: Any, messages: Log, *, template: str | None, generate: bool = False) -> list[int]:
    """Return the token ids of a conversation by its chat template, or of the joined contents where there is none.

    `template` None takes that of the tokenizer; `generate` adds the beginning of an answer.
    """
    if template is None and tokenizer.chat_template is None:
        return list(tokenizer("".join(str(message["content"]) for message in messages))["input_ids"])
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, chat_template=template, add_generation_prompt=generate
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def batches(lengths: Sequence[int], *, tokens: int) -> Iterator[list[int]]:
    """Yield the indices of rows in batches of at most `tokens` with padding, the longest rows first."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if batch and lengths[batch[0]] * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def token_scores(
    model: Any, rows: Sequence[np.ndarray], temperature: float, *, batch_tokens: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (index of a row, its tokens after the first [T - 1], log-probabilities of all tokens in their places [T - 1, V]).

    The logits are divided by `temperature`; `batch_tokens` is the largest number of tokens of a forward pass. Raises DataError for an
    empty row and for ids outside the vocabulary.
    """
    vocabulary = model.get_output_embeddings().weight.shape[0]
    for index, row in enumerate(rows):
        if not len(row) or row.min() < 0 or row.max() >= vocabulary:
            raise DataError(
                f"row {index} must hold token ids in [0, {vocabulary}), got {len(row)} ids up to {max(row, default=None)}"
            )
    device = model.get_output_embeddings().weight.device
    for batch in batches([len(row) for row in rows], tokens=batch_tokens):
        ids, mask = padded([rows[index].tolist() for index in batch], pad=0, device=device)
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        for row_in_batch, index in enumerate(batch):
            scores = (logits[row_in_batch, : len(rows[index]) - 1].float() / temperature).log_softmax(dim=-1)
            yield index, ids[row_in_batch, 1 : len(rows[index])], scores


def entries(targets: Tensor, scores: Tensor) -> Tensor:
    """Return the entries of `scores` [T, V] at `targets` [T]."""
    return scores.gather(1, targets.unsqueeze(1)).squeeze(1)


def after_nothing(values: Tensor) -> np.ndarray:
    """Return `values` [T - 1, ...] on the CPU after a first entry of 0, [T, ...]."""
    padded_values: np.ndarray = torch.cat([values.new_zeros(1, *values.shape[1:]), values]).cpu().numpy()
    return padded_values


def padded(rows: Sequence[Sequence[int]], *, pad: int, device: str | torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (token ids, attention mask), [B, S] int64 each, padded on the right."""
    ids = [torch.tensor(row) for row in rows]
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    return pad_sequence(ids, batch_first=True, padding_value=pad).to(device), mask.to(device)
