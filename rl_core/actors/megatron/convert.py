"""Megatron's parameters as pieces of Hugging Face tensors, both ways.

A parameter on a tensor rank is one or more boxes of tensors of the folder: query, key and value interleaved by key-value group,
gate and up stacked, the vocabulary padded to a multiple of the tensor ranks. What holds for a parameter holds for its moments,
its gradient and its float32 copy, which have the same shape.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from rl_core.actors.critic import HEAD, SEPARATE
from rl_core.actors.slices import LocalSlice

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
EMBEDDING = "model.embed_tokens.weight"
WHOLE = {"decoder.final_layernorm.weight": "model.norm.weight", f"{HEAD}.weight": f"{HEAD}.weight"}
OF_CRITIC = f"{SEPARATE}."
"""Before the names of a critic with a decoder of its own; after it they are those of the policy."""
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
    views: tuple[Tensor, ...]
    """The elements where they lie: boxes that follow each other along the first dimension."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole tensor."""
    cut_along: int | None
    """Dimension along which the tensor ranks hold different boxes; None = each holds all of it."""

    @property
    def size(self) -> tuple[int, ...]:
        """Return the size of the box."""
        return (sum(map(len, self.views)), *self.views[0].shape[1:])

    def slice(self) -> LocalSlice:
        """Return the box; where its elements do not lie together they are copied."""
        tensor = self.views[0] if len(self.views) == 1 else torch.cat(self.views)
        return LocalSlice(tensor=tensor, shape=self.shape, offset=self.offset, replicated=self.cut_along is None)

    def fill(self, box: Tensor) -> None:
        """Take over the elements of `box`; one that is a view of this piece has them in place already."""
        if box.data_ptr() == self.views[0].data_ptr():
            return
        for view, part in zip(self.views, box.split([len(view) for view in self.views]), strict=True):
            view.copy_(part)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a parameter that follow each other in a Hugging Face tensor."""

    name: str
    """Hugging Face name."""
    runs: tuple[range, ...]
    """The rows, rising, in runs that follow each other in the parameter."""
    offset: tuple[int, ...]
    """Of the first row in the whole tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    cut_along: int | None
    """As in `Piece`."""

    def pieces(self, flat: Tensor, start: int, row: tuple[int, ...]) -> list[Piece]:
        """Return what `flat` holds of the block, the parameter's elements from `start` on, where a row has the shape `row`.

        That is a box of all its whole rows, and one each of what it has of the rows where it begins and ends.
        """
        width, stop, at = prod(row), start + len(flat), self.offset[0]
        whole: list[Tensor] = []
        found: list[Piece] = []
        first = at
        for run in self.runs:
            for low, high in _boxes(max(start, run.start * width), min(stop, run.stop * width), width):
                view, place = flat[low - start : high - start], at + low // width - run.start
                if high - low < width:
                    offset = (place, self.offset[1] + low % width)
                    found.append(self._piece((view.view(1, -1),), offset))
                else:
                    first = first if whole else place
                    whole.append(view.view(-1, *row))
            at += len(run)
        if whole:
            found.append(self._piece(tuple(whole), (first, *self.offset[1:])))
        return found

    def _piece(self, views: tuple[Tensor, ...], offset: tuple[int, ...]) -> Piece:
        return Piece(self.name, views, offset, self.shape, self.cut_along)


