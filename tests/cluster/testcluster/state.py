"""The folder that holds all a cluster has: its settings, keys, logs, data and the numbers of its processes."""

import json
import os
import secrets
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.cluster.testcluster import procfs
from tests.cluster.testcluster.addresses import Addresses
from tests.cluster.testcluster.errors import ClusterError

REMOVED = ".removed"
"""End of the name of a folder that is being removed."""


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

    def remove(self, *, wait: bool) -> None:
        """Remove the folder, in the background unless `wait`: the disks of nodes have hundreds of thousands of files.

        The folder is renamed first, so that no cluster is here any more. `remove_rests` removes what an interrupted removal leaves.
        """
        rest = self.folder.with_name(f"{self.folder.name}-{secrets.token_hex(2)}{REMOVED}")
        self.folder.rename(rest)
        _remove(rest, wait=wait)


def remove_rests(folder: Path) -> None:
    """Go on, in the background, with removals of clusters below a folder that were interrupted."""
    for rest in folder.glob(f"*{REMOVED}"):
        _remove(rest, wait=False)


def _remove(folder: Path, *, wait: bool) -> None:
    command = ["nice", "rm", "-rf", str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    if wait:
        process.wait()
    else:
        process.returncode = 0  # nobody asks how it ends, and it may outlive this process
