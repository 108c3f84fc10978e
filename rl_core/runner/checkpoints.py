"""Saves and restores a run: the ranks' shards, the runner's state and the history files. A checkpoint is published as a whole or not at all."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rl_core.api.errors import DataError, InfrastructureError, RLJobError, StorageFull, WorkerLost
from rl_core.api.job import RLJobSpec
from rl_core.checkpoint.background import begin
from rl_core.checkpoint.files import write_failure, write_file
from rl_core.checkpoint.source import find_source
from rl_core.checkpoint.store import Checkpoint, CheckpointStore
from rl_core.runner.history import Extent, Tally, cut_back, now_text, take_over, verify
from rl_core.runner.invariants import digest, refuse_changes, state_of
from rl_core.workers.group import WorkerGroup
from rl_core.workers.result import WorkerErrors, WorkerGroupFuncResult

logger = logging.getLogger(__name__)
STATE_FILE = "runner.json"
HISTORY = ("ledger.jsonl", "metrics.jsonl")

WAY_OUT = (
    "put the file back from a copy, or leave all as it is and go on from here in a folder of its own: "
    "--resume {checkpoint} --output OTHER"
)


@dataclass(frozen=True, slots=True)
class _Writing:
    """A checkpoint that is being written."""

    store: CheckpointStore
    """The store that it belongs to, even if `checkpoint.path` is changed during the write."""
    staging: Path
    ranks: Sequence[WorkerGroupFuncResult]
    """The pending calls of the ranks, by worker group; empty for a program whose worker groups save nothing."""
    facts: dict[str, Any]
    """Fields of the manifest besides its files."""


class Checkpoints:
    """The checkpoints of one run: writes them, chooses the one to resume from, and restores it. Called by the loop."""

    def __init__(
        self,
        spec: RLJobSpec,
        *,
        output: Path,
        epoch: int,
        in_cluster: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep checkpoints in `checkpoint.path` of the job, or in `output`/checkpoints if it is null.

        `epoch` is the number of gang restarts of the job so far; it is stored in each checkpoint. `in_cluster`: `output` is on the job's
        volume already, so `checkpoint.path` is not used.
        """
        self._clock = clock
        self._output = output
        self._epoch = epoch
        self._in_cluster = in_cluster
        self._spec = spec
        self._save_requested = threading.Event()
        self._taking_over = False
        """Whether the checkpoint that `find` returned last belongs to another run, whose history this run continues."""
        self.last_step: int | None = None
        self._writing: tuple[int, Future[str]] | None = None
        """The step of the checkpoint that is written in the background, and the future of its path."""
        self.written_at = clock()
        """Clock when a write in the background ended last, or this run began."""
        self._deleted_early: list[str] = []
        """Folders of checkpoints that were deleted early for disk space, the last few."""
        self._resumed: dict[str, Any] = {}
        """The step that the run was resumed from and the damaged checkpoints that were skipped, as `/status` shows them."""
        self.store = self._store(spec)
        self._tallies = {name: Tally(output / name) for name in HISTORY}

    def request(self) -> None:
        """Request a checkpoint at the next step boundary. Any thread."""
        self._save_requested.set()

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._writing is not None and not self._writing[1].done()

    def pop_request(self) -> bool:
        """Return whether a checkpoint was requested, and clear the request."""
        requested = self._save_requested.is_set()
        self._save_requested.clear()
        return requested

    def adopt(self, spec: RLJobSpec) -> None:
        """Apply a changed spec. In a cluster a changed checkpoint.path takes effect when the pod starts again."""
        path_changed = spec.checkpoint.path != self._spec.checkpoint.path and not self._in_cluster
        self._spec = spec
        if path_changed:
            self.store, self.last_step = self._store(spec), None
        self.store.keep, self.store.keep_best = spec.checkpoint.keep, spec.checkpoint.keep_best

    def _store(self, spec: RLJobSpec) -> CheckpointStore:
        path = None if self._in_cluster else spec.checkpoint.path
        root = Path(path) if path else self._output / "checkpoints"
        return CheckpointStore(root, keep=spec.checkpoint.keep, keep_best=spec.checkpoint.keep_best)

    def describe(self, path: str) -> dict[str, Any]:
        """Return `checkpoint` of `/status`: the newest checkpoint, whose folder is `path` ("" for none), and the best one that is kept."""
        best = self.store.best()
        best_kept = {} if best is None else {"bestStep": best.step, "bestReward": best.manifest.metrics["reward"]}
        deleted = {"deletedForRoom": list(self._deleted_early)} if self._deleted_early else {}
        return {
            "lastStep": self.last_step,
            "step": self.last_step,
            "path": path,
            "time": now_text(),
            **best_kept,
            **self._resumed,
            **deleted,
        }

    def find(self, resume: str, *, first_epoch: int | None = None) -> Checkpoint | None:
        """Return the checkpoint to resume from, or None for a fresh start.

        `resume` is "auto" (the newest intact checkpoint of the store), "none", or the path of a checkpoint. If that gives none, the
        checkpoint of `checkpoint.resumeFrom` is used, which belongs to another run.

        `first_epoch` is the epoch of the run's first start; None means the current one. After a restart, a path in `resume` is used only
        until the run has saved a checkpoint of its own, recognised by an epoch of at least `first_epoch`. At the first start no checkpoint
        can be the run's own, whatever its epoch: other runs may share the folder.
        """
        if resume not in ("auto", "none") and first_epoch is not None and first_epoch < self._epoch:
            latest = self.store.latest()
            if latest is not None and latest.manifest.epoch >= first_epoch:
                resume = "auto"
        checkpoint, resume_from = self.store.resolve(resume), self._spec.checkpoint.resume_from
        self._taking_over = checkpoint is None and resume_from is not None
        return (
            checkpoint
            if resume_from is None or checkpoint is not None
            else find_source(resume_from, output=self._output, bounds=self._bounds())
        )

    def _bounds(self) -> list[Path]:
        """Return the folders that may contain another run's checkpoint: in a cluster the actor's volumes, else the parent folder."""
        path = self._spec.checkpoint.path
        if self._in_cluster:
            return [Path(mount.mount_path) for mount in self._spec.actor.volume_mounts]
        return [self._output.resolve().parent, *([Path(path)] if path else [])]

    def restore(self, checkpoint: Checkpoint, load: Callable[[str], None]) -> dict[str, Any]:
        """Load a checkpoint into the ranks, remove what came after it from the history, and return the runner's state.

        `load(path)` has the ranks read their shards from the folder of the checkpoint. The history files are cut back to the step of the
        checkpoint, and later checkpoints are renamed; what is removed is kept beside them. Raises ConfigError if an invariant field
        (`invariants.py`) has changed, DataError if the state or the history is damaged.
        """
        try:
            state = json.loads((checkpoint.path / STATE_FILE).read_text())
        except (OSError, ValueError) as error:
            raise DataError(
                f"{checkpoint.path / STATE_FILE} must be readable, got {error}; resume from an older checkpoint"
            ) from error
        refuse_changes(state, self._spec)
        load(str(checkpoint.path))
        try:
            extents = (
                self._take_over(checkpoint, state.get("history"))
                if self._taking_over
                else self._extents(checkpoint, state.get("history"))
            )
            for name, extent in extents.items():  # all of them, before one is cut
                verify(self._output / name, extent)
            self._forget_after(checkpoint.step, extents)
        except DataError as error:
            raise DataError(f"{error}; {WAY_OUT.format(checkpoint=checkpoint.path)}") from error
        self.last_step = checkpoint.step
        self._resumed = {"resumedFrom": checkpoint.step, "passedOver": list(checkpoint.passed_over)}
        return dict(state)

    def set_aside_after(self, step: int) -> str:
        """Rename the checkpoints after `step` to lost-step-*, so that none of them is resumed from.

        Returns the path of the newest remaining checkpoint, "" if there is none.
        """
        if renamed := self.store.set_aside_after(step, self._epoch):
            logger.warning(
                "checkpoints of steps %s, whose numbers a rule found wrong, are kept as lost-step-*", renamed
            )
        newest = self.store.latest()
        self.last_step = newest.step if newest is not None else None
        return str(newest.path) if newest is not None else ""

    def begin_afresh(self) -> None:
        """Move the history files and checkpoints of an earlier run in this folder aside; the run starts from step 0."""
        self._forget_after(-1, {})

    def _extents(self, checkpoint: Checkpoint, history: dict[str, Any] | None) -> dict[str, Extent]:
        """Return the extents of the history files at the checkpoint; empty if it belongs to another output folder or an earlier release."""
        if history is None or (checkpoint.path.parent / history["output"]).resolve() != self._output.resolve():
            return {}
        return {name: Extent(**fields) for name, fields in history["files"].items()}

    def _take_over(self, checkpoint: Checkpoint, history: dict[str, Any] | None) -> dict[str, Extent]:
        """Copy the history files of the run that saved the checkpoint; return their extents at the checkpoint.

        A file that is no longer beside its checkpoint, or that is outside the folders it may be in, is left out and logged.
        """
        extents = {}
        if history is None:
            return {}
        for name, fields in history["files"].items():
            extent, source = Extent(**fields), (checkpoint.path.parent / history["output"] / name).resolve()
            if source.is_file() and any(source.is_relative_to(folder.resolve()) for folder in self._bounds()):
                take_over(source, self._output / name, extent)
                extents[name] = extent
            elif extent.bytes:
                logger.warning(
                    "%s of the run before is not at %s: the one here begins after step %s",
                    name,
                    source,
                    checkpoint.step,
                )
        return extents

    def _forget_after(self, step: int, extents: dict[str, Extent]) -> None:
        """Cut the history files back to `step` and rename later checkpoints; what is removed is kept beside them."""
        for name in HISTORY:
            if num_lines := cut_back(self._output / name, step, extents.get(name)):
                backup = f"{name.partition('.')[0]}.lost.jsonl"
                logger.warning(
                    "%s: %s lines of steps after %s are left and kept in %s", name, num_lines, max(step, 0), backup
                )
        if renamed := self.store.set_aside_after(step, self._epoch):
            logger.warning("checkpoints of a history that is left, steps %s, are kept as lost-step-*", renamed)

    def save(
        self,
        step: int,
        groups: Sequence[WorkerGroup],
        state: dict[str, Any],
        *,
        version: int,
        weights_digest: str = "",
        reward: float | None,
        passing: bool = False,
        num_violating_steps: int = 0,
        in_background: bool = False,
    ) -> str | None:
        """Write and publish the checkpoint of `step`; return the path of its folder, or None with `in_background`.

        The ranks of `groups` write their shards, the runner writes `state`. `version` and `weights_digest` identify
        the weights, `reward` is the metric by which the best checkpoint is chosen. `passing` True marks a checkpoint that the next one
        replaces.

        `num_violating_steps` is the number of newest steps that violate a rule of failurePolicy; the newest checkpoint before them is not
        deleted. With `in_background` the call returns once the ranks have begun to write; a thread waits for them and
        publishes the checkpoint, and
        `settle` reports the result. On a full disk older checkpoints are deleted early, except the newest; StorageFull is raised if that
        does not suffice.
        """
        self.store.good_until = step - num_violating_steps
        metadata: dict[str, Any] = {
            "metrics": {} if reward is None else {"reward": reward},
            "versions": {"policy": version, "digest": weights_digest},
            "passing": passing,
            "layout": {"backend": self._spec.actor.backend, "world_size": self._spec.actor.world_size},
            "spec_digest": digest(self._spec),
        }
        while True:
            try:
                writing = self._begin(step, groups, state, metadata, in_background=in_background)
                if in_background:
                    self._writing = step, begin(partial(self._publish_beside, writing))
                    return None
                path = self._publish(writing)
                self.last_step = step
                return path
            except StorageFull as error:
                if not self._make_room(error):
                    raise

    def settle(self, *, wait: bool = False) -> str | None:
        """Return the path of the checkpoint that was written in the background, once; None if there is none or it is not finished yet.

        `wait` True blocks until it is finished; `writing` tells whether one is in progress. Raises what `save` raises. After StorageFull,
        space has been freed if possible, but the write is not repeated here.
        """
        if self._writing is None or not (wait or self._writing[1].done()):
            return None
        (step, published), self._writing = self._writing, None
        try:
            path = published.result()
        except StorageFull as error:
            self._make_room(error)
            raise
        self.last_step = step
        return path

    def _make_room(self, error: StorageFull) -> bool:
        if (deleted := self.store.make_room()) is None:
            return False
        self._deleted_early = [*self._deleted_early[-9:], deleted]
        logger.warning("%s is deleted before its time to make room: %s", deleted, error)
        return True

    def _begin(
        self,
        step: int,
        groups: Sequence[WorkerGroup],
        state: dict[str, Any],
        metadata: dict[str, Any],
        *,
        in_background: bool,
    ) -> "_Writing":
        """Write the runner's state and have the ranks begin to write their shards."""
        store = self.store
        staging = store.begin(step, self._epoch)
        try:
            self._write_state(staging, state)
            options = {"in_background": True} if in_background else {}
            ranks = [group.save_checkpoint(str(staging), step, **options) for group in groups]
            return _Writing(store, staging, ranks, metadata)
        except RLJobError:
            store.abort(staging)
            raise

    def _publish_beside(self, writing: "_Writing") -> str:
        """Publish a checkpoint on the background thread."""
        try:
            return self._publish(writing)
        finally:
            self.written_at = self._clock()

    def _publish(self, writing: "_Writing") -> str:
        """Wait for the ranks and publish the checkpoint. A failure leaves earlier checkpoints unchanged."""
        try:
            digests: dict[str, str] = {}
            for ranks in writing.ranks:
                for of_rank in ranks.wait(self._spec.runtime.deadlines.group_method):
                    digests |= of_rank or {}  # the store computes the digests that a rank does not report
            published = writing.store.publish(writing.staging, digests=digests, **writing.facts)
        except RLJobError as error:
            writing.store.abort(writing.staging)
            if isinstance(error, WorkerErrors):
                raise merge_errors(error) from error
            raise
        return str(published.path)

    def _write_state(self, staging: Path, state: dict[str, Any]) -> None:
        try:
            history = {
                "output": os.path.relpath(self._output.resolve(), self.store.root.resolve()),
                "files": {name: asdict(tally.take()) for name, tally in self._tallies.items()},
            }
            document = state | state_of(self._spec) | {"history": history}
            write_file(staging / STATE_FILE, json.dumps(document, indent=1).encode())
        except OSError as error:
            raise write_failure("the runner's part of a checkpoint", staging, error) from error


def merge_errors(errors: WorkerErrors) -> RLJobError:
    """Return one error for the failures of several ranks that write to the same storage.

    Returns the WorkerLost error if there is one, StorageFull if a rank reported it (the write is then repeated), else InfrastructureError.
    Errors of another class are returned unchanged.
    """
    causes = errors.exceptions
    worker_lost = next((error for error in causes if isinstance(error, WorkerLost)), None)
    if worker_lost is not None or not all(isinstance(error, InfrastructureError) for error in causes):
        return worker_lost or errors
    full = any(isinstance(error, StorageFull) for error in causes)
    return (StorageFull if full else InfrastructureError)(errors.message)
