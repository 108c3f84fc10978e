"""Runs scenarios on several actor ranks (processes over gloo) or in this process, and collects what each rank saw."""

import json
import time
from multiprocessing import connection
from pathlib import Path

from rl_core.actors.ranks import ParallelSizes
from rl_core.launch.ports import free_ports
from tests.integration.forks import FORKS


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


LONGEST_RUN = 900.0
LONGEST_END = 120.0
"""Seconds by which ranks end once one has died."""


def _join(processes: list) -> None:
    """Wait for the ranks to end, but not for those that wait for a rank which has died."""
    until = time.monotonic() + LONGEST_RUN
    while running := [process for process in processes if process.is_alive()]:
        connection.wait([process.sentinel for process in running], max(until - time.monotonic(), 0))
        if any(process.exitcode for process in processes):
            until = min(until, time.monotonic() + LONGEST_END)
        if time.monotonic() >= until:
            return


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
        _join(processes)
    finally:
        for process in processes:
            process.kill()
    return [json.loads(out.read_text()) if out.exists() else {} for out in outputs]
