"""The manifest of a checkpoint lists its files. It is written last: a checkpoint with a manifest is complete. Imports no torch."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import blake3

from rl_core.api.errors import DataError
from rl_core.checkpoint.files import file_digest, relative_files

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    bytes: int
    digest: str
    """BLAKE3, hexadecimal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of `manifest.json`."""

    step: int
    epoch: int
    files: dict[str, FileEntry]
    """Path relative to the checkpoint, "/" as separator -> size and digest."""
    layout: dict[str, Any] = field(default_factory=dict)
    """Parallel layout that wrote the tensors: backend, world size."""
    versions: dict[str, Any] = field(default_factory=dict)
    """Versions of libraries and of the weights."""
    spec_digest: str = ""
    """Digest of the spec fields that change the result of training."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics by which `best()` and retention choose."""
    passing: bool = False
    """Whether retention may delete it as soon as there is a newer checkpoint."""

    @classmethod
    def of_folder(
        cls, folder: Path, *, step: int, epoch: int, digests: Mapping[str, str] | None = None, **details: Any
    ) -> "Manifest":
        """Return the manifest of the files that lie in `folder`; digests that are not in `digests` (name -> digest) are computed here."""
        known_digests = digests or {}
        files = {
            name: FileEntry(bytes=path.stat().st_size, digest=known_digests.get(name) or file_digest(path))
            for name, path in relative_files(folder)
            if name != MANIFEST
        }
        return cls(step=step, epoch=epoch, files=files, **details)

    def encode(self) -> bytes:
        """Return the JSON text, keys sorted; `digest` is that of all other fields, so that the manifest's own damage is found."""
        fields = {"format": FORMAT} | asdict(self)
        return json.dumps(fields | {"digest": _digest(fields)}, indent=1, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes, *, where: Path) -> "Manifest":
        """Return the manifest in `data`, read from the path `where`. Raises DataError if it is invalid."""
        try:
            fields: dict[str, Any] = json.loads(data)
            stored_digest = fields.pop("digest", None)  # absent in one of an earlier release
            if stored_digest not in (None, _digest(fields)):
                raise DataError(f"{where} must match its own digest, got a changed one; resume from another checkpoint")
            version = fields.pop("format")
            if version != FORMAT:
                raise DataError(
                    f"{where} must have format {FORMAT}, got {version!r}; read it with the version of rljob that wrote it"
                )
            entries: Mapping[str, Mapping[str, Any]] = fields.pop("files")
            # A later version may write more fields, which this version does not need.
            field_names = {own_field.name for own_field in dataclass_fields(cls)}
            return cls(
                files={
                    name: FileEntry(bytes=entry["bytes"], digest=entry["digest"]) for name, entry in entries.items()
                },
                **{name: value for name, value in fields.items() if name in field_names},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{where} must be a checkpoint manifest, got {data[:80]!r}: {error}; remove the folder"
            ) from error

    def damage(self, folder: Path) -> str | None:
        """Return a text about the first file that is missing or has another size; None if all sizes are correct.

        Digests are not checked.
        """
        for name, entry in self.files.items():
            path = folder / name
            if not path.is_file():
                return f"file {name} is missing"
            size = path.stat().st_size
            if size != entry.bytes:
                return f"file {name} has {size} bytes instead of {entry.bytes}"
        return None

    def verify(self, folder: Path, names: tuple[str, ...] | None = None) -> None:
        """Check the digests of the files `names` (None: of all files). Raises DataError with the first file that differs."""
        damage = self.flaw(folder, names)
        if damage is not None:
            raise DataError(f"checkpoint {folder} is damaged: {damage}; resume from another one")

    def flaw(self, folder: Path, names: tuple[str, ...] | None = None) -> str | None:
        """As `damage`, but also check the digests of the files `names` (None: of all files)."""
        damage = self.damage(folder)
        if damage is not None:
            return damage
        for name in self.files if names is None else names:
            digest = file_digest(folder / name)
            if digest != self.files[name].digest:
                return f"file {name} has digest {digest} instead of {self.files[name].digest}"
        return None


def _digest(fields: Mapping[str, Any]) -> str:
    return blake3.blake3(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint folder.

    Raises FileNotFoundError when there is none, DataError when it cannot be read.
    """
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"{folder} must hold {MANIFEST}, got no such file; give the folder of a complete checkpoint"
        ) from error
    return Manifest.decode(data, where=path)
