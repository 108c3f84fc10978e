"""Stores checkpoints: stages a folder, publishes it atomically, finds it again, deletes old ones. Imports no torch.

The runner owns the only writer of a job.

A checkpoint is complete or invisible: ranks write into a hidden staging folder, the manifest is written last, one rename publishes.

    begin(step, epoch) -> .step-00000050.3   ranks write and sync -> publish(): manifest, rename -> step-00000050

A folder of an older epoch cannot be published once a newer epoch has begun to write (two actors over one storage during a restart).
"""

import fcntl
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_core.api.errors import ConfigError, DataError, EpochFenced
from rl_core.checkpoint.files import sync_folder, write_failure, write_file
from rl_core.checkpoint.manifest import MANIFEST, Manifest, read_manifest

logger = logging.getLogger(__name__)

PUBLISHED = re.compile(r"step-(\d{8,})")
STAGING = re.compile(r"\.step-(\d{8,})\.(\d+)")
TRASH = ".trash-"
LOST = "lost-"
FENCE = ".epoch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint; usable wherever a path is."""

    step: int
    path: Path
    manifest: Manifest
    passed_over: tuple[str, ...] = ()
    """Set by a resume with `auto`: the newer checkpoints that it skipped because they are damaged, each as text with the reason."""

    def __fspath__(self) -> str:
        return str(self.path)


