"""Free TCP ports of this machine for a local run."""

import random
import socket
from dataclasses import fields
from pathlib import Path

from rl_core.api.errors import InfrastructureError
from rl_core.plan.launch import Ports

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 10_000
_TRIES = 1_000


def free_ports(host: str = "127.0.0.1") -> Ports:
    """Return ports that were free a moment ago, all different.

    They are below the kernel's range of ephemeral ports. The kernel therefore does not give one of them to another process before the run
    binds it, and a process that connects before the server listens cannot connect to itself (TCP self-connect).
    """
    names = [field.name for field in fields(Ports)]
    first, last = _FIRST, _first_ephemeral() - 1
    ports: list[int] = []
    for _ in range(_TRIES):
        port = random.randint(first, last)
        if port not in ports and _is_free(host, port):
            ports.append(port)
        if len(ports) == len(names):
            return Ports(**dict(zip(names, ports, strict=True)))
    raise InfrastructureError(
        f"{len(names)} free ports are needed between {first} and {last}, got {len(ports)}; end what holds them"
    )


def _first_ephemeral() -> int:
    try:
        port = int(_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        port = 32_768
    return port if port > _FIRST + 1_000 else 65_536


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