def _boxes(low: int, high: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges into which the range of a matrix's elements falls that are boxes: the end of a row, whole rows, a beginning."""
    first, last = -(-low // width) * width, high // width * width
    ends = (low, high) if first > last else (low, first, last, high)
    for start, stop in pairwise(ends):
        if start < stop:
            yield start, stop


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

    def pieces(self, name: str, shape: tuple[int, ...], values: Tensor, start: int = 0) -> list[Piece]:
        """Return the pieces of a parameter of that name and shape, its layer counted over the whole model.

        `values`: the parameter, or a run of its elements, end to end, from element `start` on. The padding of the vocabulary is in none.
        """
        flat = values.detach().view(-1)
        return [piece for block in self.blocks(name, shape) for piece in block.pieces(flat, start, shape[1:])]

    def blocks(self, name: str, shape: tuple[int, ...]) -> list[Block]:
        """Return where the rows of a parameter of that name and shape lie in the folder's tensors."""
        if name.startswith(OF_CRITIC):
            blocks = self.blocks(name.removeprefix(OF_CRITIC), shape)
            return [replace(block, name=OF_CRITIC + block.name) for block in blocks]
        if name in WHOLE:
            return [self._whole(WHOLE[name], shape)]
        if name in VOCABULARY:
            # Of several ranks the last ones may have padding alone.
            offset = (min(self.rank * shape[0], self.vocabulary), 0)
            stored = EMBEDDING if self.tied else VOCABULARY[name]
            return [Block(stored, (range(self.tokens),), offset, (self.vocabulary, *shape[1:]), cut_along=0)]
        layer, inner = _layer_of(name)
        prefix = f"model.layers.{layer}."
        if inner in NORMS:
            return [self._whole(prefix + NORMS[inner], shape)]
        if inner in COLUMNS:
            rows, columns = shape
            offset, whole = (0, self.rank * columns), (rows, self.ranks * columns)
            return [Block(prefix + COLUMNS[inner], (range(rows),), offset, whole, cut_along=1)]
        if inner == "mlp.linear_fc1.weight":
            half = shape[0] // 2
            parts = {"gate_proj": range(half), "up_proj": range(half, 2 * half)}
            return [self._rows(f"{prefix}mlp.{part}.weight", (rows,), shape[1:]) for part, rows in parts.items()]
        if inner.startswith("self_attention.linear_qkv."):
            return self._attention(prefix, inner.rpartition(".")[2], shape[1:])
        raise RuntimeError(f"parameter {name} has no place in a Hugging Face folder; this is a bug")

    def _attention(self, prefix: str, kind: str, row: tuple[int, ...]) -> list[Block]:
        """Return q, k and v of a fused parameter: per key-value group its query heads, its key, its value."""
        queries = self.heads // self.groups * self.head
        group = queries + 2 * self.head
        starts = range(0, self.groups // self.ranks * group, group)
        parts = {
            "q_proj": (0, queries),
            "k_proj": (queries, queries + self.head),
            "v_proj": (queries + self.head, group),
        }
        return [
            self._rows(f"{prefix}self_attn.{part}.{kind}", tuple(range(at + low, at + high) for at in starts), row)
            for part, (low, high) in parts.items()
        ]

    def _rows(self, name: str, runs: tuple[range, ...], row: tuple[int, ...]) -> Block:
        """Return a block of which each rank has equally many rows."""
        rows = sum(map(len, runs))
        offset, shape = (self.rank * rows, *(0 for _ in row)), (self.ranks * rows, *row)
        return Block(name, runs, offset, shape, cut_along=0)

    def _whole(self, name: str, shape: tuple[int, ...]) -> Block:
        return Block(name, (range(shape[0]),), (0,) * len(shape), tuple(shape), cut_along=None)


def head_size(hf: Any) -> int:
    """Return the width of an attention head of a transformers config."""
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def _layer_of(name: str) -> tuple[str, str]:
    found = LAYER.fullmatch(name)
    if found is None:
        raise RuntimeError(f"parameter {name} has no place in a Hugging Face folder; this is a bug")
    return found[1], found[2]


def global_parameters(model: Any) -> Mapping[str, Any]:
    """Return the parameters of one stage by name, layers counted over the whole model."""
    layers = [layer.layer_number - 1 for layer in model.decoder.layers]

    def counted(found: re.Match[str]) -> str:
        return f"decoder.layers.{layers[int(found[1])]}.{found[2]}"

    return {LAYER.sub(counted, name): parameter for name, parameter in model.named_parameters()}
