"""Has `EngineMemory` release and restore parts of an engine, and prints SGLang's names of what is free after each step.

A process of its own, because importing SGLang warns and changes the process.
"""

import asyncio
import json
from types import SimpleNamespace

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


async def main() -> None:
    scheduler, generation = Scheduler(), Generation()
    memory, seen = EngineMemory(scheduler, Loader(), generation, frees=True), [sorted(GPU_MEMORY_ALL_TYPES)]
    for step, parts in (
        (memory.release, ["kv_cache", "weights"]),
        (memory.restore, ["weights"]),
        (memory.restore, ["kv_cache", "weights"]),
    ):
        await step(parts)
        seen.append([sorted(scheduler.freed), generation.running])
    print(json.dumps(seen))


if __name__ == "__main__":
    asyncio.run(main())
