"""NetworkPolicies of a job.

    actor, rollout   in: all ports from the job's actor and rollout pods (gloo and NCCL listen on ephemeral ones, without authentication)
                     out: to the same, to the RPC port of envs, and `egress` of the role: where it is not given, anywhere but link-local
    actor-0          in: hub and channel from env pods; control from the operator
    env              in: its RPC port from rollouts and actor-0      out: hub and channel of actor-0, `env.egress`
    all              in: metrics from labelled namespaces            out: the cluster's DNS

Policies add up, so actor-0 has one more than its siblings. Pods are chosen by the job's uid: an earlier job of the same name is a stranger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_core.api.egress import EgressRule, exceptions
from rl_core.api.job import RLJob
from rl_core.plan.launch import Ports
from rl_core.plan.slots import colocated_rollouts, own_pods
from rljob_operator import naming
from rljob_operator.manifests import meta
from rljob_operator.model import OperatorConfig

API_VERSION = "networking.k8s.io/v1"
PORTS = Ports()
DNS_PORTS = (53, 5353)
"""Of DNS pods: 53, and 5353 on OpenShift."""
ANYWHERE = ("0.0.0.0/0", "::/0")

Rule = dict[str, Any]


def build(job: RLJob, *, config: OperatorConfig) -> list[dict[str, Any]]:
    """Return the four policies."""
    metrics = _metrics(config)
    gang = {"from": [_pods(job, naming.ACTOR, naming.ROLLOUT)]}
    from_env = {"from": [_pods(job, naming.ENV)], "ports": _tcp(PORTS.hub, PORTS.channel)}
    from_operator = {"from": [_operator(config)], "ports": _tcp(PORTS.control)}
    rollouts = [naming.ROLLOUT] if own_pods(job.spec, naming.ROLLOUT) else []
    hosts = [naming.ACTOR, *rollouts] if colocated_rollouts(job.spec) else rollouts
    to_env = {"from": [_pods(job, *hosts), _actor_0(job)], "ports": _tcp(PORTS.rpc)}
    dns, spec = _dns(config), job.spec
    out_of_env = [dns, {"to": [_actor_0(job)], "ports": _tcp(PORTS.hub, PORTS.channel)}, *_given(spec.env.egress)]
    between = [{"to": gang["from"]}, {"to": [_pods(job, naming.ENV)], "ports": _tcp(PORTS.rpc)}]
    out = {
        role: [dns, *between, *(_anywhere() if egress is None else _given(egress))]
        for role, egress in ((naming.ACTOR, spec.actor.egress), (naming.ROLLOUT, spec.rollout.egress))
    }
    return [
        _policy(job, "actor", _selector(job, naming.ACTOR), [gang, metrics], egress=out[naming.ACTOR], config=config),
        _policy(job, "actor-0", _actor_0(job)["podSelector"], [from_env, from_operator], config=config),
        _policy(
            job, "rollout", _selector(job, naming.ROLLOUT), [gang, metrics], egress=out[naming.ROLLOUT], config=config
        ),
        _policy(job, "env", _selector(job, naming.ENV), [to_env, metrics], egress=out_of_env, config=config),
    ]


def _policy(
    job: RLJob,
    target: str,
    selector: dict[str, Any],
    ingress: list[Rule],
    *,
    egress: list[Rule] | None = None,
    config: OperatorConfig,
) -> dict[str, Any]:
    """Return one policy; `egress` None says nothing of the way out, which the role's own policy does."""
    spec: dict[str, Any] = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress}
    if egress is not None:
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": egress}
    return meta.support(
        job,
        "NetworkPolicy",
        naming.network_policy(job.metadata.name, target),
        {"spec": spec},
        api_version=API_VERSION,
        component="network",
        config=config,
    )


def _dns(config: OperatorConfig) -> Rule:
    """Return the way to the cluster's DNS, and to no other pod that listens on its ports."""
    pods = {
        "namespaceSelector": {"matchLabels": dict(config.dns_namespace_labels)},
        "podSelector": {"matchLabels": dict(config.dns_pod_labels)},
    }
    ports = [{"protocol": protocol, "port": port} for port in DNS_PORTS for protocol in ("UDP", "TCP")]
    return {"to": [pods, *({"ipBlock": {"cidr": cidr}} for cidr in config.dns_cidrs)], "ports": ports}


def _given(egress: Sequence[EgressRule]) -> list[Rule]:
    """Return the destinations that a role names."""
    return [{"to": [_block(rule.cidr)], "ports": _tcp(*rule.ports) or _ANY_TCP} for rule in egress]


def _anywhere() -> list[Rule]:
    """Return the way to all pods and all addresses but those that clouds hand out credentials at."""
    return [{"to": [{"namespaceSelector": {}}, *map(_block, ANYWHERE)]}]


def _block(cidr: str) -> dict[str, Any]:
    held_back = exceptions(cidr)
    return {"ipBlock": {"cidr": cidr, **({"except": held_back} if held_back else {})}}


_ANY_TCP = [{"protocol": "TCP"}]


def _metrics(config: OperatorConfig) -> Rule:
    scraper = {"namespaceSelector": {"matchLabels": dict(config.metrics_namespace_labels)}}
    return {"from": [scraper], "ports": _tcp(PORTS.health)}


def _operator(config: OperatorConfig) -> dict[str, Any]:
    return {
        "namespaceSelector": {"matchLabels": {naming.LABEL_NAMESPACE: config.namespace}},
        "podSelector": {"matchLabels": {naming.LABEL_NAME: naming.OPERATOR_APP}},
    }


def _selector(job: RLJob, *roles: str) -> dict[str, Any]:
    """Return a selector of the job's pods of some roles."""
    name, _, uid = meta.identity(job)
    labels = naming.job_labels(name, uid)
    if len(roles) == 1:
        return {"matchLabels": {**labels, naming.LABEL_ROLE: roles[0]}}
    return {
        "matchLabels": labels,
        "matchExpressions": [{"key": naming.LABEL_ROLE, "operator": "In", "values": list(roles)}],
    }


def _pods(job: RLJob, *roles: str) -> dict[str, Any]:
    return {"podSelector": _selector(job, *roles)}


def _actor_0(job: RLJob) -> dict[str, Any]:
    labels = _selector(job, naming.ACTOR)["matchLabels"]
    return {"podSelector": {"matchLabels": {**labels, naming.LABEL_INDEX: "0"}}}


def _tcp(*ports: int) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": port} for port in ports]
