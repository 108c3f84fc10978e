"""NetworkPolicies of a job, one for each group and one for the pod of the runner.

A group is trusted when it holds the weights of the policy: a gang, or a group that loads them. The other groups run code of the user,
such as environments, and are isolated: they reach what they need and nothing else.

    trusted          in: all ports from the pods of trusted groups (gloo and NCCL listen on ephemeral ports, without authentication);
                     the OpenAI endpoint of rollouts from groups that run agent programs
                     out: to the same, to the RPC port of the groups that it may call, and `egress` of the group; where it is not given,
                     to all addresses but link-local ones
    runner's pod     in: hub and channel from isolated groups; control from the operator
    isolated         in: its RPC port from the groups that may call it and from the runner's pod
                     out: hub and channel of the runner's pod, the RPC port of the groups that it may call, the OpenAI endpoint that its
                     agent programs call, `egress` of the group
    all              in: metrics from labelled namespaces            out: the DNS of the cluster

Groups that hold weights may be on the network of their nodes (`hostNetwork`), all or none of them (rl_core/plan/node_network.py). Policies do
not select such pods, and to the policies of isolated groups they are addresses that depend on the network plug-in. These policies therefore
permit every address on the ports where keys authenticate the other side: RPC in; hub, channel, RPC and endpoint out.

Policies add up, so the runner's pod has one more than the other pods of its group. Policies select pods by the uid of the job: pods of an
earlier job of the same name are not selected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.api.egress import EgressRule, exceptions
from rl_core.api.job import RLJob
from rl_core.plan.groups import CONTROL_GROUP, Group, groups_of
from rl_core.plan.launch import Ports
from rl_core.plan.node_network import STRIDE, is_on_node, listeners
from rl_core.plan.slots import own_pods
from rljob_operator import naming
from rljob_operator.manifests import meta
from rljob_operator.model import Object, OperatorConfig, PodView

API_VERSION = "networking.k8s.io/v1"
KIND = "NetworkPolicy"
DIGEST = "specDigest"
"""Key of a trimmed policy in the cache for the result of `digest_of`."""
PORTS = Ports()
DNS_PORTS = (53, 5353)
"""Ports of DNS pods: 53, and 5353 on OpenShift."""
ANYWHERE = ("0.0.0.0/0", "::/0")

Rule = dict[str, Any]


def build(job: RLJob, *, config: OperatorConfig, groups: Mapping[str, Group] | None = None) -> list[dict[str, Any]]:
    """Return the policies of a job, in the order of its groups; that of the runner's pod follows that of its group."""
    peers = _Peers(job, groups_of(job.spec) if groups is None else groups)
    policies = []
    for group in peers.groups.values():
        ingress = [*peers.ingress(group), _metrics(config)]
        egress = [_dns(config), *peers.egress(group)]
        policies.append(_policy(job, group.name, _selector(job, group.name), ingress, egress=egress, config=config))
        if group.name == CONTROL_GROUP:
            runner = [*peers.ingress_of_runner(), {"from": [_operator(config)], "ports": _tcp(PORTS.control)}]
            selector = _runner_pod(job)["podSelector"]
            policies.append(_policy(job, f"{group.name}-0", selector, runner, config=config))
    return policies


def of_remaining_pods(job: RLJob, pods: Sequence[PodView], *, config: OperatorConfig) -> list[dict[str, Any]]:
    """Return the policies of a deleted job that fence at least one of `pods`, each with the pods that it fences as its owners."""
    policies = []
    for policy in build(job, config=config):
        labels = policy["spec"]["podSelector"]["matchLabels"]
        fenced = [
            {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}
            for pod in pods
            if pod.role == labels[naming.LABEL_ROLE] and labels.get(naming.LABEL_INDEX) in (None, str(pod.index))
        ]
        if fenced:
            policies.append({**policy, "metadata": {**policy["metadata"], "ownerReferences": fenced}})
    return policies


def digest_of(policy: Object) -> str:
    """Return the digest of what a policy, from here or from the API server, permits; computed once per version of it (`DIGEST`)."""
    if DIGEST in policy:
        return str(policy[DIGEST])
    spec = policy.get("spec") or {}
    compared = {field: spec.get(field) for field in ("podSelector", "policyTypes", "ingress")}
    if "Egress" in (spec.get("policyTypes") or ()):  # Without this type the field `egress` has no effect.
        compared["egress"] = spec.get("egress")
    return meta.digest(compared)


