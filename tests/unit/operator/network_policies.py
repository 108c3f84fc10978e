"""What NetworkPolicies allow, as networking.k8s.io/v1 defines it. Pure; the tests' truth about our policies.

A pod that no policy of a direction selects is open in that direction; else one rule of one of them must let the connection through.
A connection needs the source's way out and the destination's way in.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljob_operator.model import Object


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """One end of a connection: a pod, or an address outside of the cluster."""

    namespace: str | None = None
    """Namespace of the pod; None = no pod."""
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    ip: str = ""
    """Address; policies name those of things outside. Empty = in no block."""


def allows(
    policies: Iterable[Object], source: Endpoint, destination: Endpoint, port: int, *, protocol: str = "TCP"
) -> bool:
    """Return whether `policies` let `source` connect to `port` of `destination`."""
    known = list(policies)
    return _open(known, "Egress", source, destination, port, protocol) and _open(
        known, "Ingress", destination, source, port, protocol
    )


def _open(
    policies: Sequence[Object], direction: str, subject: Endpoint, peer: Endpoint, port: int, protocol: str
) -> bool:
    """Return whether `subject` may speak with `peer` in one direction."""
    rules, peers = ("egress", "to") if direction == "Egress" else ("ingress", "from")
    applying = [policy for policy in policies if _governs(policy, direction, subject)]
    if not applying:
        return True
    return any(
        _has_port(rule.get("ports"), port, protocol)
        and _has_peer(rule.get(peers), peer, policy["metadata"]["namespace"])
        for policy in applying
        for rule in policy["spec"].get(rules, [])
    )


def _governs(policy: Object, direction: str, subject: Endpoint) -> bool:
    spec = policy["spec"]
    types = spec.get("policyTypes") or (["Ingress", "Egress"] if spec.get("egress") else ["Ingress"])
    return (
        direction in types
        and subject.namespace == policy["metadata"]["namespace"]
        and selects(spec.get("podSelector", {}), subject.labels)
    )


def _has_port(ports: Sequence[Mapping[str, Any]] | None, port: int, protocol: str) -> bool:
    return not ports or any(
        one.get("protocol", "TCP") == protocol
        and ("port" not in one or one["port"] <= port <= one.get("endPort", one["port"]))
        for one in ports
    )


def _has_peer(peers: Sequence[Mapping[str, Any]] | None, peer: Endpoint, namespace: str) -> bool:
    return not peers or any(_is_peer(one, peer, namespace) for one in peers)


def _is_peer(one: Mapping[str, Any], peer: Endpoint, namespace: str) -> bool:
    if "ipBlock" in one:
        block = one["ipBlock"]
        return _within(peer.ip, block["cidr"]) and not any(_within(peer.ip, cidr) for cidr in block.get("except", []))
    if peer.namespace is None:
        return False
    chosen = one.get("namespaceSelector")
    at_home = peer.namespace == namespace if chosen is None else selects(chosen, peer.namespace_labels)
    return at_home and selects(one.get("podSelector", {}), peer.labels)


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector selects `labels`; `{}` selects all."""
    equal = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return equal and all(_holds(one, labels) for one in selector.get("matchExpressions", []))


def _holds(one: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(one["key"]), one.get("values", [])
    match one["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case _:
            return value is None


def _within(ip: str, cidr: str) -> bool:
    return bool(ip) and ipaddress.ip_address(ip) in ipaddress.ip_network(cidr, strict=False)
