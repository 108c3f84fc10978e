"""How long the actor's rank 0 takes to publish a version that nobody receives, by number of ranks. Prints JSON.

    OMP_NUM_THREADS=1 python benchmarks/publish_ranks.py [--ranks 1 2 4] [--runs 15]

Ranks are processes over gloo on this machine, the model has 0.8 million parameters (3.2 MB, 50 tensors). `publish_ms` is the call
of `sync_model_to_rollout` on rank 0: gathering the shards and the copy to host memory. `all_gather_ms` is the physical limit
of the gathering: one `all_gather` of a flat buffer of the same bytes. Medians; `ratio` is to one rank.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parent))


def serve(plan: dict, rank: int, ranks: int) -> None:
    """Be one rank; rank 0 prints its times."""
    import torch
    import torch.distributed as dist

    from rl_core.actors.fsdp.actor import FSDPActor
    from rl_core.weights.publisher import WeightPublisher
    from rl_core.workers.context import WorkerContext, stand_alone_identity

    torch.set_num_threads(1)
    context = WorkerContext(replace(stand_alone_identity(), rank=rank, world_size=ranks))
    actor = FSDPActor.create_in_context(context, plan["spec"])
    actor.init_worker()
    if rank == 0:
        actor.publisher = WeightPublisher(actor.cfg, 0)
    nbytes = sum(parameter.numel() * 4 for parameter in actor.manager.model.parameters())
    part, parts = (
        torch.empty(-(-nbytes // ranks), dtype=torch.uint8),
        [torch.empty(-(-nbytes // ranks), dtype=torch.uint8) for _ in range(ranks)],
    )
    publish, gather = [], []
    for version in range(1, plan["runs"] + 4):
        actor.ranks.barrier()
        began = time.perf_counter()
        actor.sync_model_to_rollout(version, [], 0)
        publish.append(time.perf_counter() - began)
        actor.ranks.barrier()
        began = time.perf_counter()
        if ranks > 1:
            dist.all_gather(parts, part)
        gather.append(time.perf_counter() - began)
    actor.ranks.barrier()
    if rank == 0:
        figures = {"publish_ms": publish, "all_gather_ms": gather}
        print(
            json.dumps({"bytes": nbytes} | {k: 1e3 * statistics.median(v[3:]) for k, v in figures.items()}), flush=True
        )
    os._exit(0)  # the publisher's threads and gloo's have nothing to end in order


def measure(plan: dict, ranks: int) -> dict:
    """Return the figures of rank 0 of `ranks` processes."""
    from rl_core.launch.ports import free_ports

    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports().master)}
    command = [sys.executable, __file__, "--serve", json.dumps(plan), "--ranks"]
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    return json.loads(outputs[0].splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--serve")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(json.loads(arguments.serve), *arguments.ranks)
        return
    from _letters import SIZES, job_document, make_task

    with tempfile.TemporaryDirectory() as folder:
        size = SIZES["million"]
        make_task(Path(folder), 0, size)
        spec = job_document(Path(folder), seed=0, steps=1, rollouts=1, size=size)["spec"]
        plan = {"spec": spec, "runs": arguments.runs}
        result = {f"{ranks} ranks": measure(plan, ranks) for ranks in arguments.ranks}
    first = next(iter(result.values()))["publish_ms"]
    for figures in result.values():
        figures["ratio"] = figures["publish_ms"] / first
    print(json.dumps({name: {k: round(v, 2) for k, v in one.items()} for name, one in result.items()}, indent=2))


if __name__ == "__main__":
    main()
