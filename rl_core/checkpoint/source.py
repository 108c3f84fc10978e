"""Finds the checkpoint of another run from which a job starts (`checkpoint.resumeFrom`), by the run's name or folder.

Only read here: the other run may still write there, and the folder may be mounted read-only. Torch-free.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from rl_core.api.errors import ConfigError
from rl_core.api.settings import ResumeFromSpec
from rl_core.checkpoint.manifest import MANIFEST
from rl_core.checkpoint.store import Checkpoint, CheckpointStore

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints inside a run's output folder."""
UID = r"-[0-9a-f]{8}"
"""What the operator adds to a job's name for its output folder."""
FIELD = "checkpoint.resumeFrom"


def find_source(spec: ResumeFromSpec, *, output: Path, bounds: Sequence[Path]) -> Checkpoint:
    """Return the undamaged checkpoint that `checkpoint.resumeFrom` names.

    `output` is the folder of this run; the folders of other runs are beside it. `bounds` are the folders that may contain the checkpoint,
    after links are resolved. Raises ConfigError for a path outside of them and for a checkpoint that does not exist, DataError for a
    damaged one.
    """
    folders = [_by_path(spec.path)] if spec.path is not None else _by_name(spec.job or "", output)
    checkpoints = [
        choose_checkpoint(_bounded(folder, bounds), str(spec.step), field=f"{FIELD}.step") for folder in folders
    ]
    newest = max(checkpoints, key=lambda checkpoint: (checkpoint.path / MANIFEST).stat().st_mtime)
    _bounded(newest.path, bounds)
    logger.info("%s: %s", FIELD, newest.path)
    return newest


def _by_path(path: str) -> Path:
    folder = Path(path)
    if not folder.is_absolute():
        raise ConfigError(f"{FIELD}.path must be absolute in a job that runs, got {path}; write where it is mounted")
    if not folder.is_dir():
        raise ConfigError(f"{FIELD}.path must be a folder, got {path}, which is not there; correct it")
    return folder


def _by_name(name: str, output: Path) -> list[Path]:
    """Return the folders of runs of that name beside `output`, but for itself, that hold checkpoints."""
    beside = output.resolve().parent
    pattern = re.compile(f"{re.escape(name)}({UID})?")
    folders = sorted(path for path in beside.iterdir() if path.is_dir()) if beside.is_dir() else []
    named = [path for path in folders if pattern.fullmatch(path.name) and path.resolve() != output.resolve()]
    runs = [path for path in named if CheckpointStore(path / CHECKPOINTS, keep=1).complete_steps()]
    if not runs:
        names = ", ".join(path.name for path in folders if path.resolve() != output.resolve()) or "nothing"
        raise ConfigError(
            f"{FIELD}.job must name a run whose folder in {beside} holds a complete checkpoint, got {name}; there are: {names}. "
            f"Name one of them, or give {FIELD}.path"
        )
    return runs


def _bounded(folder: Path, bounds: Iterable[Path]) -> Path:
    """Return `folder`. Raises ConfigError when it is, with links followed, in none of `bounds`."""
    real = folder.resolve()
    allowed = [bound.resolve() for bound in bounds]
    if not any(real.is_relative_to(bound) for bound in allowed):
        raise ConfigError(
            f"{FIELD} must lie in {' or '.join(map(str, allowed))}, got {folder}{f' -> {real}' if real != folder else ''}; mount the "
            "volume that holds it in the actor, or copy the checkpoint there"
        )
    return folder


def choose_checkpoint(folder: Path, step: str, *, field: str) -> Checkpoint:
    """Return the undamaged checkpoint of `folder`: itself, or one of those in it or in its folder `checkpoints`.

    `step` is latest, best or a number, the value of `field`. Raises ConfigError where there is none, and DataError when it is damaged.
    """
    if (folder / MANIFEST).is_file():
        return _of_step(CheckpointStore(folder.parent, keep=1), folder, step, field)
    inner = folder / CHECKPOINTS
    root = inner if inner.is_dir() else folder
    store = CheckpointStore(root, keep=1)
    if step == "latest":
        checkpoint = store.newest_intact()
    else:
        checkpoint = (
            store.best() if step == "best" else next((c for c in store.checkpoints() if str(c.step) == step), None)
        )
        if checkpoint is not None:
            checkpoint.manifest.verify(checkpoint.path)
    if checkpoint is None:
        steps = ", ".join(map(str, store.complete_steps())) or "none"
        way_out = "name one of them" if steps != "none" else "name another run"
        reward = " with a reward" if step == "best" else ""
        raise ConfigError(
            f"{field} must be that of a complete checkpoint{reward} in {root}, got {step}; there are: {steps}; {way_out}"
        )
    return checkpoint


def _of_step(store: CheckpointStore, folder: Path, step: str, field: str) -> Checkpoint:
    checkpoint = store.at(folder)
    if step not in ("latest", "best", str(checkpoint.step)):
        raise ConfigError(
            f"{field} must be {checkpoint.step}, that of the checkpoint that path names, got {step}; leave it out, or name the folder "
            f"{folder.parent}"
        )
    checkpoint.manifest.verify(folder)
    return checkpoint
