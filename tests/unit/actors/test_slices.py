"""A run of a tensor's elements is cut into boxes that share its memory, and are where the elements belong."""

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.actors.slices import LocalSlice


@given(shape=st.lists(st.integers(1, 5), max_size=3), data=st.data())
def test_the_boxes_of_a_run_are_where_its_elements_belong(shape, data):
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = torch.arange(1.0, size + 1).view(shape)
    run = whole.flatten()[start:stop].clone()
    place = torch.zeros(shape)
    for box in LocalSlice.of_range(run, tuple(shape), start).boxes():
        assert box.shape == tuple(shape) and box.tensor.untyped_storage().data_ptr() == run.untyped_storage().data_ptr()
        assert torch.equal(place[box.box], torch.zeros(box.tensor.shape)), "no element is in two boxes"
        place[box.box] = box.tensor
    expected = torch.zeros(size)
    expected[start:stop] = run
    assert torch.equal(place, expected.view(shape))


def test_a_run_of_a_matrix_is_three_boxes_at_most():
    boxes = LocalSlice.of_range(torch.arange(9.0), (4, 4), 3).boxes()
    assert [(box.offset, tuple(box.tensor.shape)) for box in boxes] == [((0, 3), (1, 1)), ((1, 0), (2, 4))]
    assert len(LocalSlice.of_range(torch.arange(8.0), (4, 4), 3).boxes()) == 3


def test_a_whole_tensor_is_its_own_box():
    part = LocalSlice.of_whole(torch.ones(2, 3))
    assert part.boxes() == [part] and part.box == (slice(0, 2), slice(0, 3))
