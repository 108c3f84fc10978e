"""Maps Megatron's parameters to Hugging Face tensors, in both directions.

A parameter on a tensor-parallel rank consists of one or more boxes (rectangular parts) of Hugging Face tensors: query, key and value rows
are interleaved by key-value group, gate and up projections are stacked, and the vocabulary is padded to a multiple of the tensor-parallel
ranks. The boxes are views: reading or filling them copies nothing on the device. The same mapping applies to a parameter's moments,
gradient and float32 copy, which have the same shape.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import Tensor

from rl_core.actors.critic import HEAD, SEPARATE
from rl_core.actors.lora import A, B
from rl_core.actors.slices import LocalSlice, Slices

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
EMBEDDING = "model.embed_tokens.weight"
WHOLE = {"decoder.final_layernorm.weight": "model.norm.weight", f"{HEAD}.weight": f"{HEAD}.weight"}
OF_CRITIC = f"{SEPARATE}."
"""Prefix of the names of a critic that has its own decoder; what follows is named as in the policy."""
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
"""Parameters that are cut along their second dimension."""
ADAPTERS = "adapters"
"""Name of the submodule with the adapters of a linear layer; in it `<layer of Hugging Face>.lora_A` and `.lora_B`."""
ADAPTER = re.compile(rf"(self_attention|mlp)\.(\w+)\.{ADAPTERS}\.(\w+)\.({A}|{B})\.weight")
BLOCKS = {"self_attention": "self_attn", "mlp": "mlp"}


@dataclass(frozen=True, slots=True)
class RowMapping:
    """Maps rows of a Megatron parameter to a box of a Hugging Face tensor."""

    name: str
    """Hugging Face name."""
    rows: tuple[range, ...]
    """Rows of the parameter, ascending; in the box they follow each other without gaps."""
    offset: tuple[int, ...]
    """Index of the box's first element in the whole tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    cut_along: int | None
    """Dimension along which the tensor-parallel ranks have different boxes; None if each has the whole tensor."""

    def boxes(self, elements: Tensor, start: int, row_shape: tuple[int, ...]) -> list[LocalSlice]:
        """Return the boxes of the Hugging Face tensor that a range of the parameter's elements covers, as views of `elements`.

        `elements` [n] is the range, `start` the row-major index of its first element in the parameter, and `row_shape` the shape of a row.
        The range may begin and end inside a row: the parts of those two rows are boxes of their own, and so are whole rows that follow
        each other in the parameter.
        """
        width, stop = prod(row_shape), start + len(elements)
        box_shape = (sum(map(len, self.rows)), *row_shape)
        slices: list[LocalSlice] = []
        rows_before = 0
        for rows in self.rows:
            low, high = max(start, rows.start * width), min(stop, rows.stop * width)
            if low < high:
                index_in_box = (rows_before - rows.start) * width + low
                slices += LocalSlice.of_range(elements[low - start : high - start], box_shape, index_in_box).boxes()
            rows_before += len(rows)
        return [self._in_whole_tensor(box) for box in slices]

    def _in_whole_tensor(self, box: LocalSlice) -> LocalSlice:
        """Return a box whose offset counts from the first row of `rows` as a box of the whole tensor."""
        offset = tuple(base + index for base, index in zip(self.offset, box.offset, strict=True))
        return LocalSlice(tensor=box.tensor, shape=self.shape, offset=offset, replicated=self.cut_along is None)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallelLayout:
    """How a model is divided over the tensor-parallel ranks, for one of them."""

    heads: int
    """Query heads of the whole model."""
    groups: int
    """Key-value heads of the whole model."""
    head: int
    """Size of an attention head."""
    vocabulary: int
    """Tokens of the vocabulary, without padding."""
    tied: bool
    """Whether embedding and output layer are one tensor. With several pipeline stages the last one has a copy of it."""
    rank: int
    ranks: int

    @classmethod
    def of(cls, hf: Any, rank: int, ranks: int) -> "TensorParallelLayout":
        """Return the division of the model with transformers config `hf` over `ranks` tensor-parallel ranks, for rank `rank`."""
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
        """Number of rows of the embedding over all ranks, with padding."""
        return -(-self.vocabulary // self.ranks) * self.ranks

    @property
    def tokens(self) -> int:
        """Number of rows of this rank's part of the embedding that belong to a token. The remaining rows at the end are padding."""
        rows = self.padded_vocabulary // self.ranks
        return max(0, min(rows, self.vocabulary - self.rank * rows))

    def boxes(self, name: str, shape: tuple[int, ...], values: Tensor, start: int = 0) -> Slices:
        """Return the boxes of Hugging Face tensors that a parameter of that name and shape contains, as views of `values`.

        `name` has the global layer number.

        `values` is the parameter, or a range of its elements in row-major order that begins at element `start`. The padding of the
        vocabulary is in no box.
        """
        flat = values.detach().view(-1)
        by_name = {rows.name: rows.boxes(flat, start, shape[1:]) for rows in self.mappings(name, shape)}
        return {name: boxes for name, boxes in by_name.items() if boxes}

    def mappings(self, name: str, shape: tuple[int, ...]) -> list[RowMapping]:
        """Return the Hugging Face tensors to which the rows of a parameter of that name and shape belong."""
        if name.startswith(OF_CRITIC):
            mappings = self.mappings(name.removeprefix(OF_CRITIC), shape)
            return [replace(mapping, name=OF_CRITIC + mapping.name) for mapping in mappings]
        if name in WHOLE:
            return [self._whole(WHOLE[name], shape)]
        if name in VOCABULARY:
            # The last ranks may have nothing but padding.
            offset = (min(self.rank * shape[0], self.vocabulary), 0)
            stored = EMBEDDING if self.tied else VOCABULARY[name]
            return [RowMapping(stored, (range(self.tokens),), offset, (self.vocabulary, *shape[1:]), cut_along=0)]
        layer, inner = _layer_of(name)
        prefix = f"model.layers.{layer}."
        if inner in NORMS:
            return [self._whole(prefix + NORMS[inner], shape)]
        if inner in COLUMNS:
            return [self._columns(prefix + COLUMNS[inner], shape)]
        if (match := ADAPTER.fullmatch(inner)) is not None:
            block, linear, target, part = match.groups()
            stored = f"{prefix}{BLOCKS[block]}.{target}.{part}.weight"
            return [self._adapter(stored, shape, part, by_inputs=f"{block}.{linear}.weight" in COLUMNS)]
        if inner == "mlp.linear_fc1.weight":
            half = shape[0] // 2
            parts = {"gate_proj": range(half), "up_proj": range(half, 2 * half)}
            return [self._rows(f"{prefix}mlp.{part}.weight", (rows,), shape[1:]) for part, rows in parts.items()]
        if inner.startswith("self_attention.linear_qkv."):
            return self._attention(prefix, inner.rpartition(".")[2], shape[1:])
        raise RuntimeError(f"parameter {name} has no place in a Hugging Face folder; this is a bug")

    def _attention(self, prefix: str, kind: str, row: tuple[int, ...]) -> list[RowMapping]:
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
            self._rows(
                f"{prefix}self_attn.{part}.{kind}", tuple(range(start + low, start + high) for start in starts), row
            )
            for part, (low, high) in parts.items()
        ]

    def _adapter(self, name: str, shape: tuple[int, ...], matrix: str, *, by_inputs: bool) -> RowMapping:
        """Return the mapping of A or B of a layer whose inputs, or else its outputs, the ranks divide."""
        if by_inputs and matrix == A:
            return self._columns(name, shape)
        return self._whole(name, shape) if by_inputs or matrix == A else self._rows(name, (range(shape[0]),), shape[1:])

    def _columns(self, name: str, shape: tuple[int, ...]) -> RowMapping:
        """Return the mapping of a matrix of which each rank has equally many columns."""
        rows, columns = shape
        offset, whole_shape = (0, self.rank * columns), (rows, self.ranks * columns)
        return RowMapping(name, (range(rows),), offset, whole_shape, cut_along=1)

    def _rows(self, name: str, ranges: tuple[range, ...], row: tuple[int, ...]) -> RowMapping:
        """Return the mapping of a tensor of which each rank has equally many rows."""
        rows = sum(map(len, ranges))
        offset, shape = (self.rank * rows, *(0 for _ in row)), (self.ranks * rows, *row)
        return RowMapping(name, ranges, offset, shape, cut_along=0)

    def _whole(self, name: str, shape: tuple[int, ...]) -> RowMapping:
        return RowMapping(name, (range(shape[0]),), (0,) * len(shape), tuple(shape), cut_along=None)


def head_size(hf: Any) -> int:
    """Return the width of an attention head of a transformers config."""
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def _layer_of(name: str) -> tuple[str, str]:
    match = LAYER.fullmatch(name)
    if match is None:
        raise RuntimeError(f"parameter {name} has no place in a Hugging Face folder; this is a bug")
    return match[1], match[2]


def global_parameters(model: Any) -> Mapping[str, Any]:
    """Return the parameters of one stage by name, layers counted over the whole model."""
    layers = [layer.layer_number - 1 for layer in model.decoder.layers]

    def global_name(match: re.Match[str]) -> str:
        return f"decoder.layers.{layers[int(match[1])]}.{match[2]}"

    return {LAYER.sub(global_name, name): parameter for name, parameter in model.named_parameters()}
