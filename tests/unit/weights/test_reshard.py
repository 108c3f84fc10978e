"""The plan of a resharding: every element of a destination from one source that has it, whoever cut what how.

The truth is counted element by element. `execute` is held with what ranks of one process would move.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.weights.reshard import Held, TensorSlice, Transfer, execute, plan_reshard

SIZES = (1, 2, 3, 4)


def split(size, parts):
    """Return `parts` intervals of `size`, the first ones larger, some perhaps empty."""
    edges = [0]
    for part in range(parts):
        edges.append(edges[-1] + size // parts + (part < size % parts))
    return list(itertools.pairwise(edges))


def cut(tensors, *, tensor, pipeline, data=1, first=0):
    """Return the slices of a model of layers over ranks: layers over stages, the larger dimension over tensor ranks, copies over data ranks."""
    slices = []
    for index, (name, shape) in enumerate(tensors.items()):
        stage = index * pipeline // len(tensors)
        along = int(np.argmax(shape))
        for copy, (place, interval) in itertools.product(range(data), enumerate(split(shape[along], tensor))):
            ranges = tuple(interval if dim == along else (0, size) for dim, size in enumerate(shape))
            slices.append(TensorSlice(first + (stage * data + copy) * tensor + place, name, shape, ranges))
    return slices


def count(slices):
    """Return, by (rank, name), how often each element is in a slice."""
    counts = {}
    for one in slices:
        grid = counts.setdefault((one[0], one[1]), np.zeros(one[2], int))
        grid[tuple(slice(*pair) for pair in one[3])] += 1
    return counts


def check(plan, sources, destinations):
    """Hold `plan` against counting: every wanted element comes once, from who has it."""
    shapes = {one.name: one.shape for one in sources}
    wanted = count((one.rank, one.name, one.shape, one.ranges) for one in destinations)
    given_to = count((one.destination, one.name, shapes[one.name], one.ranges) for one in plan)
    for key, grid in wanted.items():
        assert (given_to.get(key, np.zeros_like(grid)) == grid).all(), key
    held = count((one.rank, one.name, one.shape, one.ranges) for one in sources)
    for one in plan:
        assert held[one.source, one.name][tuple(slice(*pair) for pair in one.ranges)].all()


def test_the_example_of_the_specification():
    sources = [TensorSlice(rank, "w", (12,), (pair,)) for rank, pair in enumerate(split(12, 3))]
    destinations = [TensorSlice(rank, "w", (12,), (pair,)) for rank, pair in enumerate(split(12, 2))]
    assert plan_reshard(sources, destinations) == (
        Transfer(0, 0, "w", ((0, 4),)),
        Transfer(1, 0, "w", ((4, 6),)),
        Transfer(1, 1, "w", ((6, 8),)),
        Transfer(2, 1, "w", ((8, 12),)),
    )


@pytest.mark.parametrize("sender", itertools.product(SIZES, SIZES), ids=lambda pair: "tp{} pp{}".format(*pair))
@pytest.mark.parametrize("receiver", itertools.product(SIZES, SIZES), ids=lambda pair: "tp{} pp{}".format(*pair))
def test_any_tensor_and_pipeline_sizes_on_either_side_divisible_or_not(sender, receiver):
    tensors = {
        f"layer{index}.{part}": (7, 5) if part == "up" else (4, 10) for index in range(5) for part in ("up", "down")
    }
    sources = cut(tensors, tensor=sender[0], pipeline=sender[1], data=2)
    destinations = cut(tensors, tensor=receiver[0], pipeline=receiver[1])
    check(plan_reshard(sources, destinations), sources, destinations)


@st.composite
def boxes(draw, shape, rank):
    ranges = []
    for size in shape:
        start = draw(st.integers(0, size))
        ranges.append((start, draw(st.integers(start, size))))
    return TensorSlice(rank, "w", shape, tuple(ranges))


@st.composite
def worlds(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    sources = [draw(boxes(shape, draw(st.integers(0, 3)))) for _ in range(draw(st.integers(0, 4)))]
    destinations = [draw(boxes(shape, rank)) for rank in range(draw(st.integers(1, 3)))]
    return shape, sources, destinations, draw(st.booleans())


@given(world=worlds())
def test_slices_that_overlap_in_any_way_give_each_element_once_or_the_missing_one_is_named(world):
    shape, sources, destinations, near = world
    held, wanted = (
        count((0, "w", shape, one.ranges) for one in side).get((0, "w"), np.zeros(shape, int))
        for side in (sources, destinations)
    )
    nodes = [0, 1, 0, 1] if near else None
    if ((wanted > 0) & (held == 0)).any():
        with pytest.raises(ValueError, match="'w' must be held by a source at"):
            plan_reshard(sources, destinations, nodes=nodes)
    else:
        plan = plan_reshard(sources, destinations, nodes=nodes)
        check(plan, sources, destinations)
        assert plan == plan_reshard(reversed(sources), reversed(destinations), nodes=nodes)


def whole(rank, name="w", shape=(4, 6)):
    return TensorSlice(rank, name, shape, tuple((0, size) for size in shape))


def test_of_several_sources_the_same_node_comes_first_then_who_gives_least_then_the_lowest():
    names = [f"t{index}" for index in range(6)]
    sources = [whole(rank, name) for name in names for rank in (2, 1, 0)]
    destinations = [whole(5, name) for name in names]
    givers = [one.source for one in plan_reshard(sources, destinations)]
    assert givers == [0, 1, 2, 0, 1, 2]
    nodes = {0: "a", 1: "b", 2: "b", 5: "b"}
    assert Counter(one.source for one in plan_reshard(sources, destinations, nodes=nodes)) == {1: 3, 2: 3}


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ([TensorSlice(0, "w", (4, 6), ((0, 3), (0, 6)))], r"'w' must be held by a source at \[3, 4\) x \[0, 6\)"),
        (
            [TensorSlice(0, "w", (4, 6), ((0, 4), pair)) for pair in ((0, 1), (3, 5))],
            r"'w' must be held by a source at \[0, 4\) x \[1, 3\), got none",
        ),
        ([whole(0, "v")], r"'w' must be held by a source at \[0, 4\) x \[0, 6\)"),
        ([whole(0, shape=(6, 4))], r"'w' must have one shape, got \[6, 4\] and \[4, 6\] for \[0, 4\) x \[0, 6\)"),
        ([TensorSlice(0, "w", (4, 6), ((0, 5), (0, 6)))], r"'w' must lie in \[4, 6\], got \[0, 5\) x \[0, 6\)"),
        ([TensorSlice(0, "w", (4, 6), ((0, 4),))], r"'w' must lie in \[4, 6\], got \[0, 4\)"),
    ],
    ids=["gap", "gap-between", "unknown", "shape", "outside", "dimensions"],
)
def test_what_cannot_be_planned_is_named_with_its_interval(sources, words):
    with pytest.raises(ValueError, match=words):
        plan_reshard(sources, [whole(0)])


def test_a_rank_moves_its_own_parts_in_the_type_of_the_wire_without_a_message():
    tensor = torch.arange(24.0).reshape(4, 6)
    room = torch.zeros(4, 6, dtype=torch.bfloat16)
    plan = plan_reshard(
        [TensorSlice(0, "w", (4, 6), ((0, 2), (0, 6))), TensorSlice(0, "w", (4, 6), ((2, 4), (0, 6)))], [whole(0)]
    )
    held = {"w": [Held(((0, 2), (0, 6)), tensor[:2]), Held(((2, 4), (0, 6)), tensor[2:])]}
    places = {"w": Held(((0, 4), (0, 6)), room)}
    execute(plan, rank=0, held=held, room=places, dtypes={"w": torch.bfloat16}).wait()
    assert torch.equal(room, tensor.bfloat16())
