"""`rljob serve`: serves a model folder, or the model of a finished run, until it is interrupted."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.api.errors import ConfigError
from rl_core.api.job import API_VERSION, RLJobSpec
from rl_core.cli.job_file import JobProblems, load_job, override
from rl_core.cli.problems import find_problems
from rl_core.data.hub import HUB_SCHEME, fetch

if TYPE_CHECKING:
    from torch import Tensor

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve_model(target: str, *, engine: str | None, settings: list[str], host: str, port: int) -> int:
    """Serve `target` until Ctrl-C or SIGTERM; return 0. Raises ConfigError for what cannot be served.

    `target` is a model folder, `hf://owner/name`, or the output folder of a finished run, whose settings are then used. `engine` None = the
    run's, else hf. `settings` override fields, as `--set`.
    """
    folder, spec = find_model(target, engine, settings)
    asyncio.run(_serve(folder, spec, host, port))
    return 0


async def _serve(folder: Path, spec: RLJobSpec, host: str, port: int) -> None:
    import torch

    from rl_core.data.tokenizer import Tokenizer, read_files
    from rl_core.rollouts.serving import serve

    stopped = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stopped.set)
    files, tokenizer = read_files(folder), Tokenizer.from_folder(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def tell(stage: str) -> None:
        sys.stderr.write(f"starting the engine: {stage}\n")

    def tensors(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> Iterator[tuple[str, Tensor]]:
        return stored_tensors(folder, shapes)

    try:
        async with serve(spec, files, tokenizer, tensors, tell, device=device, host=host, port=port) as base_url:
            sys.stdout.write(
                f"{base_url} serves {folder} with engine {spec.rollout.engine}, any API key (Ctrl-C ends it)\n"
            )
            if host not in LOOPBACK:
                sys.stdout.write(f"anybody who reaches {host} can call the model\n")
            sys.stdout.flush()
            await stopped.wait()
    except OSError as error:
        raise ConfigError(
            f"--host and --port must be free to listen on, got {host}:{port}: {error}; choose others"
        ) from error


def find_model(target: str, engine: str | None, settings: list[str]) -> tuple[Path, RLJobSpec]:
    """Return the model folder of `target` and the settings to serve it with."""
    folder = fetch(target) if target.startswith(HUB_SCHEME) else Path(target).expanduser().resolve()
    engine_setting = [f"rollout.engine={engine}"] if engine is not None else []
    if (folder / "job.yaml").is_file():
        spec = load_job(folder / "job.yaml", [*settings, *engine_setting]).spec
        folder = folder / "model"
        if not folder.is_dir():
            raise ConfigError(
                f"TARGET must be a run that has ended, got {target} without {folder.name}/, which a run writes at its end"
            )
        return folder, spec
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"TARGET must be a model folder with config.json or the output folder of a run, got {target}; correct it"
        )
    document = {
        "apiVersion": API_VERSION,
        "kind": "RLJob",
        "metadata": {"name": "served"},
        "spec": {"model": {"path": str(folder)}, "data": {"train": "none.jsonl"}},
    }
    for setting in [*settings, *engine_setting]:
        override(document, setting)
    job, problems = find_problems(document)
    if job is None:
        raise JobProblems(folder, problems)
    return folder, job.spec


def stored_tensors(folder: Path, wanted: Mapping[str, tuple[tuple[int, ...], str]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model folder that an engine wants, by Hugging Face name, in the dtype that it wants.

    Raises ConfigError for tensors that are absent or of another shape.
    """
    import torch
    from safetensors import safe_open

    from rl_core.actors.hf import weight_files

    stored = weight_files(folder)
    if absent := sorted(wanted.keys() - stored.keys()):
        raise ConfigError(
            f"{folder} must hold all tensors of its model, got none of {', '.join(absent[:3])}; export it again"
        )
    for name, (shape, dtype) in wanted.items():
        with safe_open(stored[name], framework="pt") as reader:
            tensor = reader.get_tensor(name)
        if tuple(tensor.shape) != tuple(shape):
            raise ConfigError(
                f"{name} in {stored[name]} must have the shape {list(shape)}, got {list(tensor.shape)}; export it again"
            )
        yield name, tensor.to(getattr(torch, dtype))
