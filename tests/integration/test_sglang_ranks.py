"""An SGLang engine of two tensor-parallel processes: weights and adapters reach both, and what each of them holds is proven."""

import pytest

from rl_core.rollouts.engine import PROVEN
from rl_core.rollouts.sglang import SGLangWorker, setup
from tests.integration.rollout_world import flip_in_memory, random_state
from tests.integration.test_adapter_sync import SGLANG, LoraWorld

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def world():
    options = setup.options
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        patch.setenv(
            "SGLANG_NCCL_SO_PATH", "none"
        )  # else SGLang makes a communicator of GPUs as soon as the library is there
        patch.setattr(setup, "options", lambda *arguments: options(*arguments) | {"tp_size": 2})
        made = LoraWorld(SGLangWorker, **SGLANG)
        made.start()
    yield made
    made.close()


def test_both_processes_serve_base_and_adapter_and_prove_them(world):
    assert len(world.engine.engine.pids) == 4, "the child, two schedulers and the detokenizer"
    for seed in range(3):
        report = world.sync(seed, base=random_state(seed) if seed != 1 else None)
        assert bool(report.patched) == (seed == 1)
        assert world.worker.status()["weights_proof"] == PROVEN and world.difference() < 1e-4


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bit_that_changes_in_one_process_is_found(world, monkeypatch, rank):
    target, state = world.engine.weight_target, random_state(50 + rank)
    call = target._call
    half = state[QUERY][16 * rank : 16 * (rank + 1)].contiguous().numpy().tobytes()

    def disturbed(method, **arguments):
        if method == "end_weights":
            assert flip_in_memory(world.engine.engine.pids[1 + rank], half) > 0
        return call(method, **arguments)

    with monkeypatch.context() as patch, pytest.raises(Exception, match=QUERY):
        patch.setattr(target, "_call", disturbed)
        target.load(iter(state.items()), 99)
    world.sync(60 + rank, base=random_state(60 + rank))
    assert world.difference() < 1e-4