class _Peers:
    """Which groups of a job may connect to which others."""

    def __init__(self, job: RLJob, groups: Mapping[str, Group]) -> None:
        self.groups = groups
        self._job = job
        self._trusted = [group.name for group in groups.values() if _is_trusted(group)]
        self._isolated = [group.name for group in groups.values() if not _is_trusted(group)]
        self._on_nodes = _most_on_nodes(groups)

    def ingress(self, group: Group) -> list[Rule]:
        """Return the rules by which other groups, and the runner, reach the pods of a group."""
        if _is_trusted(group):
            callers = [name for name in self._isolated if name in group.callers]
            calls = [{"from": [_pods(self._job, *callers)], "ports": _ports(PORTS.rpc, group)}] if callers else []
            return [{"from": [_pods(self._job, *self._trusted)]}, *calls, *self._calls_of_agents(group)]
        if self._on_nodes:
            return [{"ports": _ports(PORTS.rpc, group)}]
        hosts = self._hosts_of_callers(group)
        callers_pods = [_pods(self._job, *hosts)] if hosts else []
        return [{"from": [*callers_pods, _runner_pod(self._job)], "ports": _ports(PORTS.rpc, group)}]

    def _calls_of_agents(self, group: Group) -> list[Rule]:
        """Return the rule by which agent programs reach the OpenAI endpoints in the pods of a group.

        A colocated group that serves an endpoint runs in pods of the control group.
        """
        served = [server for server in self.groups.values() if group.name in self._hosts(server)]
        callers = {caller for server in served for caller in server.endpoint_callers}
        ports = _ports(PORTS.endpoint, *served)
        return [{"from": [_pods(self._job, *sorted(callers))], "ports": ports}] if callers else []

    def ingress_of_runner(self) -> list[Rule]:
        """Return the rule by which isolated groups reach the hub and the channel server."""
        if not self._isolated:
            return []
        return [{"from": [_pods(self._job, *self._isolated)], "ports": _tcp(PORTS.hub, PORTS.channel)}]

    def egress(self, group: Group) -> list[Rule]:
        """Return the rules by which the pods of a group reach other groups and the addresses that the group names."""
        called = [name for name, other in self.groups.items() if self._may_call(group, other)]
        calls = [self._to_pods(PORTS.rpc, called, [self.groups[name] for name in called])] if called else []
        rules = getattr(group.spec, "egress", None)
        if _is_trusted(group):
            internet = _anywhere() if rules is None else _given(rules)
            return [{"to": [_pods(self._job, *self._trusted)]}, *calls, *internet]
        ports = _tcp(PORTS.hub, PORTS.channel)
        runner = {"ports": ports} if self._on_nodes else {"to": [_runner_pod(self._job)], "ports": ports}
        served = [other for other in self.groups.values() if group.name in other.endpoint_callers]
        hosts = sorted({host for other in served for host in self._hosts(other)})
        models = [self._to_pods(PORTS.endpoint, hosts, served)] if hosts else []
        return [runner, *calls, *models, *_given(rules or [])]

    def _to_pods(self, port: int, names: Sequence[str], served: Sequence[Group]) -> Rule:
        """Return the rule for the port of each process of `served` in the pods of the groups `names`.

        Where some of the pods are on nodes, each process there has a port of its own.
        """
        if not any(is_on_node(self.groups[name]) for name in names):
            return {"to": [_pods(self._job, *names)], "ports": _ports(port, *served)}
        return {"ports": [{"protocol": "TCP", "port": port, "endPort": port + STRIDE * (self._on_nodes - 1)}]}

    def _may_call(self, group: Group, other: Group) -> bool:
        """Return whether a group needs a rule of its own to call another; trusted groups reach each other anyway."""
        if _is_trusted(group) and _is_trusted(other):
            return False
        return group.name in other.callers or (group.name == CONTROL_GROUP and not _is_trusted(other))

    def _hosts_of_callers(self, group: Group) -> list[str]:
        """Return the names of the groups whose pods may call `group`: those with a member of a group that `group.callers` names."""
        hosts = {host for name in self.groups if name in group.callers for host in self._hosts(self.groups[name])}
        return [name for name in self.groups if name in hosts]

    def _hosts(self, group: Group) -> list[str]:
        """Return the groups in whose pods the members of a group run: its own, and the control group for colocated members."""
        pods = own_pods(self._job.spec, group.name, self.groups)
        return [*([group.name] if pods else []), *([CONTROL_GROUP] if pods.start else [])]


