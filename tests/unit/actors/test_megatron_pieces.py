"""Megatron's parameters as boxes of Hugging Face tensors: whatever run of its elements a rank has, each element has one place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.actors.megatron.convert import EMBEDDING, TensorParallelLayout

HEADS, GROUPS, HEAD, HIDDEN, INNER, VOCABULARY, RANK = 4, 2, 3, 5, 6, 7, 2
LAYER = "decoder.layers.1."


def cut(rank, ranks):
    return TensorParallelLayout(
        heads=HEADS, groups=GROUPS, head=HEAD, vocabulary=VOCABULARY, tied=True, rank=rank, ranks=ranks
    )  # fmt: skip


def shapes(ranks):
    """Return the parameters of a tensor rank."""
    fused = (HEADS + 2 * GROUPS) * HEAD // ranks
    return {
        "embedding.word_embeddings.weight": (-(-VOCABULARY // ranks), HIDDEN),
        "decoder.final_layernorm.weight": (HIDDEN,),
        f"{LAYER}self_attention.linear_qkv.weight": (fused, HIDDEN),
        f"{LAYER}self_attention.linear_qkv.bias": (fused,),
        f"{LAYER}self_attention.linear_proj.weight": (HIDDEN, HEADS * HEAD // ranks),
        f"{LAYER}mlp.linear_fc1.weight": (2 * INNER // ranks, HIDDEN),
        f"{LAYER}mlp.linear_fc1.adapters.up_proj.lora_A.weight": (RANK, HIDDEN),
        f"{LAYER}mlp.linear_fc1.adapters.up_proj.lora_B.weight": (INNER // ranks, RANK),
        f"{LAYER}self_attention.linear_qkv.adapters.q_proj.lora_B.weight": (HEADS * HEAD // ranks, RANK),
        f"{LAYER}self_attention.linear_proj.adapters.o_proj.lora_A.weight": (RANK, HEADS * HEAD // ranks),
        f"{LAYER}self_attention.linear_proj.adapters.o_proj.lora_B.weight": (HIDDEN, RANK),
    }


def gathered(pieces):
    """Return the whole tensors of the pieces (name, box) of all ranks, NaN where none of them is."""
    whole = {}
    for name, part in pieces:
        tensor = whole.setdefault(name, torch.full(part.shape, torch.nan))
        assert part.replicated or tensor[part.box].isnan().all(), "each element once"
        tensor[part.box] = part.tensor
    return whole


def pieces_of(layout, name, shape, values, start=0):
    boxes = layout.boxes(name, shape, values, start)
    return [(stored, box) for stored, parts in boxes.items() for box in parts]


@settings(max_examples=40, deadline=None)
@given(ranks=st.sampled_from([1, 2]), data=st.data())
def test_runs_of_a_parameter_are_boxes_that_make_up_the_same_tensors(ranks, data):
    whole, in_runs = [], []
    for rank in range(ranks):
        for name, shape in shapes(ranks).items():
            values = torch.randn(shape)
            whole += pieces_of(cut(rank, ranks), name, shape, values)
            edges = sorted(data.draw(st.lists(st.integers(0, values.numel()), max_size=3)))
            for start, stop in zip([0, *edges], [*edges, values.numel()], strict=True):
                in_runs += pieces_of(cut(rank, ranks), name, shape, values.flatten()[start:stop], start)
    expected, found = gathered(whole), gathered(in_runs)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not any(tensor.isnan().any() for tensor in expected.values())
    assert expected[EMBEDDING].shape == (VOCABULARY, HIDDEN)


def test_query_key_and_value_of_each_group_are_told_apart():
    layer, shape = cut(0, 1), ((HEADS + 2 * GROUPS) * HEAD,)
    values = torch.arange(float(shape[0]))
    found = gathered(pieces_of(layer, f"{LAYER}self_attention.linear_qkv.bias", shape, values))
    prefix = "model.layers.1.self_attn."
    assert found[f"{prefix}q_proj.bias"].tolist() == [*range(6), *range(12, 18)]
    assert found[f"{prefix}k_proj.bias"].tolist() == [*range(6, 9), *range(18, 21)]
    assert found[f"{prefix}v_proj.bias"].tolist() == [*range(9, 12), *range(21, 24)]


@pytest.mark.parametrize("start", [0, 4, 13])
def test_a_filled_piece_is_in_the_parameter(start):
    shape = ((HEADS + 2 * GROUPS) * HEAD, HIDDEN)
    flat = torch.zeros(shape).flatten()[start:]
    for _, piece in pieces_of(cut(0, 1), f"{LAYER}self_attention.linear_qkv.weight", shape, flat, start):
        piece.tensor.fill_(1.0)
    assert flat.eq(1).all()
