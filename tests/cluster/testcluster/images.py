"""Image archives of static programs without an image builder, and loading of archives into nodes."""

import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.cluster.testcluster.commands import run
from tests.cluster.testcluster.errors import ClusterError
from tests.cluster.testcluster.node import Node
from tests.cluster.testcluster.node_config import PAUSE_IMAGE

BUSYBOX_IMAGE = "localhost/busybox:1"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def load(archives: Iterable[Path], nodes: Iterable[Node], *, programs: str) -> None:
    """Import archives (docker or OCI form) into nodes, all at once. Raises ClusterError when one fails."""
    ctr = [f"{programs}/testcluster", "ctr", "-n", "k8s.io", "images", "import", "--local"]
    jobs = {
        (node.name, archive): subprocess.Popen(
            node.command(*ctr, archive.resolve()), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for node in nodes
        for archive in archives
    }
    errors = {key: job.communicate()[1] for key, job in jobs.items()}
    if failed := [f"{archive} into {node}: {errors[node, archive].strip()}"
                  for (node, archive), job in jobs.items() if job.returncode]:  # fmt: skip
        raise ClusterError("images could not be imported\n" + "\n".join(failed))


def write_pause(path: Path, *, programs: str) -> None:
    """Write the archive of the image that holds a pod's namespaces."""
    write_archive(PAUSE_IMAGE, path, {"pause": Path(programs, "pause")}, entrypoint=["/pause"])


def write_busybox(path: Path) -> None:
    """Write the archive of BUSYBOX_IMAGE: the machine's static busybox with a link per applet."""
    busybox = Path("/bin/busybox")
    applets = run(busybox, "--list").split()
    links = {f"bin/{applet}": "busybox" for applet in applets if applet != "busybox"}
    write_archive(BUSYBOX_IMAGE, path, {"bin/busybox": busybox}, links=links)


def write_archive(
    name: str,
    path: Path,
    programs: Mapping[str, Path],
    *,
    links: Mapping[str, str] | None = None,
    entrypoint: list[str] | None = None,
) -> None:
    """Write an image of one layer in the form of `docker save`.

    `programs` maps a path in the image to a file here, `links` a path to what it points to.
    """
    layer = _layer(programs, links or {})
    config = {
        "architecture": _MACHINES[os.uname().machine],
        "os": "linux",
        "config": {"Entrypoint": entrypoint, "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as tar:
        _add(tar, "layer.tar", layer)
        _add(tar, "config.json", json.dumps(config).encode())
        _add(tar, "manifest.json", json.dumps(manifest).encode())


def _layer(programs: Mapping[str, Path], links: Mapping[str, str]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for folder, mode in (("tmp", 0o1777), ("etc", 0o755), ("bin", 0o755)):
            _add(tar, folder, mode=mode, type=tarfile.DIRTYPE)
        _add(tar, "etc/passwd", b"root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n")
        _add(tar, "etc/group", b"root:x:0:\nuser:x:1000:\n")
        for destination, source in programs.items():
            _add(tar, destination, source.read_bytes(), mode=0o755)
        for destination, target in links.items():
            _add(tar, destination, type=tarfile.SYMTYPE, linkname=target)
    return content.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes = b"", *, mode: int = 0o644, **attributes: object) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), mode
    for key, value in attributes.items():
        setattr(member, key, value)
    tar.addfile(member, io.BytesIO(data))