def _ports(first: int, *groups: Group) -> list[dict[str, Any]]:
    """Return the ports of the processes in a pod of some groups, of which the first process listens on `first`."""
    return _tcp(*(first + STRIDE * process for process in range(max(map(listeners, groups), default=1))))


def _most_on_nodes(groups: Mapping[str, Group]) -> int:
    """Return the largest number of sets of ports that a job has on the network of its nodes; each is STRIDE above the one before."""
    on_nodes = [group for group in groups.values() if is_on_node(group)]
    return sum(
        max(group.replicas, getattr(group.spec, "max_replicas", None) or 0) * listeners(group) for group in on_nodes
    )


def _is_trusted(group: Group) -> bool:
    """Return whether the members of a group hold the weights of the policy."""
    return group.holds_model


def _policy(
    job: RLJob,
    target: str,
    selector: dict[str, Any],
    ingress: list[Rule],
    *,
    egress: list[Rule] | None = None,
    config: OperatorConfig,
) -> dict[str, Any]:
    """Return one policy. With `egress` None it leaves the egress of its pods to the policy of their group."""
    spec: dict[str, Any] = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress}
    if egress is not None:
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": egress}
    return meta.support(
        job,
        KIND,
        naming.network_policy(job.metadata.name, target),
        {"spec": spec},
        api_version=API_VERSION,
        component="network",
        config=config,
    )


def _dns(config: OperatorConfig) -> Rule:
    """Return the rule for the DNS of the cluster, which permits no other pod that listens on the same ports."""
    pods = {
        "namespaceSelector": _labelled(config.dns_namespace_labels),
        "podSelector": _labelled(config.dns_pod_labels),
    }
    ports = [{"protocol": protocol, "port": port} for port in DNS_PORTS for protocol in ("UDP", "TCP")]
    return {"to": [pods, *({"ipBlock": {"cidr": cidr}} for cidr in config.dns_cidrs)], "ports": ports}


def _given(egress: Sequence[EgressRule]) -> list[Rule]:
    """Return the rules for the destinations that a job names."""
    return [{"to": [_block(rule.cidr)], "ports": _tcp(*rule.ports) or _ANY_TCP} for rule in egress]


def _anywhere() -> list[Rule]:
    """Return the rule for all pods and all addresses, except those at which clouds serve credentials."""
    return [{"to": [{"namespaceSelector": {}}, *map(_block, ANYWHERE)]}]


def _block(cidr: str) -> dict[str, Any]:
    held_back = exceptions(cidr)
    return {"ipBlock": {"cidr": cidr, **({"except": held_back} if held_back else {})}}


_ANY_TCP = [{"protocol": "TCP"}]


def _metrics(config: OperatorConfig) -> Rule:
    scraper = {"namespaceSelector": _labelled(config.metrics_namespace_labels)}
    return {"from": [scraper], "ports": _tcp(PORTS.health)}


def _labelled(labels: Mapping[str, str]) -> dict[str, Any]:
    """Return a selector in the form in which the API server returns it, without empty maps, as `digest_of` compares the two."""
    return {"matchLabels": dict(labels)} if labels else {}


def _operator(config: OperatorConfig) -> dict[str, Any]:
    return {
        "namespaceSelector": {"matchLabels": {naming.LABEL_NAMESPACE: config.namespace}},
        "podSelector": {"matchLabels": {naming.LABEL_NAME: naming.OPERATOR_APP}},
    }


def _selector(job: RLJob, *groups: str) -> dict[str, Any]:
    """Return a selector of the pods of some groups of a job."""
    name, _, uid = meta.identity(job)
    labels = naming.job_labels(name, uid)
    if len(groups) == 1:
        return {"matchLabels": {**labels, naming.LABEL_ROLE: groups[0]}}
    return {
        "matchLabels": labels,
        "matchExpressions": [{"key": naming.LABEL_ROLE, "operator": "In", "values": list(groups)}],
    }


def _pods(job: RLJob, *groups: str) -> dict[str, Any]:
    return {"podSelector": _selector(job, *groups)}


def _runner_pod(job: RLJob) -> dict[str, Any]:
    """Return the peer that is the pod of the runner and the channel server."""
    labels = _selector(job, CONTROL_GROUP)["matchLabels"]
    return {"podSelector": {"matchLabels": {**labels, naming.LABEL_INDEX: "0"}}}


def _tcp(*ports: int) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": port} for port in ports]