class CheckpointStore:
    """The checkpoints below one folder: newest `keep` are kept, and the `keep_best` with the best `metric`."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: int,
        keep_best: int = 0,
        metric: str = "reward",
        mode: Literal["max", "min"] = "max",
    ) -> None:
        if keep < 1 or keep_best < 0:
            raise ConfigError(
                f"checkpoint.keep must be at least 1 and keepBest at least 0, got {keep} and {keep_best}; raise them"
            )
        if mode not in ("max", "min"):
            raise ConfigError(f"mode must be max or min, got {mode!r}; choose one")
        self.root = Path(root)
        self.keep = keep
        self.keep_best = keep_best
        self.metric = metric
        self.mode = mode
        self.good_until: int | None = None
        """The newest checkpoint up to this step is not retired: a rule may find those after it wrong. None = all are good."""
        self._resumed: Path | None = None
        self._last_staging: Path | None = None
        self._reported: set[Path] = set()

    # Writing ------------------------------------------------------------------------------------------------------

    def begin(self, step: int, epoch: int) -> Path:
        """Return a fresh, empty staging folder; leftovers of earlier saves are removed.

        Raises EpochFenced when a newer epoch writes here, InfrastructureError when the storage refuses.
        """
        staging = self.root / f".step-{step:08d}.{epoch}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._check_fence(epoch)
                self._clean()  # first: what a killed writer left may be all the room there is, and the fence needs some
                self._raise_fence(epoch)
                staging.mkdir()
        except OSError as error:
            raise write_failure(f"checkpoint of step {step}", self.root, error) from error
        self._last_staging = staging
        return staging

    def publish(
        self,
        staging: str | os.PathLike[str] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        layout: Mapping[str, Any] | None = None,
        versions: Mapping[str, Any] | None = None,
        spec_digest: str = "",
        passing: bool = False,
        digests: Mapping[str, str] | None = None,
    ) -> Checkpoint:
        """Write the manifest over the files in `staging` (None: the folder begun last), make it visible, retire old ones.

        `digests` maps paths in the folder to digests that the writers have computed; those of other files are computed here. `versions`,
        `layout`, `spec_digest`, `metrics` and `passing` are fields of the `Manifest`.
        Raises EpochFenced when a newer epoch began meanwhile; InfrastructureError when the storage refuses, the staging
        folder is then gone and every published checkpoint is untouched.
        """
        folder = self._staging(staging)
        step, epoch = _parse_staging(folder)
        manifest_fields = {
            "layout": dict(layout or {}),
            "versions": dict(versions or {}),
            "metrics": dict(metrics or {}),
            "passing": passing,
        }
        try:
            manifest = Manifest.of_folder(
                folder, step=step, epoch=epoch, digests=digests, spec_digest=spec_digest, **manifest_fields
            )
            write_file(folder / MANIFEST, manifest.encode())
            for inner in (path for path in folder.rglob("*") if path.is_dir()):
                sync_folder(inner)
            sync_folder(folder)
            with self._locked():
                self._check_fence(epoch)
                target = self._rename(folder, step)
        except OSError as error:
            self.abort(folder)
            with suppress(OSError):
                self._check_fence(epoch)  # a newer writer has cleared the folder away
            raise write_failure(f"checkpoint of step {step}", folder, error) from error
        except EpochFenced:
            self.abort(folder)
            raise
        self._last_staging = None
        self._retire()
        return Checkpoint(step=step, path=target, manifest=manifest)

    def abort(self, staging: str | os.PathLike[str] | None = None) -> None:
        """Remove a staging folder (None: the one begun last, if any); nothing happens when it is gone."""
        if staging is None and self._last_staging is None:
            return
        shutil.rmtree(self._staging(staging), ignore_errors=True)
        self._last_staging = None

    def make_room(self) -> str | None:
        """Delete one checkpoint folder to free disk space, and return its name; None if nothing can be deleted.

        The order is: lost-step-* folders first, then the oldest checkpoint, and those with the best metric last. The newest checkpoint, the
        one that the run was resumed from and the last good one are never deleted. Raises OSError if the storage fails.
        """
        checkpoints = self.checkpoints()
        best = {c.path for c in self._ranking(checkpoints)[: self.keep_best]}
        free = [c for c in checkpoints[:-1] if not self._is_needed(c, checkpoints)]
        order = sorted(self.root.glob(f"{LOST}*")) + [
            c.path for c in sorted(free, key=lambda c: (c.path in best, c.step))
        ]
        if not order:
            return None
        with self._locked():
            self._to_trash(order[0])
            self._empty_trash()
        return order[0].name

    # Reading ------------------------------------------------------------------------------------------------------

    def complete_steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending."""
        return [checkpoint.step for checkpoint in self.checkpoints()]

    def checkpoints(self) -> list[Checkpoint]:
        """Return all complete checkpoints by ascending step; damaged folders are left out and logged once."""
        checkpoints = [self._inspect(path) for path in self._folders(PUBLISHED)]
        return sorted((checkpoint for checkpoint in checkpoints if checkpoint), key=lambda checkpoint: checkpoint.step)

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, None when there is none."""
        return max(self.checkpoints(), key=lambda checkpoint: checkpoint.step, default=None)

    def best(self) -> Checkpoint | None:
        """Return the complete checkpoint with the best finite `metric` (the newer one on ties), None when none has it."""
        return next(iter(self._ranking(self.checkpoints())), None)

    def resolve(self, resume: str | os.PathLike[str]) -> Checkpoint | None:
        """Return the checkpoint to resume from: `auto` the newest undamaged one if any, `none` nothing, else the one at a path.

        The returned checkpoint is never deleted by this store. Raises ConfigError if the path is no complete checkpoint, DataError if
        `auto` finds only damaged ones: the user must then decide whether to start from step 0.
        """
        if resume == "none":
            return None
        if resume == "auto" and self._folders(STAGING):
            with self._locked():
                self._recover()
        checkpoint = self.newest_intact() if resume == "auto" else self.at(Path(resume))
        self._resumed = checkpoint.path.resolve() if checkpoint else None
        return checkpoint

    @staticmethod
    def at(path: Path) -> Checkpoint:
        """Return the complete checkpoint at `path`, else ConfigError."""
        try:
            manifest = read_manifest(path)
            damage = manifest.damage(path)
        except (FileNotFoundError, DataError) as error:
            raise ConfigError(f"resume must name a complete checkpoint, got {path}: {error}") from error
        if damage is not None:
            raise ConfigError(
                f"resume must name a complete checkpoint, got {path}: {damage}; choose another one or `auto`"
            )
        return Checkpoint(step=manifest.step, path=path, manifest=manifest)

    def set_aside_after(self, step: int, epoch: int) -> list[int]:
        """Rename the checkpoints after `step` to `lost-step-...`, because a resume from `step` abandons them; return their steps.

        They stay on the disk (with the suffix `.1`, `.2` if a name is in use) and are ignored. Otherwise a later resume would continue from
        them.
        Raises EpochFenced when a newer epoch writes here.
        """
        newer = sorted(path for path in self._folders(PUBLISHED) if _step_of(path) > step)
        if newer:
            with self._locked():
                self._raise_fence(epoch)
                for path in newer:
                    name = f"{LOST}{path.name}"
                    num_used = sum(entry.name.partition(".")[0] == name for entry in self.root.iterdir())
                    path.rename(self.root / (f"{name}.{num_used}" if num_used else name))
                sync_folder(self.root)
        return [_step_of(path) for path in newer]

    def newest_intact(self) -> Checkpoint | None:
        """Return the newest checkpoint whose digests are all correct; its `passed_over` lists the damaged newer ones.

        None if there is none.
        """
        damaged: list[str] = []
        for path in sorted(self._folders(PUBLISHED), key=_step_of, reverse=True):
            try:
                manifest = read_manifest(path)
                flaw = manifest.flaw(path)
            except (FileNotFoundError, DataError) as error:
                flaw = str(error)
            if flaw is None:
                return Checkpoint(step=manifest.step, path=path, manifest=manifest, passed_over=tuple(damaged))
            logger.warning("resume auto passes over %s: %s", path, flaw)
            damaged.append(f"{path.name}: {flaw}")
        if damaged:
            raise DataError(
                f"resume auto must find an undamaged checkpoint in {self.root}, got only damaged ones: {'; '.join(damaged)}; "
                "put one back from a copy, or move them away to begin anew"
            )
        return None

    # Inside -------------------------------------------------------------------------------------------------------

    def _staging(self, staging: str | os.PathLike[str] | None) -> Path:
        if staging is None and self._last_staging is None:
            raise RuntimeError("publish needs a staging folder, got none; call begin(step, epoch) first")
        return Path(staging) if staging is not None else Path(self._last_staging or "")

    def _folders(self, pattern: re.Pattern[str]) -> list[Path]:
        if not self.root.is_dir():
            return []
        return [path for path in self.root.iterdir() if pattern.fullmatch(path.name) and path.is_dir()]

    def _inspect(self, path: Path) -> Checkpoint | None:
        try:
            manifest = read_manifest(path)
            damage = manifest.damage(path)
        except (FileNotFoundError, DataError) as error:
            damage = str(error)
        if damage is None:
            return Checkpoint(step=manifest.step, path=path, manifest=manifest)
        if path not in self._reported:
            self._reported.add(path)
            logger.warning("checkpoint %s is not complete and is ignored: %s", path, damage)
        return None

    def _ranking(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        sign = 1.0 if self.mode == "max" else -1.0
        scored = [c for c in checkpoints if math.isfinite(c.manifest.metrics.get(self.metric, math.nan))]
        return sorted(scored, key=lambda c: (sign * c.manifest.metrics[self.metric], c.step), reverse=True)

    def _rename(self, folder: Path, step: int) -> Path:
        target = self.root / f"step-{step:08d}"
        if target.exists():
            self._to_trash(target)
        folder.rename(target)
        sync_folder(self.root)
        return target

    def _retire(self) -> None:
        """Delete the checkpoints that retention does not keep. A failure is logged and does not fail the save."""
        checkpoints = self.checkpoints()
        lasting = [c for c in checkpoints if not c.manifest.passing]
        kept_paths = {
            c.path for c in (*lasting[-self.keep :], *checkpoints[-1:], *self._ranking(lasting)[: self.keep_best])
        }
        try:
            for checkpoint in checkpoints:
                if checkpoint.path not in kept_paths and not self._is_needed(checkpoint, checkpoints):
                    self._to_trash(checkpoint.path)
            self._empty_trash()
        except OSError as error:
            logger.warning("old checkpoints in %s could not be removed: %s", self.root, error)

    def _is_needed(self, checkpoint: Checkpoint, checkpoints: list[Checkpoint]) -> bool:
        """Return whether a checkpoint is the one that was resumed from, or the last good one."""
        last_good = self.good_until
        good = [c.step for c in checkpoints if last_good is not None and c.step <= last_good]
        return checkpoint.path.resolve() == self._resumed or checkpoint.step == max(good, default=None)

    def _to_trash(self, path: Path) -> None:
        # Renamed before deletion: a half-deleted folder must not look like a checkpoint.
        target = self.root / f"{TRASH}{path.name}"
        if target.exists():
            shutil.rmtree(target)
        path.rename(target)

    def _empty_trash(self) -> None:
        for path in self.root.glob(f"{TRASH}*"):
            shutil.rmtree(path)

    def _clean(self) -> None:
        """Finish or remove what a killed writer left: its staging folders and trash."""
        self._recover()
        for path in self._folders(STAGING):
            shutil.rmtree(path)
        self._empty_trash()

    def _recover(self) -> None:
        """Finish a replacement whose writer was killed between its two renames: the old one is in the trash, the new one is whole."""
        for path in self._folders(STAGING):
            name = f"step-{_parse_staging(path)[0]:08d}"
            if (self.root / f"{TRASH}{name}").exists() and not (self.root / name).exists() and self._inspect(path):
                path.rename(self.root / name)
                sync_folder(self.root)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.root / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _writer_epoch(self) -> int:
        try:
            return int((self.root / FENCE).read_text())
        except FileNotFoundError:
            return -1

    def _check_fence(self, epoch: int) -> None:
        writer = self._writer_epoch()
        if writer > epoch:
            raise EpochFenced(
                f"checkpoints in {self.root} are written by epoch {writer}, got epoch {epoch}; this process must stop"
            )

    def _raise_fence(self, epoch: int) -> None:
        self._check_fence(epoch)
        fence = self.root / FENCE
        temporary = fence.with_suffix(".new")
        write_file(temporary, str(epoch).encode())
        temporary.rename(fence)


def _step_of(published: Path) -> int:
    return int(published.name.removeprefix("step-"))


def _parse_staging(folder: Path) -> tuple[int, int]:
    match = STAGING.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"staging must be a folder made by begin(), got {folder}; pass what begin returned")
    return int(match[1]), int(match[2])
