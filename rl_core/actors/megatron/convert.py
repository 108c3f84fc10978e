"""Megatron's parameters as pieces of Hugging Face tensors, both ways.

A parameter on a tensor rank is one or more boxes of tensors of the folder: query, key and value interleaved by key-value group,
gate and up stacked, the vocabulary padded to a multiple of the tensor ranks. What holds for a parameter holds for its moments,
its gradient and its float32 copy, which have the same shape.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rl_core.actors.megatron.model import head_size
from rl_core.actors.slices import LocalSlice

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
EMBEDDING = "model.embed_tokens.weight"
WHOLE = {"decoder.final_layernorm.weight": "model.norm.weight"}
VOCABULARY = {"embedding.word_embeddings.weight": EMBEDDING, "output_layer.weight": "lm_head.weight"}
NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
"""Cut along their second dimension."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a Hugging Face tensor in this rank's memory."""

    name: str
    """Hugging Face name."""
    view: Tensor
    """The elements where they lie, in the box's order but perhaps with one dimension more."""
    size: tuple[int, ...]
    """Of the box."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole tensor."""
    cut_along: int | None
    """Dimension along which the tensor ranks hold different boxes; None = each holds all of it."""

    def slice(self) -> LocalSlice:
        """Return the box; where its elements do not lie together they are copied."""
        tensor = self.view.reshape(self.size)
        return LocalSlice(tensor=tensor, shape=self.shape, offset=self.offset, replicated=self.cut_along is None)

    def fill(self, box: Tensor) -> None:
        """Take over the elements of `box`; one that is a view of this piece has them in place already."""
        if box.data_ptr() != self.view.data_ptr():
            self.view.copy_(box.reshape(self.view.shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a model is cut over tensor ranks, seen from one of them."""

    heads: int
    groups: int
    """Key-value heads of the whole model."""
    head: int
    """Width of a head."""
    vocabulary: int
    """Tokens of the whole model, without padding."""
    tied: bool
    """Embedding and output layer are one tensor; the last of several stages has a copy of it."""
    rank: int
    ranks: int

    @classmethod
    def of(cls, hf: Any, rank: int, ranks: int) -> "Cut":
        """Return the cut of the model of a transformers config over `ranks` tensor ranks."""
        return cls(
            heads=hf.num_attention_heads,
            groups=hf.num_key_value_heads,
            head=head_size(hf),
            vocabulary=hf.vocab_size,
            tied=bool(hf.tie_word_embeddings),
            rank=rank,
            ranks=ranks,
        )

    @property
    def padded_vocabulary(self) -> int:
        """Return the rows of the embedding over all ranks."""
        return -(-self.vocabulary // self.ranks) * self.ranks

    @property
    def tokens(self) -> int:
        """Return how many rows of this rank's part of the embedding are tokens; the padding is at the end."""
        rows = self.padded_vocabulary // self.ranks
        return max(0, min(rows, self.vocabulary - self.rank * rows))

    def pieces(self, name: str, tensor: Tensor) -> list[Piece]:
        """Return the pieces of parameter `name`, its layer counted over the whole model; `tensor` has its shape."""
        tensor = tensor.detach()
        if name in WHOLE:
            return [self._whole(WHOLE[name], tensor)]
        if name in VOCABULARY:
            rows = tensor[: self.tokens]
            offset = min(self.rank * tensor.shape[0], self.vocabulary)
            return [
                self._rows(
                    EMBEDDING if self.tied else VOCABULARY[name],
                    rows,
                    rows.shape[0],
                    offset=offset,
                    total=self.vocabulary,
                )
            ]
        layer, inner = _layer_of(name)
        prefix = f"model.layers.{layer}."
        if inner in NORMS:
            return [self._whole(prefix + NORMS[inner], tensor)]
        if inner in COLUMNS:
            return [self._columns(prefix + COLUMNS[inner], tensor)]
        if inner == "mlp.linear_fc1.weight":
            half = tensor.shape[0] // 2
            parts = {"gate_proj": tensor[:half], "up_proj": tensor[half:]}
            return [self._rows(f"{prefix}mlp.{part}.weight", rows, half) for part, rows in parts.items()]
        if inner.startswith("self_attention.linear_qkv."):
            return self._attention(prefix, inner.rpartition(".")[2], tensor)
        raise RuntimeError(f"parameter {name} has no place in a Hugging Face folder; this is a bug")

    def _attention(self, prefix: str, kind: str, tensor: Tensor) -> list[Piece]:
        """Return q, k and v of a fused tensor: per key-value group its query heads, its key, its value."""
        groups, queries = self.groups // self.ranks, self.heads // self.groups * self.head
        by_group = tensor.view(groups, queries + 2 * self.head, *tensor.shape[1:])
        parts = {
            "q_proj": by_group[:, :queries],
            "k_proj": by_group[:, queries : queries + self.head],
            "v_proj": by_group[:, queries + self.head :],
        }
        return [
            self._rows(f"{prefix}self_attn.{part}.{kind}", view, view.shape[1] * groups, rest=tensor.shape[1:])
            for part, view in parts.items()
        ]

    def _rows(
        self,
        name: str,
        view: Tensor,
        rows: int,
        *,
        rest: tuple[int, ...] | None = None,
        offset: int | None = None,
        total: int | None = None,
    ) -> Piece:
        """Return a piece cut along dimension 0 into equal parts, or at `offset` of `total` rows."""
        rest = tuple(view.shape[1:] if rest is None else rest)
        start, height = self.rank * rows if offset is None else offset, self.ranks * rows if total is None else total
        return Piece(name, view, (rows, *rest), (start, *(0 for _ in rest)), (height, *rest), cut_along=0)

    def _columns(self, name: str, tensor: Tensor) -> Piece:
        rows, columns = tensor.shape
        return Piece(name, tensor, (rows, columns), (0, self.rank * columns), (rows, self.ranks * columns), cut_along=1)

    def _whole(self, name: str, tensor: Tensor) -> Piece:
        shape = tuple(tensor.shape)
        return Piece(name, tensor, shape, (0,) * len(shape), shape, cut_along=None)


def _layer_of(name: str) -> tuple[str, str]:
    found = LAYER.fullmatch(name)
    if found is None:
        raise RuntimeError(f"parameter {name} has no place in a Hugging Face folder; this is a bug")
    return found[1], found[2]


def global_parameters(model: Any) -> Mapping[str, Any]:
    """Return the parameters of one stage by name, layers counted over the whole model."""
    layers = {index: layer.layer_number - 1 for index, layer in enumerate(model.decoder.layers)}
    named = {}
    for name, parameter in model.named_parameters():
        found = LAYER.fullmatch(name)
        named[f"decoder.layers.{layers[int(found[1])]}.{found[2]}" if found else name] = parameter
    return named
