"""A trainer's weights and moments away to host memory and back, beside copies of as many bytes. Prints JSON.

`ours` is `occupy([])` and `occupy([weights, optimizer])` of a model of 40 million parameters with AdamW: every storage is copied, emptied,
allocated again and filled. `memcpy` copies the same number of bytes between two buffers that exist, there and back, in pieces of the same
sizes: what the memory of this machine (on a GPU: its link, from page-locked memory) can do. Runs are interleaved, one thread, medians.
`left_bytes` is what the storages hold while all is away.
"""

import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from train_step import make_folder

from rl_core.actors.fsdp.manager import FSDPModelManager
from rl_core.api.job import RLJobSpec
from rl_core.weights.offload import distinct_storages

REPETITIONS = 7


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        model = make_folder(512, 12, 4096, 1536, Path(folder))
        spec = {"model": {"path": str(model)}, "data": {"train": "unused"}, "actor": {"gpus": int(cuda)}}
        manager = FSDPModelManager(RLJobSpec.model_validate(spec), 1, 0)
        manager.setup_model_and_optimizer()
    tensors = distinct_storages([*manager._weight_tensors(), *manager._moment_tensors()])
    sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
    here = [torch.zeros(size, dtype=torch.uint8, device=manager.compute_device) for size in sizes]
    there = [torch.zeros(size, dtype=torch.uint8, pin_memory=cuda) for size in sizes]

    def copied(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        if cuda:
            torch.cuda.synchronize()

    taken: dict[str, list[float]] = {"offload": [], "onload": [], "memcpy_away": [], "memcpy_back": []}
    left = 0
    for repetition in range(REPETITIONS + 1):
        found = {"offload": seconds(lambda: manager.residency.occupy([]))}
        left = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        found["onload"] = seconds(lambda: manager.residency.occupy(["weights", "optimizer"]))
        found["memcpy_away"] = seconds(lambda: copied(here, there))
        found["memcpy_back"] = seconds(lambda: copied(there, here))
        for name, value in found.items() if repetition else ():  # the first one pays for the pages
            taken[name].append(value)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    ours, memcpy = medians["offload"] + medians["onload"], medians["memcpy_away"] + medians["memcpy_back"]
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "device": str(manager.compute_device),
                "bytes": sum(sizes),
                "storages": len(sizes),
                "left_bytes": left,
                "seconds": {name: round(value, 4) for name, value in medians.items()},
                "ours_gb_per_second": round(2e-9 * sum(sizes) / ours, 3),
                "memcpy_gb_per_second": round(2e-9 * sum(sizes) / memcpy, 3),
                "ours_over_memcpy": round(memcpy / ours, 3),
                "repetitions": REPETITIONS,
                "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "load": os.getloadavg()[0],
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
