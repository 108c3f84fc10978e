"""How the engine is started for a job: its arguments, its variables, the model folder it reads."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.rollouts.sglang import cpu
from rl_core.transports.tokens import DIRECTORY

if TYPE_CHECKING:
    from rl_core.api.job import RLJobSpec

PREFIX, LOCK = "rljob-engine-", "lock"
"""Names of the engines' folders, and of the file in each that its worker holds locked."""
CONTEXT_MARGIN = 8
"""Tokens that the engine keeps free at the end of its context."""


class ModelFolder:
    """A folder with the model's configuration and tokenizer, for engines that read one; without weights, which come by sync."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Write `files`, and remove the folders of workers that were killed."""
        _remove_orphans()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = (self.path / LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for name, data in files.items():
            (self.path / name).write_bytes(data)

    def close(self) -> None:
        """Remove it."""
        _remove(self.path)
        self._lock.close()


def _remove(folder: Path) -> None:
    """Remove an engine's folder, and its file in memory if it was killed while it started."""
    shutil.rmtree(folder, ignore_errors=True)
    for file in DIRECTORY.glob(f"sglang_loads_{folder.name}_*"):
        file.unlink(missing_ok=True)


def _remove_orphans() -> None:
    """Remove this user's folders that no living worker has locked: a worker that is killed cannot remove its own."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        try:
            with lock.open("wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its worker lives, or is of another user
            continue
        _remove(lock.parent)


def options(spec: RLJobSpec, folder: Path, device: str, max_seq_len: int) -> dict[str, Any]:
    """Return the arguments of `sglang.Engine`."""
    context = max_seq_len + CONTEXT_MARGIN
    common: dict[str, Any] = {
        "model_path": str(folder),
        "load_format": "dummy",
        "dtype": spec.model.dtype,
        "context_length": context,
        "max_running_requests": spec.rollout.max_batch,
        "random_seed": spec.algorithm.seed,
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "log_level": "warning",
    }
    if spec.weights.on_update == "keep_kv":
        # Prefixes of other rows would be of older weights; a step that overlaps the update would count as one of the new ones.
        common |= {"disable_radix_cache": True, "disable_overlap_schedule": True}
    if device == "cpu":
        return common | cpu.options(max_batch=spec.rollout.max_batch, context=context)
    first = int(device.partition(":")[2] or 0)
    if spec.placement.mode != "disaggregated":
        # With a copy on the host, as weights that are not replaced meanwhile come back as they were.
        common |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    return common | {"device": "cuda", "base_gpu_id": first, "tp_size": spec.rollout.tensor_parallel}


def variables(folder: Path, device: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of the engine's processes."""
    found = {
        **environ,
        "TMPDIR": str(folder),
        "HF_HUB_OFFLINE": "1",
        # A dead scheduler is told of at once, not after a minute in which its dumps are waited for.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # the margin above may exceed what the model was made for
    }
    return found | (cpu.variables(environ.get("PYTHONPATH", "")) if device == "cpu" else {})
