"""How the ranks of an actor find each other: the shared store, the process group, and the network interface on which they listen.

Store and gloo do not authenticate who connects, so they listen only on the interface that leads to MASTER_ADDR.
"""

import logging
import os
import resource
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from rl_core.api.errors import ConfigError, InfrastructureError

logger = logging.getLogger(__name__)

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the name of the interface on which gloo listens. Gloo reads it when a group is created."""
LOOPBACK = "127.0.0.1"
RESOLVE_SECONDS = 0.5
"""Pause between two attempts to resolve MASTER_ADDR, whose DNS record may come after the process."""


class Rendezvous(NamedTuple):
    """The store and the address of a rank that has joined the process group."""

    store: dist.Store
    address: str
    """IP address of this rank on the network of the ranks."""

    def group(self, members: Sequence[int]) -> Any:
        """Return a process group of the ranks `members`. Every rank must create every group, in the same order."""
        with self.listening():
            return dist.new_group(list(members))

    def listening(self) -> AbstractContextManager[None]:
        """Return a context manager inside which new process groups listen on this rank's address."""
        return _listening_on(self.address)


_joined: dict[int, Rendezvous] = {}
"""The rendezvous of this process by world size. A process joins one process group in its life; later calls of `join` return it."""


def join(size: int, rank: int, device: torch.device, timeout: float) -> Rendezvous:
    """Join the process group of `size` ranks and wait until all have joined. `timeout` is in seconds.

    A group of one rank, which only FSDP1 in half precision needs, is created on loopback. Raises ConfigError without MASTER_ADDR and
    MASTER_PORT and when this process has another process group, and InfrastructureError when the ranks do not find each other.
    """
    limit = timedelta(seconds=timeout)
    if dist.is_initialized():
        if size not in _joined or dist.get_rank() != rank:
            raise ConfigError(
                f"this process must have no process group but that of actor rank {rank} of {size}, got one as rank {dist.get_rank()} of "
                f"{dist.get_world_size()}; make none beside it"
            )
        return _joined[size]
    _raise_file_limit()
    rendezvous = Rendezvous(dist.HashStore(), LOOPBACK) if size == 1 else _connect(size, rank, limit)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        with _listening_on(rendezvous.address):
            dist.init_process_group(backend, store=rendezvous.store, rank=rank, world_size=size, timeout=limit)
    except (dist.DistError, RuntimeError) as error:
        raise InfrastructureError(f"actor rank {rank} of {size} could not join the process group: {error}") from error
    _joined[size] = rendezvous
    return rendezvous


def limit_collectives(seconds: float) -> None:
    """Set the timeout of all later collectives, in every process group that this process is in, whichever library created it."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.set_timeout(timedelta(seconds=seconds), group)


def _connect(size: int, rank: int, limit: timedelta) -> Rendezvous:
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"MASTER_ADDR and MASTER_PORT must be set for {size} actor ranks: {error}; start through the launcher"
        ) from error
    try:
        address = _address_towards(host, port, limit)
        listener = _listen(address, port) if rank == 0 else None
        store = dist.TCPStore(
            address if rank == 0 else host,
            port,
            size,
            is_master=rank == 0,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        store.set(f"rljob/joined/{rank}", "1")
    except (dist.DistError, RuntimeError, OSError) as error:
        raise InfrastructureError(
            f"actor rank {rank} of {size} did not reach rank 0 at {host}:{port}: {error}"
        ) from error
    _await_all(store, size, rank, limit)
    return Rendezvous(store, address)


def _await_all(store: dist.Store, size: int, rank: int, limit: timedelta) -> None:
    keys = [f"rljob/joined/{peer}" for peer in range(size)]
    try:
        store.wait(keys, limit)
    except dist.DistError as error:
        missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
        raise InfrastructureError(
            f"actor rank {rank} of {size} waited {limit.total_seconds():.0f} s for ranks {', '.join(map(str, missing))}; they did not start"
        ) from error


def _address_towards(host: str, port: int, limit: timedelta) -> str:
    """Return the local address from which `host` is reached. Raises OSError when its name is not known within `limit`."""
    deadline = time.monotonic() + limit.total_seconds()
    while True:
        try:
            family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            break
        except socket.gaierror:
            if time.monotonic() > deadline:
                raise
            time.sleep(RESOLVE_SECONDS)
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing: a datagram socket only chooses its route
        return str(probe.getsockname()[0])


def _listen(address: str, port: int) -> int:
    """Return the descriptor of a socket that listens on `address` alone; the store takes it over."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family, backlog=2048) as listener:
        return listener.detach()


@contextmanager
def _listening_on(address: str) -> Iterator[None]:
    """Have gloo listen on the interface that has `address`, unless the environment names one.

    The variable is put back: process groups made later, such as that of the weights, choose for themselves.
    """
    names = [
        name for name, addresses in psutil.net_if_addrs().items() if address in {entry.address for entry in addresses}
    ]
    if INTERFACE in os.environ or not names:
        if not names:
            logger.warning("no interface has the address %s; gloo chooses where it listens", address)
        yield
        return
    os.environ[INTERFACE] = names[0]
    try:
        yield
    finally:
        del os.environ[INTERFACE]


def _raise_file_limit() -> None:
    """Let this process have as many open files as the system allows: gloo aborts it when it can accept no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        logger.debug("open files: %s instead of %s", hard, soft)
