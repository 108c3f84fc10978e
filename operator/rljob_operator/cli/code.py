"""The user's modules as a ConfigMap (`rljob submit --code DIR`): bounded, checked, named by content."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from rl_core.api.errors import ConfigError
from rljob_operator.cli.connection import Json

MAX_BYTES = 1024 * 1024
"""What the API server takes in one ConfigMap."""
ROOM = 16 * 1024
"""Of that, left for names and metadata."""
SKIPPED = ("__pycache__", ".pyc")


def config_map(folder: Path, *, job: str, owner: Json | None = None) -> Json:
    """Return the ConfigMap of the files right below `folder`, hidden ones and caches left out.

    `owner`: the job's metadata; None before the job exists. Raises ConfigError for a folder that is empty, too big or nested.
    """
    files = _files(folder)
    size = sum(path.stat().st_size for path in files)
    if size > MAX_BYTES - ROOM:
        largest = max(files, key=lambda path: path.stat().st_size)
        raise ConfigError(
            f"--code must be at most {(MAX_BYTES - ROOM) // 1024} KiB, got {size // 1024} KiB in {folder} "
            f"(largest: {largest.name}); leave data out, or put the code into an image"
        )
    text, binary, digest = {}, {}, hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(path.name.encode() + b"\0" + content + b"\0")
        try:
            text[path.name] = content.decode()
        except UnicodeDecodeError:
            binary[path.name] = base64.b64encode(content).decode()
    body: Json = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{job}-code-{digest.hexdigest()[:8]}",
            "labels": {"app.kubernetes.io/name": "rljob", "app.kubernetes.io/instance": job},
        },
        "data": text,
    }
    if binary:
        body["binaryData"] = binary
    if owner is not None:
        body["metadata"]["ownerReferences"] = [
            {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "name": owner["name"], "uid": owner["uid"]}
        ]
    return body


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"--code must be a folder of Python modules, got {folder}; check the path")
    entries = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and not _cache(path)]
    packages = [path.name for path in entries if path.is_dir() and any(path.rglob("*.py"))]
    if packages:
        raise ConfigError(
            f"--code must hold modules right below {folder}, as a ConfigMap has no folders, got {', '.join(packages)}; "
            "flatten them, or put the code into an image"
        )
    files = [path for path in entries if path.is_file()]
    if not files:
        raise ConfigError(f"--code must hold at least one file, got none in {folder}; check the path")
    return files


def _cache(path: Path) -> bool:
    return path.name.endswith(SKIPPED)
