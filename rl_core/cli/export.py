"""`rljob export`: writes a Hugging Face folder from a checkpoint of a run."""

import json
import sys
from pathlib import Path

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJobSpec
from rl_core.checkpoint.source import choose_checkpoint
from rl_core.checkpoint.store import Checkpoint
from rl_core.cli.job_file import load_job
from rl_core.data.hub import HUB_SCHEME, fetch
from rl_core.runner.checkpoints import STATE_FILE


def export(source: Path, target: Path, *, step: str, merge: bool, model: str | None) -> int:
    """Write the policy in a checkpoint as a folder at `target`; return 0.

    `source` is the output folder of a run or a checkpoint. Of a run with adapters the folder is that of the adapters, or with `merge` the
    model with them merged; otherwise it is the model. `model` takes the place of the job's `model.path`. Raises ConfigError for what cannot
    be exported, DataError for a damaged checkpoint, and InfrastructureError when the storage fails; there is then nothing at `target`.
    """
    source, target = source.expanduser().resolve(), target.expanduser().resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"FOLDER must be new or empty, got {target}; choose another one or empty it")
    checkpoint = _find(source, step)
    spec = _spec_of(checkpoint, model)
    if merge and spec.model.lora is None:
        raise ConfigError(f"--merge needs a run with model.lora, got {checkpoint.path} without; leave it out")
    from rl_core.actors.checkpoint_export import CheckpointExport  # imports torch

    exported = CheckpointExport(checkpoint.path, spec)
    if spec.model.lora is None or merge:
        exported.write_model(target)
    else:
        exported.write_adapters(target)
    kind = "model" if spec.model.lora is None else "model with merged adapters" if merge else "adapters"
    sys.stdout.write(f"{target} has the {kind} of step {checkpoint.step}, from {checkpoint.path}\n")
    return 0


def _find(source: Path, step: str) -> Checkpoint:
    if not source.is_dir():
        raise ConfigError(
            f"OUT must be the output folder of a run or a checkpoint, got {source}, which is none; correct it"
        )
    job = source / "job.yaml"
    elsewhere = load_job(job).spec.checkpoint.path if job.is_file() else None
    return choose_checkpoint(source if elsewhere is None else Path(elsewhere), step, field="--step")


def _spec_of(checkpoint: Checkpoint, model: str | None) -> RLJobSpec:
    state = json.loads((checkpoint.path / STATE_FILE).read_text())
    changed = state["changed"]
    path = changed["model"]["path"] if model is None else model
    folder = fetch(path) if path.startswith(HUB_SCHEME) else Path(path).expanduser().resolve()
    return RLJobSpec.model_validate(changed | {"model": changed["model"] | {"path": str(folder)}})
