"""Free TCP ports of this machine for a local run."""

import socket
from contextlib import ExitStack
from dataclasses import fields

from rl_core.plan.launch import Ports


def free_ports(host: str = "127.0.0.1") -> Ports:
    """Return ports that were free a moment ago, all different."""
    names = [field.name for field in fields(Ports)]
    with ExitStack() as stack:
        probes = {name: stack.enter_context(socket.socket()) for name in names}
        for probe in probes.values():
            probe.bind((host, 0))
        return Ports(**{name: int(probe.getsockname()[1]) for name, probe in probes.items()})
