"""The Debian packages that the cluster runs: which are missing, and how they come."""

import logging
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping

from tests.cluster.testcluster.errors import ClusterError

logger = logging.getLogger(__name__)

# package -> a file it brings
CONTROL_PLANE: Mapping[str, str] = {"util-linux": "setpriv"}
NODES: Mapping[str, str] = {
    "runc": "runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "nftables": "nft",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "iproute2": "ip",
    "util-linux": "unshare",
    "busybox-static": "/bin/busybox",
}
IMAGES: Mapping[str, str] = {"buildah": "buildah", "debootstrap": "debootstrap"}
_SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def missing(packages: Mapping[str, str]) -> list[str]:
    """The packages whose file is not on this machine."""
    return [
        name for name, file in packages.items() if not shutil.which(file, path=_SEARCH) and not os.path.exists(file)
    ]


def require(packages: Mapping[str, str]) -> None:
    """Raise ClusterError, with the line to type, when a package is missing."""
    if absent := missing(packages):
        raise ClusterError(
            f"Debian packages are missing: {', '.join(absent)}\n"
            f"    sudo {' '.join(_install(absent))}\nor, as root: make cluster-deps"
        )


def install(packages: Mapping[str, str]) -> None:
    """Install what is missing. Raises ClusterError when that takes root and this is not root, or when apt-get fails."""
    absent = missing(packages)
    if not absent:
        return
    if os.geteuid() != 0:
        require(packages)
    logger.info("installing %s", " ".join(absent))
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update", "-qq"], _install(absent)):
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise ClusterError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")


def _install(names: Iterable[str]) -> list[str]:
    return ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *names]
