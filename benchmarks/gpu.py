"""What the project does on a GPU, in one command of under ten minutes. Prints JSON, a line per part as it ends, whatever the others come to.

    python benchmarks/gpu.py [--device cuda:0 | cpu] [--small] [--only PART,PART] [--without PART] [--budget PART=SECONDS]
        [--seconds 560] [--output FILE]

Each part is a process of its own with a budget of seconds: one that fails prints its error and its last lines, and the others go on.
`--device cpu --small` runs what a CPU can show through the same code in under two minutes; it is the default without a GPU. Works with
torch 2.11 to 2.14 and Python 3.11 and 3.12. Needs beside torch, numpy, transformers, safetensors, tokenizers, typer, rich, msgpack,
xxhash, aiohttp, psutil, prometheus-client, nvidia-ml-py, pyyaml, jinja2 and numba: pyzmq, pydantic (pydantic-core, annotated-types,
typing-inspection), blake3, crc32c, math-verify (latex2sympy2_extended, antlr4-python3-runtime 4.13.2), and megatron-core for that part.

On a machine without them and without a registry, with the wheels of those for its Python in the folder .whl, which git ignores:

    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/site .whl/*.whl &&
    export PYTHONPATH=/tmp/site:$PWD:$PWD/operator PYTHONUNBUFFERED=1 && python3 benchmarks/gpu.py --output $OUT/gpu.json

SGLang's wheels for that torch (0.5.17 for 2.11, 0.5.23 for 2.14) are too many to go beside those: a call of its own with them in the
folder, their site first in PYTHONPATH, `--only sglang`. `RLJOB_SGLANG_OPTIONS` (JSON) replaces arguments of the engine alone, such as
{"attention_backend": "triton", "sampling_backend": "pytorch"}.

| part | shows |
| --- | --- |
| machine | rates of matrix products, of the memory and of the link; versions |
| group | the process group of the weights (NCCL), with one member |
| attention | packed varlen attention in bf16 beside the CPU path in float32: values, gradients, TFLOP/s |
| generation | the HF engine: greedy tokens beside the CPU's, tokens/s, seconds and bytes of sleep and wake |
| hand_over | a model from process to process on one device, by each way, beside a copy on the device; unused CUDA IPC handles |
| tensors | `Worker.send_tensor` by CUDA IPC, NCCL (two GPUs) and host memory, `broadcast`, beside a copy on the device |
| fsdp2, megatron, fsdp1 | 0.5B Qwen2-shaped random weights, bf16: tokens/s, MFU, peak memory beside its estimate, waits, offload and onload |
| prepared, colocated, beside | `rljob run` of examples/arithmetic: actor and rollout on the device in turns; the rollout on the CPU |
| sglang | SGLang alone and through the worker: tokens/s, seconds of sleep and wake, bytes freed |
| engine_loads | the versions that the processes of an SGLang engine read themselves: shared memory, CUDA IPC, and NCCL between two GPUs |
| adapters | the sync of adapters alone (LoRA, rank 16) over that of a whole version: bytes and seconds; engines `hf` and, on a GPU, `sglang` |
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import _gpu_kernels as kernels
import _gpu_runs as runs
import torch
from _gpu_adapters import adapters
from _gpu_tensors import tensors
from _gpu_trainer import trainer
from _gpu_weights import engine_loads, hand_over
from _gpu_world import World, make_model

PARTS = {
    "machine": (kernels.machine, 60),
    "group": (kernels.group, 40),
    "attention": (kernels.attention, 60),
    "generation": (kernels.generation, 60),
    "hand_over": (hand_over, 60),
    "tensors": (tensors, 120),
    "model": (make_model, 60),
    "fsdp2": (partial(trainer, backend="fsdp2"), 75),
    "megatron": (partial(trainer, backend="megatron"), 75),
    "fsdp1": (partial(trainer, backend="fsdp1"), 75),
    "prepared": (runs.prepared, 90),
    "colocated": (partial(runs.run, colocated=True), 120),
    "beside": (partial(runs.run, colocated=False), 120),
    "sglang": (runs.sglang, 240),
    "engine_loads": (engine_loads, 240),
    "adapters": (adapters, 150),
}
"""Name -> (what it does, its budget of seconds), in order: a later part may need what `model` and `prepared` made."""
LAST_LINES = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="", help="parts, by comma; what they need is run as well")
    parser.add_argument("--without", default="", help="parts, by comma")
    parser.add_argument(
        "--budget", action="append", default=[], metavar="PART=SECONDS", help="of one part, in the place of its own"
    )
    parser.add_argument("--seconds", type=float, default=560.0, help="of all parts together")
    parser.add_argument("--output", type=Path, help="file for all figures")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    small = options.small or options.device == "cpu"
    if options.part:
        world = World(options.device, small, options.folder)
        (options.folder / f"{options.part}.json").write_text(json.dumps(PARTS[options.part][0](world)))
        return
    with tempfile.TemporaryDirectory(prefix="rljob-gpu-") as folder:
        budgets = {name: seconds for name, (_, seconds) in PARTS.items()}
        budgets |= {name: float(seconds) for name, _, seconds in (text.partition("=") for text in options.budget)}
        world = World(options.device, small, Path(folder))
        found = run_parts(chosen(options, small), world, budgets, deadline=time.monotonic() + options.seconds)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1))
    sys.exit(any("error" in part for part in found.values()))


def chosen(options: argparse.Namespace, small: bool) -> list[str]:
    only, without = ([name for name in text.split(",") if name] for text in (options.only, options.without))
    if unknown := {*only, *without} - PARTS.keys():
        sys.exit(f"parts must be of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    if options.device == "cpu" and not only:
        without += ["sglang", "engine_loads"]  # a start on a CPU takes a minute: sglang_engine.py
    names = only or list(PARTS)
    names += ["model"] * any(name in ("fsdp2", "megatron", "fsdp1") for name in only)
    names += ["prepared"] * any(name in ("colocated", "beside") for name in only)
    return [name for name in PARTS if name in names and name not in without]


def run_parts(names: list[str], world: World, budgets: dict[str, float], *, deadline: float) -> dict[str, dict]:
    """Run the parts one after the other, each within its budget and what is left; print what each came to."""
    found = {}
    for name in names:
        began = time.monotonic()
        found[name] = run_part(name, world, min(budgets[name], deadline - began))
        found[name]["part_seconds"] = round(time.monotonic() - began, 1)
        print(json.dumps({name: found[name]}), flush=True)
    return found


def run_part(name: str, world: World, budget: float) -> dict:
    if budget < 1:
        return {"error": "no time was left; raise --seconds or choose parts with --only"}
    command = [sys.executable, __file__, "--part", name, "--device", world.device, "--folder", str(world.folder)]
    log = world.folder / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *["--small"] * world.small], stdout=file, stderr=file, start_new_session=True
        )
        ended = f"{budget:.0f} s were over"
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = f"exit code {process.wait(budget)}"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    result = world.folder / f"{name}.json"
    if result.exists():
        return json.loads(result.read_text())
    return {"error": ended, "last_lines": log.read_text(errors="replace").splitlines()[-LAST_LINES:]}


if __name__ == "__main__":
    main()
