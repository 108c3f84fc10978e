"""Parts of gpu.py: `rljob run` of examples/arithmetic on the one device, and SGLang alone, through the worker, asleep and awake."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from _gpu_world import World, fill, sizes
from _rows import tokens_made

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "arithmetic"


def prepared(world: World) -> dict:
    """Make the example's model and data; of random weights where a CPU is to be quick."""
    folder = world.folder / "arithmetic"
    folder.mkdir()
    script = [ROOT / "tests" / "e2e" / "make_tiny.py", folder]
    if not world.small:
        script = [EXAMPLE / "prepare.py", "--quick", "--output", folder]
    subprocess.run([sys.executable, *map(str, script)], check=True, stdout=sys.stderr)
    return {}


def run(world: World, *, colocated: bool) -> dict:
    """Run the job with the actor on the device: the rollout beside it on the CPU, or on the same device in turns."""
    folder = world.folder / "arithmetic"
    output = folder / f"out-{colocated}"
    gpus = int(world.cuda)
    settings = {
        "algorithm.steps": 2 if world.small else 20,
        "actor.gpus": gpus,
        "rollout.gpus": gpus * colocated,
        "rollout.replicas": 1,
        "checkpoint.everySteps": 0,
        "checkpoint.everySeconds": 0,
    }
    if colocated:
        settings["placement.mode"] = "colocated"
    options = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    job = folder / "job.yaml"
    job.write_text((EXAMPLE / "job.yaml").read_text())
    command = [sys.executable, "-m", "rl_core.cli.main", "run", str(job), "--output", str(output), "--no-progress"]
    began = time.monotonic()
    done = subprocess.run([*command, *options], cwd=folder, stdout=sys.stderr, stderr=sys.stderr)
    seconds = time.monotonic() - began
    if done.returncode:
        for log in sorted(output.glob("logs/*")):
            print(f"== {log.name}", *log.read_text(errors="replace").splitlines()[-15:], sep="\n", file=sys.stderr)
        raise RuntimeError(f"rljob run ended with exit code {done.returncode}")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {"rollout_on": world.device if colocated else "cpu", "seconds": round(seconds, 1), **_of_run(lines)}


def _of_run(lines: list[dict]) -> dict:
    names = (
        "time/step",
        "time/rollout",
        "time/train",
        "time/sync",
        "offload/bytes",
        "offload/seconds",
        "onload/seconds",
    )
    held = {name: [line[name] for line in lines if name in line] for name in names}
    accuracy = {line["step"]: round(line["val/accuracy"], 3) for line in lines if "val/accuracy" in line}
    medians = {name: round(statistics.median(values), 4) for name, values in held.items() if values}
    return {"steps": max(line.get("step", 0) for line in lines), "medians": medians, "accuracy": accuracy}


# --- SGLang -----------------------------------------------------------------------------------------------------------


def sglang(world: World) -> dict:
    """Return tokens/s of the engine alone and through the worker, and the memory that the device has after each falls asleep."""
    found: dict = {}
    for name in ("alone", "through"):
        try:
            found[name] = _in_process(name, world)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
    if all("tokens_per_second" in one for one in found.values()):
        found["through_over_alone"] = round(
            found["through"]["tokens_per_second"] / found["alone"]["tokens_per_second"], 3
        )
    return found


def _in_process(name: str, world: World) -> dict:
    """In a process of its own: sglang kills the whole tree of the process that made an engine when one of its processes dies."""
    from rl_core.rollouts.sglang import setup

    command = [sys.executable, __file__, name, world.device, str(int(world.small)), str(world.folder)]
    environ = setup.variables(world.folder, world.device) if name == "alone" else dict(os.environ)
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    lines = [line for line in output.splitlines() if line.startswith('{"tokens')]
    if not lines:
        raise RuntimeError(f"its process ended with exit code {process.returncode} and no figures: {output[-300:]}")
    return json.loads(lines[-1])


