"""Destinations outside the job that a role's pods may reach. Link-local addresses, where clouds hand out credentials, are never among them."""

import ipaddress
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from rl_core.api.base import Spec, rule
from rl_core.api.bounds import Pattern, Port
from rl_core.api.cel import Cel, literal

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
NEVER = ("169.254.0.0/16", "fe80::/10", "fd00:ec2::254/128", "168.63.129.16/32", "100.100.100.200/32")
"""Link-local addresses, and the metadata services that have others: of AWS in IPv6, of Azure's hosts, and of Alibaba Cloud."""
Cidr = Annotated[
    str,
    Field(max_length=43),
    Pattern(
        regex=r"[0-9a-fA-F:.]+/[0-9]{1,3}",
        rule="an address block such as 10.0.0.0/8",
        way_out="write address/bits",
    ),
]


class EgressRule(Spec):
    """A destination outside the job."""

    cidr: Cidr
    """Addresses, e.g. 10.0.0.0/8; link-local ones inside it stay out of reach."""
    ports: Annotated[list[Port], Field(max_length=16)] = []
    """TCP ports; empty = all."""

    @rule(
        Cel(
            holds="!self.cidr.matches('^[0-9a-fA-F:.]+/[0-9]{1,3}$') || isCIDR(self.cidr)",
            refusal="cidr must be an address block such as 10.0.0.0/8, got %s; write address/bits",
            values=("self.cidr",),
            field="cidr",
        ),
        Cel(
            holds=f"!isCIDR(self.cidr) || !{literal(list(NEVER))}.exists(n, cidr(n).containsCIDR(self.cidr))",
            refusal="cidr must not be of link-local addresses or the cloud's metadata service, got %s; remove the entry",
            values=("self.cidr",),
            field="cidr",
        ),
    )
    def _is_reachable(self) -> Iterator[str]:
        block = network(self.cidr)
        if block is None:
            yield f"cidr must be an address block such as 10.0.0.0/8, got {self.cidr}; write address/bits"
        elif any(within(block, never) for never in NEVER):
            yield f"cidr must not be of link-local addresses or the cloud's metadata service, got {self.cidr}; remove the entry"


Egress = Annotated[list[EgressRule], Field(max_length=32)]


def network(cidr: str) -> Network | None:
    """Return the block of addresses; None for text that the API server rejects, such as IPv4-mapped IPv6 addresses or a prefix `/08`."""
    bits = cidr.rpartition("/")[2]
    if bits != str(int(bits)):
        return None
    try:
        block = ipaddress.ip_network(cidr, strict=False)
    except ValueError:
        return None
    mapped = isinstance(block, ipaddress.IPv6Network) and block.network_address.ipv4_mapped is not None
    return None if mapped else block


def within(block: Network, outer: str) -> bool:
    """Return whether all addresses of a block are in the block written `outer`."""
    outer_block = ipaddress.ip_network(outer)
    return outer_block.version == block.version and block.subnet_of(outer_block)  # type: ignore[arg-type]


def exceptions(cidr: str) -> list[str]:
    """Return the sub-blocks of an accepted block that may not be reached: link-local addresses and metadata services."""
    block = ipaddress.ip_network(cidr, strict=False)
    return [never for never in NEVER if within(ipaddress.ip_network(never), str(block))]
