"""`TransformersDecoder`: runs models that the lean forward does not support, with the forward and the cache of transformers.

The module imports transformers, so it is loaded for such models only. Rows are left-padded as in `cache`: a new prompt is placed just left of
the next column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from rl_core.rollouts.hf.weights import checked
from rl_core.rollouts.policy_target import saved_tensors
from rl_core.weights.stored_parts import stored_parts, views


def empty_transformers_model(raw: Mapping[str, Any], *, dtype: torch.dtype, device: str) -> Any:
    """Return a transformers model of a parsed config.json with random weights, which the first weight sync replaces."""
    config = AutoConfig.for_model(**raw)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(device).eval()


def compute_head_in_float32(model: Any) -> None:
    """Let the output layer of a transformers model convert its input and its weight to float32 before their product, in place."""
    head = model.get_output_embeddings()
    head.forward = lambda hidden: F.linear(hidden.float(), head.weight.float(), head.bias)


def folder_tensors(model: Any) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a transformers model as a model folder has them, by name, sharing memory.

    A tied tensor is there once, by its first name.
    """
    return views(saved_tensors(model), stored_parts(model))


class ModelWeights:
    """`decoder.WeightStore` over the parameters and persistent buffers of a transformers model."""

    def __init__(self, model: Any) -> None:
        self._folder_tensors = folder_tensors(model)
        unaliased = dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys()
        self._aliases = {
            name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in unaliased
        }

    def names_and_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every tensor that a load must contain; a tied tensor is there once, by its first name."""
        return {name: tuple(tensor.shape) for name, tensor in self._folder_tensors.items()}

    def dtypes(self) -> dict[str, str]:
        """Return the dtype of every tensor by name, such as "float32"."""
        return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._folder_tensors.items()}

    def destinations(self) -> dict[str, Tensor]:
        """Return the tensors in host memory that may be overwritten in place."""
        return {
            name: tensor
            for name, tensor in self._folder_tensors.items()
            if tensor.device.type == "cpu" and tensor.is_contiguous()
        }

    def stored(self) -> list[Tensor]:
        """Return all tensors."""
        return list(self._folder_tensors.values())

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights; see `decoder.WeightStore.load`."""
        by_name = checked(tensors, self.names_and_shapes(), optional=self._aliases)
        for name in self._folder_tensors:
            self.write(name, by_name[name])

    def write(self, name: str, tensor: Tensor) -> None:
        """Replace one tensor; its name and shape were checked before."""
        if name not in self._aliases:
            self._folder_tensors[name].copy_(tensor)


class TransformersDecoder:
    """`decoder.Decoder` over any causal transformers model whose cache holds plain keys and values."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self.weights = ModelWeights(model)
        parameter = next(model.parameters())
        self.device = parameter.device
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self._cache: Any = None
        self._mask = torch.zeros(0, 0, dtype=torch.int64, device=self.device)

    def prefill(self, prompts: Sequence[Sequence[int]], row_prompts: np.ndarray) -> Tensor:
        """Append a row per entry of `row_prompts`; see `Decoder.prefill`. Every distinct prompt is computed once."""
        padded = max(map(len, prompts))
        ids = torch.zeros(len(prompts), padded, dtype=torch.int64)
        mask = torch.zeros(len(prompts), padded, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, padded - len(prompt) :] = torch.tensor(prompt)
            mask[row, padded - len(prompt) :] = 1
        # This cache keeps all keys also in layers with a sliding window, so that rows of any length can be joined.
        cache = DynamicCache()
        index = torch.from_numpy(row_prompts).to(self.device)
        mask = mask.to(self.device)
        logits = self._forward(ids.to(self.device), mask, (mask.cumsum(-1) - 1).clamp(min=0), cache)
        cache.batch_select_indices(index)
        self._join(cache, mask[index])
        return logits[index]

    def step(self, tokens: Tensor) -> Tensor:
        """Append `tokens` [n] to the rows; return the logits [n, V] of the next ones."""
        self._mask = F.pad(self._mask, (0, 1), value=1)
        positions = self._mask.sum(-1, keepdim=True) - 1
        return self._forward(tokens.unsqueeze(1), self._mask, positions, self._cache)

    def keep(self, count: int, moves: list[tuple[int, int]]) -> None:
        """Keep `count` rows, after the (source, target) moves that fill free places below `count`."""
        if self._cache is None or not count:
            self._cache = None
            return
        order = torch.arange(count, device=self.device)
        for source, target in moves:
            order[target] = source
        self._cache.batch_select_indices(order)
        self._mask = self._mask[order]

    def release_cache(self) -> None:
        """Free the memory of keys and values."""
        self.keep(0, [])
        self._mask = torch.zeros(0, 0, dtype=torch.int64, device=self.device)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        with torch.no_grad():
            result = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: Tensor = result.logits[:, -1].float()
        return logits

    def _join(self, cache: Any, mask: Tensor) -> None:
        """Append new rows to the running ones; both are left-padded to the longer of the two."""
        if self._cache is None:
            self._cache, self._mask = cache, mask
            return
        width = max(self._mask.shape[1], mask.shape[1])
        for old, new in zip(self._cache.layers, cache.layers, strict=True):
            old.keys = torch.cat([_left(old.keys, width), _left(new.keys, width)])
            old.values = torch.cat([_left(old.values, width), _left(new.values, width)])
        self._mask = torch.cat([F.pad(part, (width - part.shape[1], 0)) for part in (self._mask, mask)])


def _left(states: Tensor, width: int) -> Tensor:
    """Return `states` padded to [rows, K, width, D] with zeros on the left."""
    return F.pad(states, (0, 0, width - states.shape[2], 0))
