"""`python -m tests.cluster.testcluster`: the cluster from a shell."""

import argparse
import logging
import os
import sys
import time
from pathlib import Path

from tests.cluster.testcluster import build, images, packages
from tests.cluster.testcluster.addresses import REGISTRY
from tests.cluster.testcluster.cluster import Cluster
from tests.cluster.testcluster.errors import ClusterError

DEFAULT_STATE = ".cluster/default"


def main(arguments: list[str] | None = None) -> None:
    """Run one command; ends the process with status 1 and a message when it fails."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except ClusterError as error:
        sys.exit(f"testcluster: {error}")


def up(options: argparse.Namespace) -> None:
    """Start a cluster."""
    started = time.monotonic()
    cluster = Cluster.create(
        options.state,
        nodes=0 if options.control_plane_only else options.nodes,
        index=options.index,
        fake_gpus=options.fake_gpus,
        fake_dra_gpus=options.fake_dra_gpus,
        api_server_args=options.api_server_arg,
        controller_manager_args=options.controller_manager_arg,
        scheduler_args=options.scheduler_arg,
    )
    print(f"control plane ready after {time.monotonic() - started:.1f} s")
    if options.kwok:
        cluster.kwok.start()
    if cluster.nodes:
        cluster.start_nodes()
        print(f"{len(cluster.nodes)} nodes ready after {time.monotonic() - started:.1f} s")
        print(f"push images to {cluster.state.addresses.registry}/NAME (no TLS), run them as {REGISTRY}/NAME")
    print(f"export KUBECONFIG={cluster.state.kubeconfig}")


def down(options: argparse.Namespace) -> None:
    """Stop the cluster and remove its state."""
    Cluster(options.state).down()


def status(options: argparse.Namespace) -> None:
    """Say what runs and how much memory it takes."""
    cluster = Cluster(options.state)
    print(cluster.status() if cluster.state.exists else f"no cluster in {cluster.state.folder}")


def load(options: argparse.Namespace) -> None:
    """Import image archives into nodes."""
    Cluster(options.state).load([Path(archive) for archive in options.archive], nodes=options.node)


def node(options: argparse.Namespace) -> None:
    """Cut a node's power, or switch it on again."""
    chosen = Cluster(options.state).node(options.name)
    if options.action == "kill":
        chosen.kill()
    else:
        chosen.start()
        chosen.wait_ready()


def execute(options: argparse.Namespace) -> None:
    """Run a command inside a node."""
    command = Cluster(options.state).node(options.name).command(*options.words)
    os.execvp(command[0], command)


def busybox(options: argparse.Namespace) -> None:
    """Write the archive of a busybox image."""
    images.write_busybox(Path(options.archive))


def compile_programs(_options: argparse.Namespace) -> None:
    """Compile the programs, if that was not done for these sources."""
    print(build.programs())


def install(_options: argparse.Namespace) -> None:
    """Install the Debian packages that are missing (as root)."""
    packages.install({**packages.CONTROL_PLANE, **packages.NODES, **packages.IMAGES})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.testcluster", description=sys.modules[__package__].__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--state", default=DEFAULT_STATE, help="folder of the cluster's state (default: %(default)s)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: object) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
        return command

    start = add("up", up)
    start.add_argument("--nodes", type=int, default=2, help="how many nodes (default: %(default)s)")
    start.add_argument("--control-plane-only", action="store_true", help="no nodes; needs no root")
    start.add_argument("--index", type=int, help="0 to 99: the cluster's addresses (default: the first free)")
    start.add_argument("--fake-gpus", type=int, default=0, help="nvidia.com/gpu of each node, by a device plugin")
    start.add_argument("--fake-dra-gpus", type=int, default=0, help="gpu.example.com devices of each node, by DRA")
    start.add_argument("--kwok", action="store_true", help="also look after fake nodes")
    start.add_argument("--api-server-arg", action="append", default=[], metavar="--FLAG=VALUE")
    start.add_argument("--controller-manager-arg", action="append", default=[], metavar="--FLAG=VALUE")
    start.add_argument("--scheduler-arg", action="append", default=[], metavar="--FLAG=VALUE")
    add("down", down)
    add("status", status)
    archives = add("load", load)
    archives.add_argument("archive", nargs="+")
    archives.add_argument("--node", action="append", default=[], help="only into this node; can be repeated")
    power = add("node", node)
    power.add_argument("action", choices=["kill", "start"])
    power.add_argument("name")
    inside = add("exec", execute)
    inside.add_argument("name")
    inside.add_argument("words", nargs=argparse.REMAINDER)
    add("busybox", busybox).add_argument("archive")
    add("build", compile_programs)
    add("deps", install)
    return parser
