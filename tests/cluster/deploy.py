"""`make cluster`: two nodes, the images in their registry, the chart installed; `make cluster-down` removes all of it.

    python tests/cluster/deploy.py up [--state DIR]
    python tests/cluster/deploy.py down [--state DIR]

DIR (default `.cluster`) then holds `kubeconfig` and `bin/{kubectl,helm}`. `up` on a cluster that runs brings images and
chart up to date.
"""

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster.testcluster import packages
from tests.cluster.testcluster.cluster import Cluster
from tests.cluster.testcluster.errors import ClusterError

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "rljob"
NAMESPACE = "rljob-system"
RELEASE = "rljob"
NUM_NODES = 2
TOOLS = ("kubectl", "helm")
logger = logging.getLogger("cluster")


def up(folder: Path) -> None:
    """Start the cluster unless it runs, build and push the images, install the chart."""
    packages.install({**packages.CONTROL_PLANE, **packages.NODES, **packages.IMAGES})
    cluster = start(folder)
    images = push_images(cluster.state.addresses.registry)
    install_chart(folder, images)
    print(f"\nexport KUBECONFIG={folder / 'kubeconfig'} PATH={folder / 'bin'}:$PATH")
    print(f"kubectl apply -f {ROOT / 'examples' / 'arithmetic' / 'rljob.yaml'}; kubectl get rljobs -w")


def start(folder: Path) -> Cluster:
    """Start the cluster, or take the one that runs, and link its kubeconfig and tools."""
    cluster = Cluster(folder / "state")
    if cluster.state.exists:
        logger.info("a cluster is in %s already", folder)
    else:
        started = time.monotonic()
        cluster = Cluster.create(folder / "state", nodes=NUM_NODES)
        cluster.start_nodes()
        logger.info("%d nodes ready after %.1f s", NUM_NODES, time.monotonic() - started)
    (folder / "bin").mkdir(exist_ok=True)
    programs = Path(cluster.state.settings.programs)
    for link, target in [
        (folder / "kubeconfig", cluster.state.kubeconfig),
        *((folder / "bin" / tool, programs / tool) for tool in TOOLS),
    ]:
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    return cluster


def push_images(registry: str) -> dict[str, str]:
    """Build what is not built, push it; return the name pods give to each image."""
    command = [sys.executable, "-m", "worker_images.build", "--push", registry]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ClusterError(f"the images were not built: {' '.join(command)} ended with status {done.returncode}")
    return json.loads(done.stdout)


def install_chart(folder: Path, images: dict[str, str]) -> None:
    """Install or upgrade the release, and wait until the operator is ready."""
    values = [word for role, image in images.items() for word in ("--set", f"images.{role}={image}")]
    command = ["upgrade", RELEASE, str(CHART), "--install", "--namespace", NAMESPACE, "--create-namespace", "--wait"]
    environment = {**os.environ, "KUBECONFIG": str(folder / "kubeconfig")}
    done = subprocess.run([folder / "bin" / "helm", *command, *values], env=environment, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise ClusterError("the chart was not installed; what helm said is above")


def down(folder: Path) -> None:
    """Stop everything and remove the folder."""
    Cluster(folder / "state").down()
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["up", "down"])
    parser.add_argument("--state", type=Path, default=ROOT / ".cluster")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        {"up": up, "down": down}[options.command](options.state.resolve())
    except ClusterError as error:
        sys.exit(f"cluster: {error}")


if __name__ == "__main__":
    main()
