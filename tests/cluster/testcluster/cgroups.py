"""Control groups of the nodes, in versions 1 (one tree per controller) and 2 (one tree)."""

import os
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
WEIGHT = 10
"""How many processes outside a cluster weighs as much as, when the processor is short; else all its pods are as one."""
_REMOVE_TRIES, _REMOVE_PAUSE_S = 250, 0.02


def create(path: str) -> None:
    """Make the group in every tree; the kubelet insists that its root is there."""
    for root in _trees():
        folder = root
        for part in path.split("/"):
            parent, folder = folder, folder / part
            folder.mkdir(exist_ok=True)
            _fill_cpuset(root, parent, folder)
            _pass_controllers_on(parent, folder)
            _weigh(folder)


def remove(path: str) -> None:
    """Remove the group and those below it, once their last processes have gone."""
    for root in _trees():
        if (root / path).is_dir():
            for folder, _, _ in os.walk(root / path, topdown=False):
                _remove(Path(folder))


def _trees() -> list[Path]:
    if (ROOT / "cgroup.controllers").exists():
        return [ROOT]
    return [folder for folder in ROOT.iterdir() if folder.is_dir() and not folder.is_symlink()]


def _fill_cpuset(root: Path, parent: Path, folder: Path) -> None:
    """Version 1: a new cpuset is empty, and then takes no process."""
    if root.name == "cpuset":
        for key in ("cpuset.cpus", "cpuset.mems"):
            if not (folder / key).read_text().strip():
                (folder / key).write_text((parent / key).read_text())


def _pass_controllers_on(parent: Path, folder: Path) -> None:
    """Version 2: a child has those controllers that its parent passes on."""
    if (folder / "cgroup.controllers").exists():
        have = (folder / "cgroup.controllers").read_text().split()
        wanted = [name for name in (parent / "cgroup.controllers").read_text().split() if name not in have]
        (parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in wanted))


def _weigh(folder: Path) -> None:
    for key in ("cpu.shares", "cpu.weight"):  # of versions 1 and 2
        if (folder / key).exists():
            default = 1024 if key == "cpu.shares" else 100
            (folder / key).write_text(str(WEIGHT * default))


def _remove(folder: Path) -> None:
    for _ in range(_REMOVE_TRIES):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # its last process is still going
            time.sleep(_REMOVE_PAUSE_S)
        else:
            return
