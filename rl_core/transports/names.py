"""Looks up the IP addresses of host names on a thread of its own.

ZeroMQ looks a name up on the thread that sends and receives everything of the process. A DNS server that does not answer would stop all
connections of the process for many seconds. A connection that others must not wait for is therefore made to an IP address.
"""

import asyncio
import ipaddress
import socket

from rl_core.api.errors import InfrastructureError
from rl_core.transports.handlers import HandlerThreads
from rl_core.transports.sockets import split_address

LOOKUP_SECONDS = 2.0
"""Seconds that a lookup may take."""

_threads = HandlerThreads(4, "rljob-names")


async def numeric_address(address: str) -> str:
    """Return `tcp://host:port` with the IP address of the host. Raises InfrastructureError when it is not found within LOOKUP_SECONDS."""
    host, port = split_address(address)
    if host == "localhost" or _is_ip_address(host):
        return address
    lookup = _threads.run(lambda: socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM))
    try:
        (*_, socket_address), *_ = await asyncio.wait_for(asyncio.wrap_future(lookup), LOOKUP_SECONDS)
    except TimeoutError as error:
        raise InfrastructureError(f"the name {host} was not resolved within {LOOKUP_SECONDS:g} s") from error
    except OSError as error:
        raise InfrastructureError(f"the name {host} was not resolved: {error}") from error
    return f"tcp://{socket_address[0]}:{port}"


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
