"""A copy of the output folder of a job that runs on a cluster, for the commands that read such a folder.

The copy holds the files that the runner hands out (rl_core/runner/output_files.py) and, as `status.json`, the answer of its `/status`.
"""

import base64
import json
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rl_core.api.errors import InfrastructureError, RLJobError
from rl_core.cli import targets
from rl_core.runner.output_files import ANSWER_BYTES, PATTERNS, end_checksum, is_served

REFRESH_SECONDS = 5.0
Ask = Callable[[dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]
"""Sends the body of `POST /files`; returns the answers to `GET /status` and to this call."""


class CopiedOutput:
    """Keeps a folder equal to the output folder of a run."""

    def __init__(self, ask: Ask, folder: Path, *, only: Sequence[str] = tuple(PATTERNS)) -> None:
        """Copy the folders `only` of PATTERNS into `folder`, which is made. Nothing is copied before `refresh`."""
        self._ask, self._folder, self._folder_names = ask, folder, only
        for name in only:
            (folder / name).mkdir(parents=True, exist_ok=True)

    def refresh(self) -> None:
        """Copy what the run has written since the last call, and delete what it has deleted.

        Raises ConfigError or InfrastructureError when the runner does not answer.
        """
        while True:
            status, answer = self._ask({"have": self._have(), "folders": list(self._folder_names)})
            self._replace("status.json", json.dumps(status).encode())
            try:
                sizes = {str(name): int(size) for name, size in answer["sizes"].items()}
                parts = [(str(part["name"]), int(part["offset"]), _unpacked(part["data"])) for part in answer["parts"]]
            except (AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
                raise InfrastructureError(
                    f"the runner must answer with sizes and parts of its files, got {type(error).__name__}: {error}; use the rljob of its version"
                ) from error
            for name, offset, data in parts:
                self._write(name, offset, data)
            local_sizes = self._sizes()
            for name in local_sizes.keys() - sizes.keys():
                (self._folder / name).unlink()
            if not parts or all(local_sizes.get(name, 0) >= size for name, size in sizes.items()):
                return

    def follow(self, ended: threading.Event) -> None:
        """Refresh until `ended`. A failure is written to stderr, once as long as it stays the same, and tried again."""
        complaint = ""
        while not ended.wait(REFRESH_SECONDS):
            try:
                self.refresh()
                complaint = ""
            except (RLJobError, OSError) as error:
                if str(error) != complaint:
                    complaint = str(error)
                    sys.stderr.write(f"rljob: the page of {self._folder.name} shows its last copy: {error}\n")

    def _sizes(self) -> dict[str, int]:
        """Return the bytes of each copied file."""
        sizes = {}
        for folder in self._folder_names:
            for path in (self._folder / folder).iterdir():
                name = f"{folder}/{path.name}" if folder else path.name
                if is_served(name):
                    sizes[name] = path.stat().st_size
        return sizes

    def _have(self) -> dict[str, list[Any]]:
        local_files: dict[str, list[Any]] = {}
        for name, size in self._sizes().items():
            with (self._folder / name).open("rb") as file:
                local_files[name] = [size, end_checksum(file, size)]
        return local_files

    def _write(self, name: str, offset: int, data: bytes) -> None:
        """Append a part, or begin the file anew with a part from its beginning. The name comes from the runner and is checked."""
        path = self._folder / name
        if not is_served(name) or not path.parent.is_dir():
            raise InfrastructureError(f"the runner must name files that were asked for, got {name[:80]!r}")
        if offset == 0:
            self._replace(name, data)  # The file is replaced, not overwritten, so that a reader notices.
            return
        with path.open("ab") as file:
            if file.tell() != offset:
                raise InfrastructureError(
                    f"the part of {name} must begin at byte {file.tell()}, got byte {offset}; try again"
                )
            file.write(data)

    def _replace(self, name: str, data: bytes) -> None:
        temporary = self._folder / f"{name}.new"
        temporary.write_bytes(data)
        temporary.replace(self._folder / name)


def _unpacked(data: str) -> bytes:
    return zlib.decompressobj().decompress(base64.b64decode(data, validate=True), ANSWER_BYTES)


@contextmanager
def readable_run(
    target: str, place: targets.Place, *, only: Sequence[str] = tuple(PATTERNS)
) -> Iterator[tuple[Path, CopiedOutput | None]]:
    """Yield the output folder `target`, or a copy of that of the job `target` together with the CopiedOutput that refreshes it.

    The copy is in a temporary folder that only this user may read, and is deleted at the end. Raises ConfigError for a job that does not
    exist or has no runner.
    """
    folder = targets.folder_of(target)
    if folder is not None:
        yield folder, None
        return
    ask = targets.cluster(target).files(target, place)
    with TemporaryDirectory(prefix="rljob-") as temporary:
        copied = CopiedOutput(ask, Path(temporary) / target, only=only)
        copied.refresh()
        yield Path(temporary) / target, copied
