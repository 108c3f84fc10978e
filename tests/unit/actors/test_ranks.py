"""How ranks are counted, and which errors of theirs mean that one is gone."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rl_core.actors.ranks import ParallelSizes, Ranks
from rl_core.api.errors import InfrastructureError

SIZES = st.builds(
    ParallelSizes,
    data=st.integers(1, 4),
    tensor=st.integers(1, 3),
    pipeline=st.integers(1, 3),
    context=st.integers(1, 2),
)


@given(SIZES)
def test_every_rank_is_in_one_data_group_and_one_rank_of_each_share_receives(sizes):
    groups = sizes.data_groups()
    assert sorted(rank for group in groups for rank in group) == list(range(sizes.world))
    assert all([sizes.data_rank(rank) for rank in group] == list(range(sizes.data)) for group in groups)
    receiving = [rank for rank in range(sizes.world) if sizes.receives(rank)]
    assert [sizes.data_rank(rank) for rank in receiving] == list(range(sizes.data))


def test_ranks_count_tensor_fastest_and_pipeline_last():
    sizes = ParallelSizes(data=2, tensor=2, pipeline=2)
    assert [sizes.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert sizes.data_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.fixture
def alone():
    return Ranks(ParallelSizes(data=1), rank=0, device=torch.device("cpu"))


@pytest.mark.parametrize(
    "error", [dist.DistBackendError("NCCL timed out"), dist.DistNetworkError("gone"), ConnectionResetError("peer")]
)
def test_an_error_of_the_collectives_is_a_lost_rank(alone, error):
    with pytest.raises(InfrastructureError, match="training failed on actor rank 0 of 1"), alone.guard("training"):
        raise error


@pytest.mark.parametrize("text", ["NCCL is not what the user wrote", "Connection closed by peer", "gloo"])
def test_an_error_is_known_by_where_it_was_raised_not_by_what_it_says(alone, text):
    with pytest.raises(RuntimeError, match=text) as caught, alone.guard("training"):
        raise RuntimeError(text)
    assert not isinstance(caught.value, InfrastructureError)


def test_an_error_of_a_model_inside_a_wrapper_of_torch_is_the_models(alone):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), alone.guard("training"):
        torch.nn.Linear(3, 2)(torch.zeros(1, 4))
