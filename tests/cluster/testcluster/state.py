"""The folder that holds all a cluster has: its settings, keys, logs, data and the numbers of its processes."""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.cluster.testcluster import procfs
from tests.cluster.testcluster.addresses import Addresses
from tests.cluster.testcluster.errors import ClusterError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was decided when the cluster was made."""

    programs: str
    """Folder of the built programs."""
    index: int
    nodes: tuple[str, ...] = ()
    """Names of the nodes the cluster can have; empty for a control plane alone."""
    server: str
    """URL of the API server."""
    etcd: str
    """URL of etcd."""
    fake_gpus: int = 0
    """`nvidia.com/gpu` of each node, by the fake device plugin."""
    fake_dra_gpus: int = 0
    """`gpu.example.com` devices of each node, by the fake DRA driver."""
    volumes: int = 8
    """Static local volumes of each node."""
    owner: procfs.Identity | None = None
    """The process the cluster must not outlive; None: it runs until it is taken down."""


class State:
    """Paths below one folder, and the settings in it."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).resolve()
        self.logs = self.folder / "logs"
        self.pki = self.folder / "pki"
        self.kubeconfig = self.folder / "kubeconfig"
        self.nodes = self.folder / "nodes"
        self.processes = self.folder / "processes"
        self._file = self.folder / "cluster.json"

    @property
    def exists(self) -> bool:
        """Whether a cluster was made here and not taken down."""
        return self._file.exists()

    @property
    def settings(self) -> Settings:
        """Read the settings. Raises ClusterError when there is no cluster."""
        if not self.exists:
            raise ClusterError(f"{self.folder}: no cluster is here; start one with `up`")
        values = json.loads(self._file.read_text())
        owner = values.pop("owner")
        return Settings(**{**values, "nodes": tuple(values["nodes"])}, owner=owner and procfs.Identity(**owner))

    @property
    def addresses(self) -> Addresses:
        """The addresses of the cluster."""
        return Addresses(self.settings.index)

    def create(self, settings: Settings) -> None:
        """Make the folder; it holds keys, so that only its user may look into it."""
        for folder in (self.folder, self.logs, self.pki, self.nodes, self.processes):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(settings), indent=1))
        os.replace(temporary, self._file)

    def node(self, name: str) -> Path:
        """The folder of a node: its disk and its settings."""
        return self.nodes / name

    def remove(self) -> None:
        """Remove the folder; the settings go last, so that a removal that is interrupted can be done again."""
        for entry in self.folder.iterdir():
            if entry != self._file:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        shutil.rmtree(self.folder)
