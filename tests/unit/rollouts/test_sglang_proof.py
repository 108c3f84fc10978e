"""The proof of what an engine holds: pieces recorded while a model loads, and their checksums beside those of the given tensors.

The models load as SGLang's do: fused, padded, split over ranks by row and by column, replicated. Truth is the manifest's checksum.
"""

import pytest
import torch
from torch import nn

from rl_core.api.errors import InfrastructureError
from rl_core.rollouts.sglang.child import layout as layouts
from rl_core.rollouts.sglang.child.layout import LoadedLayout, piece_checksum
from rl_core.rollouts.sglang.proof import GivenTensors


class Model(nn.Module):
    """One rank of two. Queries are split by row, keys are replicated, the output matrix is split by column, the vocabulary is padded."""

    def __init__(self, rank, dtype):
        super().__init__()
        self.rank = rank
        self.qk = nn.Parameter(torch.zeros(3 + 2, 7, dtype=dtype), requires_grad=False)
        self.out = nn.Parameter(torch.zeros(7, 3, dtype=dtype), requires_grad=False)
        self.vocabulary = nn.Parameter(torch.zeros(8, 7, dtype=dtype), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(7, dtype=dtype), requires_grad=False)

    def load_weights(self, tensors):
        for name, tensor in tensors:
            if name == "q":
                self.qk.data[:3].copy_(tensor.narrow(0, 3 * self.rank, 3))
            elif name == "k":
                self.qk.data.narrow(0, 3, 2).copy_(tensor)
            elif name == "out":
                self.out.data.copy_(tensor.narrow(1, 3 * self.rank, 3))
            elif name == "vocabulary":
                self.vocabulary[: len(tensor)].data.copy_(tensor)
                self.vocabulary[len(tensor) :].data.fill_(0)
            else:
                self.norm.data.copy_(tensor)