def job(world: World, *, engine: str = "sglang", lora: dict | None = None):
    """Return the job of an engine alone; `lora` = `spec.model.lora`."""
    from rl_core.api.job import RLJobSpec

    rollout = {"maxBatch": 8 if world.small else 256, "gpus": int(world.cuda), "engine": engine}
    model = {"path": "unused", "dtype": "bfloat16" if world.cuda else "float32", "lora": lora}
    return RLJobSpec.model_validate({"model": model, "data": {"train": "unused"}, "rollout": rollout})


def files(world: World) -> dict[str, bytes]:
    sys.path.insert(0, str(ROOT))
    from tests.integration.rollout_world import tokenizer_files

    return {**tokenizer_files(), "config.json": json.dumps(sizes(world)).encode()}


def _prompts(world: World) -> list[list[int]]:
    return [
        [3 + (7 * row + 3 * at) % 40 for at in range(32 if world.small else 128)]
        for row in range(8 if world.small else 256)
    ]


def _rates(world: World, generate) -> dict:
    generate()
    seconds, tokens = [], 0
    for _ in range(3):
        began = time.perf_counter()
        tokens = generate()
        seconds.append(time.perf_counter() - began)
    return {"tokens_per_second": round(tokens / statistics.median(seconds))}


def _nap(world: World, sleep, wake) -> dict:
    """Return the seconds of both and what the device has free awake and asleep; why not where an engine keeps its memory."""
    try:
        awake, began = world.held(), time.perf_counter()
        sleep()
        slept, asleep = time.perf_counter(), world.held()
        wake()
        woken = time.perf_counter()
    except Exception as error:
        return {"asleep_error": f"{type(error).__name__}: {error}"[:300]}
    freed = asleep.get("device_free", 0) - awake.get("device_free", 0)
    return {"sleep_seconds": round(slept - began, 3), "wake_seconds": round(woken - slept, 3), "freed_bytes": freed}


def alone(world: World) -> dict:
    import sglang

    from rl_core.rollouts.sglang import setup

    new, spec, prompts = 16 if world.small else 128, job(world), _prompts(world)
    folder = setup.ModelFolder(files(world))
    options = setup.options(spec, folder.path, world.device, len(prompts[0]) + new)
    if world.cuda:
        options |= {"enable_memory_saver": True}
    if os.environ.get("RLJOB_SGLANG_OPTIONS"):
        options |= json.loads(os.environ["RLJOB_SGLANG_OPTIONS"])
    engine = sglang.Engine(**options)
    sampling = {"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True}

    def generate() -> int:
        answers = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        return sum(len(answer["output_ids"]) for answer in answers)

    found = _rates(world, generate)
    if world.cuda:
        engine.flush_cache()
        found |= _nap(world, engine.release_memory_occupation, engine.resume_memory_occupation)
    return found


def through(world: World) -> dict:
    from rl_core.rollouts.hf.config import DecoderConfig
    from rl_core.rollouts.hf.weights import DecoderWeights
    from rl_core.rollouts.sglang.rollout_engine import SGLangRolloutEngine

    new, spec, prompts = 16 if world.small else 128, job(world), _prompts(world)
    engine = SGLangRolloutEngine.build(
        spec, files(world), world.device, len(prompts[0]) + new, lambda tokens: None, lambda stage: None
    )
    try:
        import torch

        weights = DecoderWeights(DecoderConfig.from_dict(sizes(world)), dtype=getattr(torch, spec.model.dtype))
        fill(weights, "cpu")
        began = time.perf_counter()
        engine.weight_target.load(weights.named_tensors(), 1)
        loaded = time.perf_counter() - began
        engine.engine.version = 1
        parts, residency = ["kv_cache", "weights"], engine.residency
        figures = _rates(world, lambda: tokens_made(engine.engine, prompts, new)) | {
            "weights_load_seconds": round(loaded, 3)
        }
        return figures | _nap(world, lambda: residency.offload(parts), lambda: residency.onload(parts))
    finally:
        engine.close()


if __name__ == "__main__":
    part, device, small, folder = sys.argv[1:]
    made = {"alone": alone, "through": through}[part](World(device, small == "1", Path(folder)))
    print(json.dumps(made), flush=True)
    os._exit(0)  # sglang's exit handler waits up to a minute for its processes, which the parent kills
