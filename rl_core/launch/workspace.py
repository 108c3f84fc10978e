"""The files of a local run in its output folder: lock, keys, logs, the resolved job, `status.json`."""

import fcntl
import json
import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rl_core.api.errors import ConfigError
from rl_core.plan import keys
from rl_core.plan.groups import BUILT_IN
from rl_core.plan.launch import PodPlan
from rl_core.runner.history import write_json

if TYPE_CHECKING:
    from rl_core.api.job import RLJob

logger = logging.getLogger(__name__)

FINAL_PHASES = ("Finished", "Failed", "Suspended")
INTERRUPTED = 130
"""Exit code of a run that was asked to stop."""
TERMINATED = "SIGTERM: "
"""Beginning of the failure message of a runner that got SIGTERM. The runner does not know the reason; the launcher does."""
LOCK_SECONDS = 0.2
"""Seconds that a run waits for the lock of its folder; `is_abandoned` holds it for a moment."""
PRIVATE = ".rljob"
"""Folder for keys, pod plans and the resolved job, inside the output folder."""


def stored_job(folder: Path) -> dict[str, Any]:
    """Return the resolved job of the run in `folder`; empty where there is none."""
    try:
        document = json.loads((folder / PRIVATE / "job.json").read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def is_abandoned(folder: Path) -> bool:
    """Return whether no launcher holds the lock of a run's folder: the run has ended, or was killed with its launcher.

    False where the lock file cannot be opened.
    """
    try:
        with (folder / PRIVATE / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _lock_within(file: IO[str], seconds: float) -> bool:
    """Return whether the lock was acquired within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(seconds / 20)
        else:
            return True


class Workspace:
    """Paths and files of one run; `lock` before anything is written, `open` before anything is started, `close` when all has ended."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).resolve()
        self.private = self.folder / PRIVATE
        self.key_folder = self.private / "keys"
        self.token_file = self.key_folder / keys.TOKEN_FILE
        self.job_file = self.private / "job.json"
        """File of the resolved job."""
        self.config: Path | None = None
        """File of the resolved job where `open` wrote it, else None."""
        self._lock: IO[str] | None = None

    def lock(self) -> None:
        """Lock the folder against other runs. The folder is created; nothing else is written.

        Raises ConfigError when another run uses the folder or it cannot be written.
        """
        if self._lock is not None:
            return
        try:
            self.private.mkdir(parents=True, exist_ok=True)
            file = (self.private / "lock").open("w")
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            free = _lock_within(file, LOCK_SECONDS)
        except OSError as error:
            file.close()
            raise self._unwritable(error) from error
        if not free:
            file.close()
            raise ConfigError(f"{self.folder} is in use by another run; choose another folder with --output")
        self._lock = file

    def open(self, *, uid: str, job: "RLJob | None", groups: Iterable[str] = BUILT_IN) -> None:
        """Lock and make the folders, write missing keys and `job`; `groups` have keys of their own.

        Raises ConfigError when the folder cannot be used.
        """
        self.lock()
        try:
            (self.folder / "logs").mkdir(exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error
        if not self.token_file.is_file():
            keys.write_key_folder(self.key_folder, keys.key_files(secrets.token_bytes(keys.MASTER_BYTES), uid, groups))
        if job is not None:
            self.config = self.job_file
            self.config.write_text(job.model_dump_json(by_alias=True))

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(f"the output folder {self.folder} must be writable, got: {error.strerror}")

    def close(self) -> None:
        """Let another run use the folder."""
        if self._lock is not None:
            self._lock.close()

    def plan_file(self, pod: PodPlan) -> Path:
        """Return where the plan of a pod is written for its supervisor."""
        return self.private / f"{pod.role}-{pod.index}.json"

    def log_file(self, pod: PodPlan) -> Path:
        """Return where all output of a pod goes."""
        return self.folder / "logs" / f"{pod.role}-{pod.index}.log"

    def read_status(self) -> dict[str, Any]:
        """Return the last written status; empty when there is none."""
        try:
            status = json.loads((self.folder / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return status if isinstance(status, dict) else {}

    def write_status(self, status: Mapping[str, Any], *, restarts: int) -> None:
        """Replace the status; a full disk is logged and does not end the run."""
        try:
            write_json(self.folder / "status.json", {**status, "restarts": restarts})
        except OSError as error:
            logger.warning("status.json could not be written: %s", error)

    def is_final(self, epoch: int) -> bool:
        """Return whether the runner of `epoch` has written its final status."""
        status = self.read_status()
        return status.get("phase") in FINAL_PHASES and status.get("epoch") == epoch

    def final_status(self, code: int | None, failure: str, *, epoch: int) -> dict[str, Any]:
        """Return the final status of a run that ended with exit code `code`, also where the runner could not write one."""
        status = self.read_status() or {"schema": 1, "epoch": epoch, "step": 0}
        if code == 0:
            status["phase"] = "Suspended" if status.get("phase") == "Suspended" else "Finished"
        elif code != INTERRUPTED or status.get("phase") not in FINAL_PHASES:
            status["phase"] = "Failed"
        elif status["phase"] == "Finished" and status.get("step", 0) < status.get("totalSteps", 0):
            status["phase"] = "Suspended"  # The run was asked to end and has saved; `--resume auto` continues it.
        runner_failure = status.get("failure") or {}
        if code not in (0, INTERRUPTED) and failure and str(runner_failure.get("message")).startswith(TERMINATED):
            status["failure"] = {**runner_failure, "message": f"{failure}; {runner_failure['message']}"}
        if code != 0 and not runner_failure:
            kind, message = "Interrupted" if code == INTERRUPTED else "", failure or "the launcher failed"
            status["failure"] = {"type": kind, "message": message, "exitCode": code}
        return status