def tensors(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (6, 7), "k": (2, 7), "out": (7, 6), "vocabulary": (5, 7), "norm": (7,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


class Engine:
    """Two ranks and what they recorded."""

    def __init__(self, dtype, sum_copies=False):
        self.dtype, self.sum_copies = dtype, sum_copies
        self.ranks = [(Model(rank, dtype), LoadedLayout()) for rank in range(2)]

    def load(self, given):
        for model, layout in self.ranks:
            layout.record(model, given.items(), sum_copies=self.sum_copies)

    def prove(self, given, turn=0, turns=1):
        expected = GivenTensors()
        for name, tensor in given.items():
            expected.add(name, tensor)
        held = [layout.checksums(model, turn=turn, turns=turns) for model, layout in self.ranks]
        return expected.prove(held, whole=turns == 1)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def engine(request):
    made = Engine(request.param)
    made.load(tensors(0, request.param))
    return made


@pytest.mark.parametrize("sum_copies", [False, True])
def test_ranks_that_hold_what_they_were_given_pass_at_each_update(engine, sum_copies):
    engine.prove(tensors(0, engine.dtype))
    engine.sum_copies = sum_copies
    for seed in range(1, 20):
        engine.load(tensors(seed, engine.dtype))
        engine.prove(tensors(seed, engine.dtype))


@pytest.mark.parametrize("parameter", ["qk", "out", "vocabulary", "norm"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_smallest_difference_of_one_element_on_one_rank_is_found(engine, parameter, rank):
    values = getattr(engine.ranks[rank][0], parameter).data.view(-1)
    values[1] = torch.nextafter(values[1], torch.tensor(9.0, dtype=engine.dtype))
    with pytest.raises(InfrastructureError, match="1 hold something else"):
        engine.prove(tensors(0, engine.dtype))


def test_two_elements_that_changed_places_and_parts_that_were_swapped_are_found(engine):
    weights = engine.ranks[1][0].out.data
    weights[0, 0], weights[0, 1] = weights[0, 1].clone(), weights[0, 0].clone()
    with pytest.raises(InfrastructureError, match=r"\['out'\]"):
        engine.prove(tensors(0, engine.dtype))
    first, second = (model.qk.data for model, _ in engine.ranks)
    first.copy_(second.clone())  # a shard of another rank
    with pytest.raises(InfrastructureError, match=r"\['out', 'q'\]"):
        engine.prove(tensors(0, engine.dtype))


def test_a_tensor_that_was_not_given_or_that_no_rank_took_is_named(engine):
    given = tensors(0, engine.dtype)
    with pytest.raises(InfrastructureError, match=r"1 were not given \['norm'\]"):
        engine.prove({name: tensor for name, tensor in given.items() if name != "norm"})
    assert engine.prove(given | {"more": given["norm"]}) == ["more"], "it is left to the content check"
    assert engine.prove(given) == []


def test_a_tensor_that_a_later_load_writes_elsewhere_is_found(engine):
    def misplaced(self, given):
        for _, tensor in given:
            self.norm.data[1:].copy_(tensor[:-1])

    given = tensors(0, engine.dtype)
    for model, layout in engine.ranks:
        model.load_weights = misplaced.__get__(model)
        layout.record(model, [("norm", given["norm"])])
    with pytest.raises(InfrastructureError, match=r"\['norm'\]"):
        engine.prove(given)


def test_in_turns_each_tensor_is_read_once_a_round(engine):
    changed = tensors(0, engine.dtype)
    engine.ranks[0][0].norm.data[0] += 1
    found = []
    for turn in range(3):
        try:
            engine.prove(changed, turn=turn, turns=3)
        except InfrastructureError as error:
            found.append(str(error))
    assert len(found) == 1 and "['norm']" in found[0]


# --- pieces that are read when they are copied ----------------------------------------------------------------------------


def load_and_sum(dtype, given, after=lambda model: None):
    """Return an engine that was given `given`, whose rank 1 runs `after` as SGLang's own code at the end of an update."""
    engine = Engine(dtype, sum_copies=True)
    for seed in (given, given):  # the second load has no new tensors
        engine.load(seed)
    model, layout = engine.ranks[1]
    with layout.watch():
        after(model)
    return engine


def test_pieces_that_follow_the_order_of_the_tensor_are_not_read_a_second_time(monkeypatch):
    read = []
    engine = load_and_sum(torch.float32, tensors(0, torch.float32))
    monkeypatch.setattr(
        layouts, "piece_checksum", lambda values, source: read.append(source) or piece_checksum(values, source)
    )
    engine.prove(tensors(0, torch.float32))
    assert read == [((0), (7, 3), (6, 1)), ((3), (7, 3), (6, 1))], "the columns of one matrix"
    engine.prove(tensors(0, torch.float32))
    assert len(read) > 8, "a checksum that was taken at a copy proves one update"


def overwrite(model):
    model.qk.data[1:4, 2] += 1


def replace(model):
    model.qk.data = model.qk.data.flip(0)


def copy_a_shard_over_another(model):
    model.qk.data[:2].copy_(model.qk.data[3:].clone())


@pytest.mark.parametrize("after", [overwrite, replace, copy_a_shard_over_another])
def test_what_is_written_to_a_piece_after_it_was_read_is_found(after):
    given = tensors(0, torch.float32)
    with pytest.raises(InfrastructureError, match="'q'"):
        load_and_sum(torch.float32, given, after).prove(given)


def test_a_tensor_that_is_loaded_over_another_one_is_found():
    def overlapping(self, given):
        Model.load_weights(self, given)
        self.qk.data[2:4].copy_(dict(given)["k"])

    engine, given = Engine(torch.float32, sum_copies=True), tensors(0, torch.float32)
    model, recorded = engine.ranks[0]
    engine.load(given)
    model.load_weights = overlapping.__get__(model)
    recorded.record(model, given.items(), sum_copies=True)
    with pytest.raises(InfrastructureError, match=r"2 hold something else \['k', 'q'\]"):
        engine.prove(given)


def test_a_load_whose_copies_are_not_read_leaves_no_older_checksum():
    engine = load_and_sum(torch.float32, tensors(0, torch.float32))
    engine.sum_copies = False
    engine.load(tensors(1, torch.float32))
    engine.prove(tensors(1, torch.float32))
