"""Compile the cluster's programs, once per content of their sources.

`programs()` returns a folder below ~/.cache/rljob/testcluster named by the hash of tests/cluster/go and of what is
below; it holds `testcluster`, `containerd-shim-runc-v2`, `pause`, and a link to `testcluster` per tool for people. The
folder appears whole or not at all, and only one process builds at a time.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from tests.cluster.testcluster import toolchain
from tests.cluster.testcluster.errors import ClusterError

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).resolve().parent.parent / "go"
TAGS = "no_btrfs,no_devmapper,no_zfs,grpcnotrace"  # parts of containerd that need C or are not used
TARGETS = {
    "testcluster": "./cmd/testcluster",
    # One runs beside every pod, so it must be small; and its plug-ins would clash with containerd's.
    "containerd-shim-runc-v2": "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
    "pause": "./cmd/pause",
}
LINKS = ("kubectl", "helm", "ctr")


def cache_folder() -> Path:
    """Where built programs are kept from one run to the next."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rljob" / "testcluster"


def content_hash() -> str:
    """Hash of everything the programs depend on."""
    digest = hashlib.sha256(f"{platform.machine()} {TAGS} {TARGETS} {LINKS}".encode())
    for path in sorted(SOURCES.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(SOURCES)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def is_built() -> bool:
    """Whether the programs of these sources are in the cache."""
    return (cache_folder() / content_hash()).is_dir()


def programs() -> Path:
    """Folder of the programs; builds them when they are not in the cache (10 minutes on 2 cores with empty caches)."""
    cache = cache_folder()
    folder = cache / content_hash()
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be building the same
        if not folder.is_dir():
            _build(cache, folder)
    return folder


def _build(cache: Path, folder: Path) -> None:
    logger.info("building the test cluster's programs; 10 minutes on 2 cores, seconds when Go has built them before")
    started = time.monotonic()
    go = toolchain.go(cache)
    environment = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "auto", "GOFLAGS": "-mod=readonly"}
    temporary = Path(tempfile.mkdtemp(dir=cache, prefix="building-"))
    try:
        flags = _version_flags(go, environment)
        for name, package in TARGETS.items():
            linker = f"-s -w {flags}" if name == "testcluster" else "-s -w"
            _run(go, "build", "-trimpath", "-tags", TAGS, "-ldflags", linker, "-o", str(temporary / name), package,
                 environment=environment)  # fmt: skip
        for name in LINKS:
            (temporary / name).symlink_to("testcluster")
        temporary.chmod(0o755)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    logger.info("built in %.0f s: %s", time.monotonic() - started, folder)


def _version_flags(go: str, environment: dict[str, str]) -> str:
    """Kubernetes says v0.0.0 unless the linker is told the version."""
    version = _run(go, "list", "-m", "-f", "{{.Version}}", "k8s.io/kubernetes", environment=environment)
    major, minor, _ = version.removeprefix("v").split(".", 2)
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return " ".join(f"-X k8s.io/component-base/version.{name}={value}" for name, value in values.items())


def _run(*command: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=SOURCES, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise ClusterError(f"{' '.join(command)} failed in {SOURCES}:\n{done.stderr.strip()}")
    return done.stdout.strip()
