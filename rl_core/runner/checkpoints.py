"""Saves and restores a run: the actors' shards, the ledger and the history files, published whole."""

import json
import logging
import os
import threading
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rl_core.api.errors import ConfigError, DataError, InfrastructureError, RLJobError, StorageFull, WorkerLost
from rl_core.api.job import RLJobSpec
from rl_core.checkpoint.background import begin
from rl_core.checkpoint.files import write_failure, write_file
from rl_core.checkpoint.source import find_source
from rl_core.checkpoint.store import Checkpoint, CheckpointStore
from rl_core.runner.history import Extent, Tally, cut_back, now_text, take_over, verify
from rl_core.runner.invariants import changes, digest, other_model, state_of
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
    """A checkpoint whose ranks write."""

    store: CheckpointStore
    """Where it belongs, whatever `checkpoint.path` becomes meanwhile."""
    staging: Path
    ranks: WorkerGroupFuncResult
    facts: dict[str, Any]
    """What the manifest says besides files."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, spec: RLJobSpec, *, output: Path, epoch: int, in_cluster: bool = False) -> None:
        """Keep checkpoints where the job says, else in `output`/checkpoints; in a cluster `output` is on the volume already."""
        self._output = output
        self._epoch = epoch
        self._in_cluster = in_cluster
        self._spec = spec
        self._asked = threading.Event()
        self._taking_over = False
        """Whether the checkpoint found last is another run's, whose history this one goes on with."""
        self.last_step: int | None = None
        self._writing: tuple[int, Future[str]] | None = None
        """The step of the one that is written in the background, and its path to come."""
        self._made_room: list[str] = []
        """Folders that were deleted before their time, the last few."""
        self._resumed: dict[str, Any] = {}
        """Step that the run was resumed from and the damaged checkpoints passed over for it, as `/status` tells them."""
        self.store = self._store(spec)
        self._tallies = {name: Tally(output / name) for name in HISTORY}

    def ask(self) -> None:
        """Let the next step boundary save. From any thread."""
        self._asked.set()

    def take_ask(self) -> bool:
        """Return whether somebody asked since the last call."""
        asked = self._asked.is_set()
        self._asked.clear()
        return asked

    def adopt(self, spec: RLJobSpec) -> None:
        """Go on as another spec says. In a cluster another checkpoint.path takes effect when the pod starts anew."""
        moved = spec.checkpoint.path != self._spec.checkpoint.path and not self._in_cluster
        self._spec = spec
        if moved:
            self.store, self.last_step = self._store(spec), None
        self.store.keep, self.store.keep_best = spec.checkpoint.keep, spec.checkpoint.keep_best

    def _store(self, spec: RLJobSpec) -> CheckpointStore:
        given = None if self._in_cluster else spec.checkpoint.path
        root = Path(given) if given else self._output / "checkpoints"
        return CheckpointStore(root, keep=spec.checkpoint.keep, keep_best=spec.checkpoint.keep_best)

    def describe(self, path: str) -> dict[str, Any]:
        """Return the last checkpoint, at `path`, and the best one kept, as `/status` tells them."""
        best = self.store.best()
        found = {} if best is None else {"bestStep": best.step, "bestReward": best.manifest.metrics["reward"]}
        room = {"deletedForRoom": list(self._made_room)} if self._made_room else {}
        return {
            "lastStep": self.last_step,
            "step": self.last_step,
            "path": path,
            "time": now_text(),
            **found,
            **self._resumed,
            **room,
        }

    def find(self, resume: str, *, first_epoch: int | None = None) -> Checkpoint | None:
        """Return the checkpoint to resume from (auto, none or a path), else that of `checkpoint.resumeFrom`, None for a fresh start.

        `first_epoch`: epoch in which the run was started (None: the present one). A path holds until the run has saved one of its own,
        which at its first start it cannot have: what lies in a folder that several runs share may be of any epoch.
        """
        if resume not in ("auto", "none") and first_epoch is not None and first_epoch < self._epoch:
            own = self.store.latest()
            if own is not None and own.manifest.epoch >= first_epoch:
                resume = "auto"
        found, wanted = self.store.resolve(resume), self._spec.checkpoint.resume_from
        self._taking_over = found is None and wanted is not None
        return (
            found
            if wanted is None or found is not None
            else find_source(wanted, output=self._output, bounds=self._bounds())
        )

    def _bounds(self) -> list[Path]:
        """Return the folders in which the checkpoint of another run may lie: on a cluster the actor's volumes, else beside this run."""
        given = self._spec.checkpoint.path
        if self._in_cluster:
            return [Path(mount.mount_path) for mount in self._spec.actor.volume_mounts]
        return [self._output.resolve().parent, *([Path(given)] if given else [])]

    def restore(self, checkpoint: Checkpoint, actor: WorkerGroup) -> dict[str, Any]:
        """Load the actors' state and cut the history back to the checkpoint, later checkpoints too; return the runner's own state.

        Raises ConfigError when a field that alters the mathematics has changed, DataError for a damaged state or history.
        """
        try:
            state = json.loads((checkpoint.path / STATE_FILE).read_text())
        except (OSError, ValueError) as error:
            raise DataError(
                f"{checkpoint.path / STATE_FILE} must be readable, got {error}; resume from an older checkpoint"
            ) from error
        self._refuse_change(state)
        actor.load_checkpoint(str(checkpoint.path)).wait(self._spec.runtime.deadlines.group_method)
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

    def leave_after(self, step: int) -> str:
        """Set the checkpoints after `step` aside; return the path of the newest that is left, "" when there is none."""
        if aside := self.store.set_aside_after(step, self._epoch):
            logger.warning("checkpoints of steps %s, whose numbers a rule found wrong, are kept as lost-step-*", aside)
        newest = self.store.latest()
        self.last_step = newest.step if newest is not None else None
        return str(newest.path) if newest is not None else ""

    def begin_afresh(self) -> None:
        """Clear the history of a run that was lost before its first checkpoint, or is not to be resumed."""
        self._forget_after(-1, {})

    def _extents(self, checkpoint: Checkpoint, history: dict[str, Any] | None) -> dict[str, Extent]:
        """Return what the checkpoint vouches for of the files here; nothing where it is of another output folder or an earlier release."""
        if history is None or (checkpoint.path.parent / history["output"]).resolve() != self._output.resolve():
            return {}
        return {name: Extent(**fields) for name, fields in history["files"].items()}

    def _take_over(self, checkpoint: Checkpoint, history: dict[str, Any] | None) -> dict[str, Extent]:
        """Begin the files here with those of the run that saved the checkpoint; return what it vouches for of them.

        A file that is not beside its checkpoint any more, or in none of the folders it may lie in, is left out with a line in the log.
        """
        found = {}
        if history is None:
            return {}
        for name, fields in history["files"].items():
            extent, source = Extent(**fields), (checkpoint.path.parent / history["output"] / name).resolve()
            if source.is_file() and any(source.is_relative_to(bound.resolve()) for bound in self._bounds()):
                take_over(source, self._output / name, extent)
                found[name] = extent
            elif extent.bytes:
                logger.warning(
                    "%s of the run before is not at %s: the one here begins after step %s",
                    name,
                    source,
                    checkpoint.step,
                )
        return found

    def _forget_after(self, step: int, extents: dict[str, Extent]) -> None:
        """Let files and checkpoints tell the history up to `step` alone; what comes after is kept aside."""
        for name in HISTORY:
            if moved := cut_back(self._output / name, step, extents.get(name)):
                kept = f"{name.partition('.')[0]}.lost.jsonl"
                logger.warning(
                    "%s: %s lines of steps after %s are left and kept in %s", name, moved, max(step, 0), kept
                )
        if aside := self.store.set_aside_after(step, self._epoch):
            logger.warning("checkpoints of a history that is left, steps %s, are kept as lost-step-*", aside)

    def _refuse_change(self, saved: dict[str, Any]) -> None:
        if other := other_model(saved, self._spec):
            raise ConfigError(
                f"a checkpoint must be of the job's model, got {', '.join(other)}; set model.path to the model that the saved run began from, "
                "or resume from another run"
            )
        changed = changes(saved, self._spec)
        if changed and not self._spec.checkpoint.allow_spec_change:
            raise ConfigError(
                f"a resumed job must compute what the saved one did, got changes in {'; '.join(changed)}; restore them, or set "
                "checkpoint.allowSpecChange: true"
            )

    def save(
        self,
        step: int,
        actor: WorkerGroup,
        state: dict[str, Any],
        *,
        version: int,
        weights_digest: str = "",
        reward: float | None,
        passing: bool = False,
        wrong_steps: int = 0,
        in_background: bool = False,
    ) -> str | None:
        """Write and publish the checkpoint of `step`; return its path. Where there is no room, older ones go before their time, but for one.

        `version` and `weights_digest` are those of the weights' manifest, by which rollouts know them. `passing`: the next one replaces it.
        `wrong_steps`: newest steps whose numbers a rule counts; the newest checkpoint before them is not retired. `in_background`: return
        None when the actor has been asked; a thread waits for it and publishes, and `settle` tells.
        """
        self.store.good_until = step - wrong_steps
        facts: dict[str, Any] = {
            "metrics": {} if reward is None else {"reward": reward},
            "versions": {"policy": version, "digest": weights_digest},
            "passing": passing,
            "layout": {"backend": self._spec.actor.backend, "world_size": self._spec.actor.world_size},
            "spec_digest": digest(self._spec),
        }
        while True:
            try:
                writing = self._begin(step, actor, state, facts, in_background=in_background)
                if in_background:
                    self._writing = step, begin(partial(self._publish, writing))
                    return None
                path = self._publish(writing)
                self.last_step = step
                return path
            except StorageFull as error:
                if not self._make_room(error):
                    raise

    def settle(self, *, wait: bool = False) -> str | None:
        """Return the path of the checkpoint that was saved in the background, None when there is none or it is not published yet.

        `wait`: wait for it. Raises as `save`; the next attempt finds the room that could be made.
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
        if (gone := self.store.make_room()) is None:
            return False
        self._made_room = [*self._made_room[-9:], gone]
        logger.warning("%s is deleted before its time to make room: %s", gone, error)
        return True

    def _begin(
        self, step: int, actor: WorkerGroup, state: dict[str, Any], facts: dict[str, Any], *, in_background: bool
    ) -> "_Writing":
        """Write the runner's part and have the ranks begin theirs."""
        store = self.store
        staging = store.begin(step, self._epoch)
        try:
            self._write_state(staging, state)
            asked = {"in_background": True} if in_background else {}
            return _Writing(store, staging, actor.save_checkpoint(str(staging), step, **asked), facts)
        except RLJobError:
            store.abort(staging)
            raise

    def _publish(self, writing: "_Writing") -> str:
        """Publish what the ranks have written; a failure leaves earlier checkpoints as they were."""
        try:
            digests: dict[str, str] = {}
            for of_rank in writing.ranks.wait(self._spec.runtime.deadlines.group_method):
                digests |= of_rank or {}  # an actor that tells none leaves its files to the store
            published = writing.store.publish(writing.staging, digests=digests, **writing.facts)
        except RLJobError as error:
            writing.store.abort(writing.staging)
            if isinstance(error, WorkerErrors):
                raise as_one(error) from error
            raise
        return str(published.path)

    def _write_state(self, staging: Path, state: dict[str, Any]) -> None:
        try:
            history = {
                "output": os.path.relpath(self._output.resolve(), self.store.root.resolve()),
                "files": {name: asdict(tally.take()) for name, tally in self._tallies.items()},
            }
            whole = state | state_of(self._spec) | {"history": history}
            write_file(staging / STATE_FILE, json.dumps(whole, indent=1).encode())
        except OSError as error:
            raise write_failure("the runner's part of a checkpoint", staging, error) from error


def as_one(errors: WorkerErrors) -> RLJobError:
    """Return the failures of several ranks as one that says what to do: they write to the same storage."""
    inner = errors.exceptions
    lost = next((error for error in inner if isinstance(error, WorkerLost)), None)
    if lost is not None or not all(isinstance(error, InfrastructureError) for error in inner):
        return lost or errors
    full = any(isinstance(error, StorageFull) for error in inner)
    return (StorageFull if full else InfrastructureError)(errors.message)
