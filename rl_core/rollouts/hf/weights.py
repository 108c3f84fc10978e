"""`DecoderWeights`: the weights of the lean forward, addressed by Hugging Face names.

Query, key and value are fused into one matrix, and gate and up into another. Only the fused tensors are stored; a named tensor is written
into its part of them. The weights are created empty from a config and filled by the first weight sync or from a transformers model. Imports
no transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.api.errors import DataError
from rl_core.rollouts.hf.config import DecoderConfig
from rl_core.rollouts.hf.rope import deinterleave, interleave

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(slots=True)
class LayerWeights:
    """The weights of one decoder layer; None for tensors that the model family does not have."""

    input_norm: Tensor
    qkv: Tensor
    """[(heads + 2 kv) d, H]; query and key rows interleaved."""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[heads + kv, d], interleaved."""
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    """[2 I, H]."""
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a named tensor: a view into a fused tensor, and the layout of its rows there."""

    view: Tensor
    shape: tuple[int, ...]
    """Shape under the Hugging Face name."""
    rotary_dim: int = 0
    """Head size when rows are interleaved, 0 otherwise."""

    def write(self, tensor: Tensor) -> None:
        source = interleave(tensor, self.rotary_dim) if self.rotary_dim else tensor
        self.view.copy_(source)

    def read(self) -> Tensor:
        if self.view.shape != self.shape:
            return deinterleave(self.view[0].clone(), self.rotary_dim)
        return deinterleave(self.view, self.rotary_dim) if self.rotary_dim else self.view


class DecoderWeights:
    """All parameters of one model on one device. UNFILLED -> filled by the first `load`."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self._places: dict[str, _Place] = {}
        self.embedding = self._add(EMBEDDING, config.vocab_size, config.hidden_size)
        self.layers = [self._layer(index) for index in range(config.num_layers)]
        self.norm = self._add("model.norm.weight", config.hidden_size)
        self.head = self.embedding if config.tied else self._add(HEAD, config.vocab_size, config.hidden_size)

    def names_and_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every tensor that a load must contain, by Hugging Face name; without a tied output layer."""
        return {name: place.shape for name, place in self._places.items()}

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in the layout of Hugging Face; tensors that are stored interleaved are copies."""
        for name, place in self._places.items():
            yield name, place.read()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights. Raises DataError for unknown, missing, repeated or wrongly shaped tensors; then no weight was changed.

        Tensors must stay valid until this returns, because all are checked before the first one is written.
        """
        by_name = checked(tensors, self.names_and_shapes(), optional=self._aliases())
        with torch.no_grad():
            for name, place in self._places.items():
                place.write(by_name[name])

    def write(self, name: str, tensor: Tensor) -> None:
        """Replace one tensor at once; its name and shape were checked against the manifest before."""
        if name in self._aliases():
            return
        with torch.no_grad():
            self._places[name].write(tensor)

    def dtypes(self) -> dict[str, str]:
        """Return the dtype of every tensor by name, such as "float32"."""
        return dict.fromkeys(self._places, str(self.dtype).removeprefix("torch."))

    def destinations(self) -> dict[str, Tensor]:
        """Return the tensors that may be overwritten in place: those in host memory that are stored in the layout of their name."""
        if self.device.type != "cpu":
            return {}
        return {name: place.view for name, place in self._places.items() if not place.rotary_dim}

    def stored(self) -> list[Tensor]:
        """Return all tensors in their stored layout; several are views of one storage."""
        return [place.view for place in self._places.values()]

    def _aliases(self) -> dict[str, tuple[int, ...]]:
        return {HEAD: self._places[EMBEDDING].shape} if self.config.tied else {}

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _add(self, name: str, *shape: int) -> Tensor:
        tensor = self._empty(*shape)
        self._places[name] = _Place(tensor, shape)
        return tensor

    def _layer(self, index: int) -> LayerWeights:
        c, base = self.config, f"model.layers.{index}"
        query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qkv = self._empty(query + 2 * key, c.hidden_size)
        bias = self._empty(query + 2 * key) if c.qkv_bias else None
        input_norm = self._add(f"{base}.input_layernorm.weight", c.hidden_size)
        self._parts(f"{base}.self_attn", qkv, bias, {"q_proj": query, "k_proj": key, "v_proj": key})
        norm = self._empty(c.num_heads + c.num_kv_heads, c.head_dim) if c.qk_norm else None
        if norm is not None:
            shape, attention = (c.head_dim,), f"{base}.self_attn"
            self._places[f"{attention}.q_norm.weight"] = _Place(norm[: c.num_heads], shape, c.head_dim)
            self._places[f"{attention}.k_norm.weight"] = _Place(norm[c.num_heads :], shape, c.head_dim)
        out = self._add(f"{base}.self_attn.o_proj.weight", c.hidden_size, query)
        out_bias = self._add(f"{base}.self_attn.o_proj.bias", c.hidden_size) if c.out_bias else None
        post_norm = self._add(f"{base}.post_attention_layernorm.weight", c.hidden_size)
        size = c.intermediate_size
        gate_up = self._empty(2 * size, c.hidden_size)
        gate_up_bias = self._empty(2 * size) if c.mlp_bias else None
        self._parts(f"{base}.mlp", gate_up, gate_up_bias, {"gate_proj": size, "up_proj": size})
        down = self._add(f"{base}.mlp.down_proj.weight", c.hidden_size, size)
        down_bias = self._add(f"{base}.mlp.down_proj.bias", c.hidden_size) if c.mlp_bias else None
        return LayerWeights(
            input_norm, qkv, bias, norm, out, out_bias, post_norm, gate_up, gate_up_bias, down, down_bias
        )

    def _parts(self, base: str, weight: Tensor, bias: Tensor | None, sizes: Mapping[str, int]) -> None:
        start = 0
        for part, size in sizes.items():
            rotary = self.config.head_dim if part in ("q_proj", "k_proj") else 0
            view = weight[start : start + size]
            self._places[f"{base}.{part}.weight"] = _Place(view, tuple(view.shape), rotary)
            if bias is not None:
                self._places[f"{base}.{part}.bias"] = _Place(bias[start : start + size], (size,), rotary)
            start += size


def checked(
    tensors: Iterable[tuple[str, Tensor]],
    wanted: Mapping[str, tuple[int, ...]],
    *,
    optional: Mapping[str, tuple[int, ...]],
) -> dict[str, Tensor]:
    """Return the tensors by name. Raises DataError naming tensors that are unknown, repeated, missing or of a wrong shape."""
    by_name: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, tensor in tensors:
        shape = wanted.get(name, optional.get(name))
        if shape is None:
            problems.append(f"unknown {name}")
        elif name in by_name:
            problems.append(f"repeated {name}")
        elif tuple(tensor.shape) != shape:
            problems.append(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
        by_name[name] = tensor
    problems += [f"missing {name}" for name in wanted if name not in by_name]
    if problems:
        omitted = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise DataError(f"weights do not fit the model, nothing was applied: {'; '.join(problems[:5])}{omitted}")
    return by_name
