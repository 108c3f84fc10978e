"""What an engine on a shared device gives up for the trainer, by SGLang's names of it. What is freed needs a GPU."""

import importlib.util
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("the package sglang is not installed", allow_module_level=True)

from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

from rl_core.rollouts.sglang.child.memory import EngineMemory


class Scheduler:
    """The part of SGLang that frees memory: it must be told each name once before it is told to restore it."""

    def __init__(self):
        self.freed = set()

    async def flush_cache(self):
        return SimpleNamespace(success=True)

    async def release_memory_occupation(self, request, _):
        assert not self.freed & set(request.tags)
        self.freed |= set(request.tags)

    async def resume_memory_occupation(self, request, _):
        assert self.freed >= set(request.tags)
        self.freed -= set(request.tags)


class Generation:
    """Whether rows may run."""

    running = True

    async def pause(self, mode):
        self.running = False

    async def resume(self):
        self.running = True


class Loader:
    """Weights that nobody changes."""

    updates = 1

    async def checksums_of_ranks(self):
        return [{"w": "1"}]


async def test_the_buffers_of_cuda_graphs_are_away_as_long_as_the_kv_cache_is():
    scheduler, generation = Scheduler(), Generation()
    memory = EngineMemory(scheduler, Loader(), generation, frees=True)
    await memory.release(["kv_cache", "weights"])
    assert scheduler.freed == set(GPU_MEMORY_ALL_TYPES)
    await memory.restore(["weights"])
    assert scheduler.freed == {"kv_cache", "cuda_graph"} and not generation.running
    await memory.restore(["kv_cache", "weights"])
    assert not scheduler.freed and generation.running
