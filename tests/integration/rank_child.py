"""One rank of a process group: `python rank_child.py RANK DATA TENSOR OUT`; what it saw goes to OUT as JSON."""

import json
import os
import resource
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from rl_core.actors.ranks import ParallelSizes, Ranks


def listening() -> list[str]:
    """Return the addresses this process listens on."""
    return sorted({c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN})


def be_late(ranks: Ranks) -> bool:
    """Have rank 0 come late, first where there is time for it and then where there is none; return whether a collective failed."""
    with ranks.collectives_within(0.3):
        with ranks.collectives_within(60):
            time.sleep(2 * (ranks.rank == 0))
            ranks.barrier()
        time.sleep(5 * (ranks.rank == 0))
        try:
            ranks.barrier()
        except RuntimeError:
            return True
    return False


def main() -> None:
    rank, data, tensor, out = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    ranks = Ranks(ParallelSizes(data=data, tensor=tensor), rank=rank, device=torch.device("cpu"), timeout=60)
    seen = {"grouped": dist.is_initialized()}
    seen["sum"] = float(ranks.sum_over_data_ranks(torch.tensor(10.0**rank)))
    seen["rows"] = ranks.gather_over_data_ranks(f"of {rank}")
    seen["all"] = ranks.gather(rank)
    seen["exchanged"] = ranks.exchange_over_data_ranks(torch.arange(data) + 10 * rank, [1] * data).tolist()
    seen["largest"] = ranks.all_reduce_max(rank)
    if ranks.size == 1:
        seen["mesh"] = ranks.mesh.size()
    seen |= {"listening": listening(), "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard}
    ranks.barrier()
    if ranks.size > 1:
        seen["late"] = be_late(ranks)
    out.write_text(json.dumps(seen))
    os._exit(
        0
    )  # as a worker process ends: the interpreter's own end can abort in gloo's threads, when other ranks are gone before


if __name__ == "__main__":
    main()
