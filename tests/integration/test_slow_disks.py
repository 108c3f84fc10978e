"""Two ranks of which one has a disk that is slower than `deadlines.collective`: they load a model and a checkpoint all the same."""

import pytest

from tests.actor_samples import make_model, make_spec
from tests.integration.fsdp_harness import run_ranks, scenario

COLLECTIVE = 5.0
LATER = 7.0
"""Seconds by which rank 1 opens the first file later."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the ranks saw, by backend."""
    folder = tmp_path_factory.mktemp("ranks")
    model = make_model(folder / "model")
    scenarios = []
    for backend in ("fsdp1", "fsdp2", "megatron"):
        saved = str(folder / backend)
        spec = make_spec(model, actor__backend=backend, runtime__deadlines={"collective": COLLECTIVE})
        verbs = [["save", saved, 1], ["load", saved]]
        scenarios.append(scenario(backend, spec, verbs, world_size=2) | {"slow_disk": (1, LATER)})
    return run_ranks(folder, 2, scenarios)


@pytest.mark.parametrize("backend", ["fsdp1", "fsdp2", "megatron"])
def test_ranks_wait_for_the_one_with_the_slow_disk(seen, backend):
    assert all("error" not in rank[backend] for rank in seen)
