"""Runs scenarios on several actor ranks (processes over gloo) or in this process, and collects what each rank saw."""

import json
import multiprocessing
from pathlib import Path

from rl_core.actors.ranks import ParallelSizes
from rl_core.launch.ports import free_ports

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.integration.rank_imports"])


def scenario(name: str, spec: dict, verbs: list, *, world_size: int, groups: int = 4) -> dict:
    """Return a scenario in which data rank r of n has the groups r, r + n, ..."""
    parallel = {"tensor": 1, "pipeline": 1} | spec["actor"].get("parallel", {})
    shares = world_size // (parallel["tensor"] * parallel["pipeline"])
    sizes = ParallelSizes(data=shares, tensor=parallel["tensor"], pipeline=parallel["pipeline"])
    dealt = [list(range(sizes.data_rank(rank), groups, shares)) for rank in range(world_size)]
    return {"name": name, "spec": spec, "verbs": verbs, "groups": dealt}


def run_here(name: str, spec: dict, verbs: list) -> dict:
    """Run a scenario as the only rank, in this process."""
    from tests.integration.fsdp_rank import run_scenario

    return run_scenario(scenario(name, spec, verbs, world_size=1), 0, 1)


def run_ranks(folder: Path, world_size: int, scenarios: list[dict]) -> list[dict]:
    """Run the scenarios on `world_size` processes; return what each saw by scenario, {} for one that wrote nothing."""
    from tests.integration.fsdp_rank import run_rank

    port = str(free_ports().master)
    outputs = [folder / f"rank-{rank}.out.json" for rank in range(world_size)]
    processes = [
        FORKS.Process(target=run_rank, args=(rank, world_size, port, out, scenarios))
        for rank, out in enumerate(outputs)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(600)
    finally:
        for process in processes:
            process.kill()
    return [json.loads(out.read_text()) if out.exists() else {} for out in outputs]
