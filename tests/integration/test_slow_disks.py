"""Two ranks of which one has a disk that is slower than `deadlines.collective`: they load a model and a checkpoint all the same."""

import pytest

from tests.actor_samples import make_model, make_spec
from tests.integration.fsdp_harness import run_ranks, scenario

COLLECTIVE = 8.0
LATER = 10.0
"""Seconds by which rank 1 opens the first file of a folder later."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the ranks saw, by backend."""
    folder = tmp_path_factory.mktemp("ranks")
    model = make_model(folder / "model")
    scenarios = []
    for backend in ("fsdp1", "fsdp2", "megatron"):
        # What a process does once, such as imports, is done before the disk is slow: a busy machine delays one rank by more than COLLECTIVE.
        saved = str(folder / backend)
        patient, strict = (
            make_spec(model, actor__backend=backend, runtime__deadlines={"collective": seconds})
            for seconds in (120, COLLECTIVE)
        )
        scenarios += [
            scenario(f"{backend} before", patient, [["save", saved, 1]], world_size=2),
            scenario(backend, strict, [["load", saved]], world_size=2) | {"slow_disk": (1, LATER)},
        ]
    return run_ranks(folder, 2, scenarios)


@pytest.mark.parametrize("backend", ["fsdp1", "fsdp2", "megatron"])
def test_ranks_wait_for_the_one_with_the_slow_disk(seen, backend):
    assert [rank[backend].get("error") for rank in seen] == [None, None]
