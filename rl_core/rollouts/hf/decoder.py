"""`Decoder`, the interface of the engine to a model, and `LeanDecoder`, a built-in forward of Llama, Qwen2, Qwen3 and Mistral.

LeanDecoder runs over a static cache and uses few, fused operations, because on small models the calls cost more than their arithmetic.
Other models are run by `generic.TransformersDecoder`.

Legend: n rows, U distinct prompts, L padded prompt length, K key-value heads, Q query heads per key-value head, W columns of the cache in
use, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from rl_core.cpu.products import add_linear, linear, padded_rows, pads
from rl_core.rollouts.hf.cache import KVCache
from rl_core.rollouts.hf.rope import rotation_table
from rl_core.rollouts.hf.weights import DecoderWeights, LayerWeights

Attend = Callable[[int, Tensor], Tensor]
"""(layer, qkv [N, (heads + 2 K) D]) -> attention output [N, heads D]; also stores keys and values in the cache."""


class WeightStore(Protocol):
    """The weights of a decoder by Hugging Face name."""

    def names_and_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every tensor that a load must contain; tied names are absent."""

    def dtypes(self) -> dict[str, str]:
        """Return the dtype of every tensor by name, such as "float32"."""

    def destinations(self) -> dict[str, Tensor]:
        """Return the tensors in host memory that may be overwritten in place."""

    def stored(self) -> list[Tensor]:
        """Return all tensors in their stored layout; several may be views of one storage."""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights. Raises DataError, and changes none, if tensors are missing, unknown or of a wrong shape."""

    def write(self, name: str, tensor: Tensor) -> None:
        """Replace one tensor; its name and shape were checked before."""


class Decoder(Protocol):
    """A model with the keys and values of its running rows, which are numbered 0..n-1. Called by `HFEngine`."""

    device: torch.device
    vocab_size: int

    @property
    def weights(self) -> WeightStore:
        """The weights, which may be replaced while no row is being generated."""

    def prefill(self, prompts: Sequence[Sequence[int]], row_prompts: np.ndarray) -> Tensor:
        """Append rows to the batch and compute their prompts; return the logits [new, V] of their next tokens.

        There is one new row for each entry of `row_prompts`, which is an index into the distinct `prompts`. A prompt that several rows
        share is computed once.
        """

    def step(self, tokens: Tensor) -> Tensor:
        """Append `tokens` [n] to the rows; return the logits [n, V] of the next ones."""

    def keep(self, count: int, moves: list[tuple[int, int]]) -> None:
        """Keep `count` rows. Each (source, target) of `moves` first copies a row into a free place below `count`."""

    def release_cache(self) -> None:
        """Free the memory of keys and values. No row may be running."""


class LeanDecoder:
    """`Decoder` over `DecoderWeights`."""

    def __init__(
        self, weights: DecoderWeights, *, max_seq_len: int, compile: bool = False, float32_head: bool = False
    ) -> None:
        """Run the model of `weights` on sequences of up to `max_seq_len` tokens.

        `compile` applies torch.compile to the parts of a layer before and after the attention, except for the rotary embedding.
        `float32_head` converts hidden states and the head's weight to float32 before their product.
        """
        config = weights.config
        self.weights = weights
        self.device = weights.device
        self.vocab_size = config.vocab_size
        self._config = config
        self._float32_head = float32_head
        self._pads = pads(weights.dtype, weights.device)
        self._query_size = config.num_heads * config.head_dim
        self._rotary_heads = config.num_heads + config.num_kv_heads
        self._rotation = rotation_table(config, max_seq_len + 1, self.device)
        self._cache = KVCache(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            dtype=weights.dtype,
            device=self.device,
            max_columns=max_seq_len,
        )
        self._into, self._out_of = self._before_attention, self._after_attention
        if compile:
            self._into, self._out_of = (torch.compile(part, dynamic=True) for part in (self._into, self._out_of))

    def keep(self, count: int, moves: list[tuple[int, int]]) -> None:
        """Keep `count` rows, after the (source, target) moves that fill free places below `count`."""
        self._cache.keep(count, moves)

    def release_cache(self) -> None:
        """Free the memory of keys and values."""
        self._cache.release()

    def prefill(self, prompts: Sequence[Sequence[int]], row_prompts: np.ndarray) -> Tensor:
        """Append a row per entry of `row_prompts`; see `Decoder.prefill`. Every distinct prompt is computed once."""
        with torch.inference_mode():
            return self._prefill(prompts, row_prompts)

    def step(self, tokens: Tensor) -> Tensor:
        """Append `tokens` [n] to the rows; return the logits [n, V] of the next ones."""
        with torch.inference_mode():
            return self._step(tokens)

    def _prefill(self, prompts: Sequence[Sequence[int]], row_prompts: np.ndarray) -> Tensor:
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        padded = int(lengths.max())
        ids = np.zeros((len(prompts), padded), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, padded - len(prompt) :] = prompt
        offsets = np.maximum(np.arange(padded)[None, :] - (padded - lengths)[:, None], 0)
        stored = self._cache.add_rows(lengths[row_prompts], padded)
        index = torch.from_numpy(row_prompts).to(self.device)
        attend = self._prefill_attention(stored, index, lengths, padded)
        hidden = self._hidden(torch.from_numpy(ids).view(-1), offsets.reshape(-1), attend)
        last_hidden = hidden[: ids.size].view(len(prompts), padded, -1)[:, -1]
        return self._logits(self._padded(last_hidden))[index]

    def _step(self, tokens: Tensor) -> Tensor:
        cache = self._cache
        cache.begin_step()
        attend = self._step_attention()
        hidden = self._hidden(tokens, cache.positions(), attend)
        cache.advance()
        return self._logits(hidden)[: cache.rows]

    def _hidden(self, tokens: Tensor, positions: np.ndarray, attend: Attend) -> Tensor:
        """Return [N, H] before the final norm, for N tokens at `positions`; rows beyond N are padding."""
        count = len(tokens)
        ids = self._padded(tokens.to(self.device))
        position_ids = self._padded(torch.from_numpy(positions).to(self.device))
        hidden, rotation = self.weights.embedding[ids], self._rotation[position_ids]
        padding = hidden.new_zeros(len(ids), self._query_size) if len(ids) > count else None
        for index, layer in enumerate(self.weights.layers):
            qkv = self._into(layer, hidden)
            self._rotate(qkv, layer.qk_norm, rotation)
            attended = attend(index, qkv[:count])
            if padding is not None:
                padding[:count] = attended
                attended = padding
            hidden = self._out_of(layer, hidden, attended)
        return hidden

    def _padded(self, rows: Tensor) -> Tensor:
        """Return `rows` with zeros appended up to one of few sizes, if matrix products are faster with these."""
        missing = padded_rows(len(rows)) - len(rows) if self._pads else 0
        return F.pad(rows, (0,) * (2 * rows.dim() - 1) + (missing,)) if missing else rows

    def _before_attention(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        """Return query, key and value of N tokens, not rotated yet, [N, (heads + 2 K) D]."""
        config = self._config
        normed = F.rms_norm(hidden, (config.hidden_size,), layer.input_norm, config.norm_eps)
        return linear(normed, layer.qkv, layer.qkv_bias)

    def _after_attention(self, layer: LayerWeights, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return `hidden` [N, H] plus the attention's output, plus the feed-forward part."""
        config = self._config
        hidden = add_linear(hidden, attended, layer.out)
        if layer.out_bias is not None:
            hidden = hidden + layer.out_bias
        normed = F.rms_norm(hidden, (config.hidden_size,), layer.post_norm, config.norm_eps)
        gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        hidden = add_linear(hidden, F.silu(gate).mul_(up), layer.down)
        return hidden if layer.down_bias is None else hidden + layer.down_bias

    def _rotate(self, qkv: Tensor, norm: Tensor | None, rotation: Tensor) -> None:
        """Normalise (Qwen3) and rotate query and key of qkv in place."""
        count, dim = qkv.shape[0], self._config.head_dim
        heads = qkv[:, : self._rotary_heads * dim].view(count, self._rotary_heads, dim)
        if norm is not None:
            heads.copy_(F.rms_norm(heads, (dim,), None, self._config.norm_eps).mul_(norm))
        pairs = heads.view(count, self._rotary_heads, dim // 2, 2)
        if qkv.dtype == torch.float32:
            torch.view_as_complex(pairs).mul_(rotation)
        else:
            pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(rotation)))

    def _logits(self, hidden: Tensor) -> Tensor:
        config, weights = self._config, self.weights
        normed = F.rms_norm(hidden, (config.hidden_size,), weights.norm, config.norm_eps)
        if self._float32_head:
            return linear(normed.float(), weights.head.float())
        return linear(normed, weights.head).float()

    def _step_attention(self) -> Attend:
        """Return the attention of one new token per row over the live window."""
        cache, config = self._cache, self._config
        columns, windows, mask = cache.column(), cache.window(), cache.mask()
        count, kv_heads, dim = cache.rows, config.num_kv_heads, config.head_dim
        queries = config.num_heads // kv_heads
        split = self._query_size
        flat_mask = None if mask is None else mask.reshape(count * kv_heads, 1, -1)
        fused = self.device.type != "cpu"

        def attend(layer: int, qkv: Tensor) -> Tensor:
            columns[layer].copy_(qkv[:, split:].view(count, 2, kv_heads, dim).transpose(0, 1))
            query = qkv[:, :split].view(count, kv_heads, queries, dim)
            key, value = windows[layer].unbind(0)
            if fused:
                bias = None if flat_mask is None else flat_mask.view(count, kv_heads, 1, -1)
                return fused_attention(query, key, value, bias)
            # On a CPU two batched products are faster than the fused kernel, which is made for many queries per key.
            query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
            key = key.transpose(1, 2)
            scores = torch.bmm(query, key) if flat_mask is None else torch.baddbmm(flat_mask, query, key)
            return torch.bmm(scores.softmax(-1), value).view(count, split)

        return attend

    def _prefill_attention(self, stored: Sequence[Tensor], index: Tensor, lengths: np.ndarray, padded: int) -> Attend:
        """Return the causal attention of whole prompts [U, L], which also stores the keys and values of their rows."""
        config, distinct, rows = self._config, len(lengths), len(index)
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        mask = None if (lengths == padded).all() else self._padding_mask(lengths, padded)
        split = self._query_size

        def attend(layer: int, qkv: Tensor) -> Tensor:
            keys_values = qkv[:, split:].view(distinct, padded, 2, kv_heads, dim).permute(2, 0, 3, 1, 4)
            stored[layer].copy_(keys_values.expand(-1, rows, -1, -1, -1) if distinct == 1 else keys_values[:, index])
            query = qkv[:, :split].view(distinct, padded, heads, dim).transpose(1, 2)
            attended = F.scaled_dot_product_attention(
                query,
                keys_values[0],
                keys_values[1],
                attn_mask=mask,
                is_causal=mask is None,
                scale=1.0,
                enable_gqa=heads != kv_heads,
            )
            return attended.transpose(1, 2).reshape(distinct * padded, split)

        return attend

    def _padding_mask(self, lengths: np.ndarray, padded: int) -> Tensor:
        """Return [U, 1, L, L] bool, causal without padding; a pad sees itself, so that no softmax row is empty."""
        columns = torch.arange(padded, device=self.device)
        starts = torch.from_numpy(padded - lengths).to(self.device)
        causal = columns[None, :] <= columns[:, None]
        is_token = columns[None, None, :] >= starts[:, None, None]
        return ((causal & is_token) | torch.eye(padded, dtype=torch.bool, device=self.device)).unsqueeze(1)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Return [n, K Q D] of query [n, K, Q, D], not scaled, over key and value [n, K, W, D]; `bias` [n, K, 1, W]."""
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
    # Not a view: the kernels write their output with heads and queries in the other order.
    return attended.reshape(len(query), -1)
