"""The network policies over sources, destinations and ports; and the judge against the API's definition."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.plan.launch import build_launch_plan
from rljob_operator import naming
from rljob_operator.manifests import network
from tests.unit.operator.manifest_samples import CONFIG, UID, make_job
from tests.unit.operator.network_policies import Endpoint, allows

HUB, CHANNEL, CONTROL, HEALTH, MASTER, RPC, ENDPOINT = range(7700, 7707)
JOB = make_job(
    actor={"replicas": 2},
    env={"egress": [{"cidr": "192.0.2.0/24", "ports": [443]}, {"cidr": "198.51.100.7/32"}]},
)
POLICIES = network.build(JOB, config=CONFIG)
HOME = {naming.LABEL_NAMESPACE: "default"}


def pod(role, index=0, *, uid=UID, namespace="default"):
    labels = {**naming.job_labels("sums", uid), naming.LABEL_ROLE: role, naming.LABEL_INDEX: str(index)}
    return Endpoint(
        namespace=namespace, labels=labels, namespace_labels={naming.LABEL_NAMESPACE: namespace}, ip="10.0.0.9"
    )


OPERATOR_LABELS = {naming.LABEL_NAME: naming.OPERATOR_APP}
PLACES = {
    "actor-0": pod("actor"),
    "actor-1": pod("actor", 1),
    "rollout": pod("rollout", 3),
    "env": pod("env"),
    "actor-0 of the forerunner": pod("actor", uid="f" + UID[1:]),
    "rollout of the forerunner": pod("rollout", uid="f" + UID[1:]),
    "env of the forerunner": pod("env", uid="f" + UID[1:]),
    "namesake elsewhere": pod("actor", namespace="other"),
    "operator": Endpoint(
        namespace="rljob-system", labels=OPERATOR_LABELS, namespace_labels={naming.LABEL_NAMESPACE: "rljob-system"}
    ),
    "operator's neighbour": Endpoint(
        namespace="rljob-system", namespace_labels={naming.LABEL_NAMESPACE: "rljob-system"}
    ),
    "false operator": Endpoint(namespace="default", labels=OPERATOR_LABELS, namespace_labels=HOME),
    "prometheus": Endpoint(namespace="monitoring", namespace_labels={"rljob.dev/metrics": "true"}),
    "dns": Endpoint(
        namespace="kube-system",
        labels={"k8s-app": "kube-dns"},
        namespace_labels={naming.LABEL_NAMESPACE: "kube-system"},
        ip="10.0.0.53",
    ),
    "false dns": Endpoint(namespace="default", labels={"k8s-app": "kube-dns"}, namespace_labels=HOME, ip="10.0.0.54"),
    "neighbour of dns": Endpoint(
        namespace="kube-system", namespace_labels={naming.LABEL_NAMESPACE: "kube-system"}, ip="10.0.0.55"
    ),
    "metadata": Endpoint(ip="169.254.169.254"),
    "metadata in IPv6": Endpoint(ip="fd00:ec2::254"),
    "metadata of Azure": Endpoint(ip="168.63.129.16"),
    "metadata of Alibaba": Endpoint(ip="100.100.100.200"),
    "internet in IPv6": Endpoint(ip="2001:db8::1"),
    "node-local dns": Endpoint(ip="169.254.20.10"),
    "other pod": Endpoint(namespace="default", labels={"app": "web"}, namespace_labels=HOME, ip="10.0.0.80"),
    "allowed server": Endpoint(ip="192.0.2.55"),
    "fully allowed server": Endpoint(ip="198.51.100.7"),
    "internet": Endpoint(ip="203.0.113.1"),
}
OURS = ("actor-0", "actor-1", "rollout", "env")
PORTS = (22, 53, 443, 5353, *range(7690, 7710), 30000, 40123, 65535)
"""Those that are named and their neighbours, and some of those that gloo and NCCL listen on."""


def admitted(source, destination, port):
    """What may connect to a pod of the job."""
    if source == "prometheus" and port == HEALTH:
        return True
    if destination in ("actor-0", "actor-1", "rollout"):
        if source in ("actor-0", "actor-1", "rollout"):
            return True
        if destination == "actor-0":
            return (source == "env" and port in (HUB, CHANNEL)) or (source == "operator" and port == CONTROL)
        return False
    return source in ("rollout", "actor-0") and port == RPC


def let_out(source, destination, port, protocol):
    """What a pod of the job may connect to: from env pods what is named, from the others all but the link-local."""
    if destination in ("dns", "node-local dns") and port in (53, 5353):
        return True
    if source != "env":
        return destination != "node-local dns" and not destination.startswith("metadata")
    return (
        (destination == "actor-0" and port in (HUB, CHANNEL) and protocol == "TCP")
        or (destination == "allowed server" and port == 443 and protocol == "TCP")
        or (destination == "fully allowed server" and protocol == "TCP")
    )


@pytest.mark.parametrize("destination", OURS)
@pytest.mark.parametrize("source", sorted(PLACES))
def test_a_pod_of_the_job_is_reached_as_the_protocol_says_and_not_otherwise(source, destination):
    for port in PORTS:
        expected = admitted(source, destination, port) and (
            source not in OURS or let_out(source, destination, port, "TCP")
        )
        assert allows(POLICIES, PLACES[source], PLACES[destination], port) == expected, port


@pytest.mark.parametrize("destination", sorted(set(PLACES) - set(OURS)))
@pytest.mark.parametrize("source", OURS)
def test_env_pods_get_out_where_they_are_let_and_the_others_anywhere_but_to_the_link_local(source, destination):
    for port, protocol in itertools.product(PORTS, ("TCP", "UDP")):
        expected = let_out(source, destination, port, protocol)
        assert allows(POLICIES, PLACES[source], PLACES[destination], port, protocol=protocol) == expected, port


@settings(max_examples=300, deadline=None)
@given(
    source=st.sampled_from(OURS),
    destination=st.sampled_from(OURS),
    uid=st.uuids().map(str).filter(lambda uid: uid != UID),
)
def test_pods_of_another_job_are_strangers_whatever_they_call_themselves(source, destination, uid):
    stranger = replace(PLACES[source], labels={**PLACES[source].labels, naming.LABEL_JOB_UID: uid})
    assert not any(allows(POLICIES, stranger, PLACES[destination], port) for port in PORTS)


@pytest.mark.parametrize("source", sorted(set(PLACES) - {"env"}))
def test_pods_that_are_not_of_the_job_are_not_fenced(source):
    assert all(allows(POLICIES, PLACES[source], PLACES["other pod"], port) for port in PORTS)


@pytest.mark.parametrize("role", ["actor", "rollout"])
def test_a_role_that_names_destinations_reaches_its_job_and_these_alone(role):
    job = make_job(
        **{role: {"egress": [{"cidr": "192.0.2.0/24", "ports": [443]}, {"cidr": "0.0.0.0/0", "ports": [80]}]}}
    )
    policies, source = network.build(job, config=CONFIG), pod(role)

    def reached(name, port):
        return allows(policies, source, PLACES[name], port)

    assert reached("dns", 53) and reached("actor-0", 40123) and reached("rollout", 40123) and reached("env", RPC)
    assert reached("allowed server", 443) and reached("internet", 80)
    assert not any(
        reached(name, port)
        for name, port in [
            ("internet", 443),
            ("metadata", 80),
            ("prometheus", 9090),
            ("internet in IPv6", 80),
            ("false dns", 53),
        ]
    )


def test_the_administrator_says_where_dns_is():
    config = type(CONFIG)(
        images=CONFIG.images, dns_namespace_labels={"a": "b"}, dns_pod_labels={"dns": "yes"}, dns_cidrs=()
    )
    policies = network.build(JOB, config=config)
    dns = Endpoint(namespace="x", labels={"dns": "yes"}, namespace_labels={"a": "b"}, ip="10.0.0.56")
    assert allows(policies, PLACES["env"], dns, 53, protocol="UDP")
    assert not any(allows(policies, PLACES["env"], PLACES[name], 53) for name in ("dns", "node-local dns"))


def test_agent_programs_reach_the_endpoint_of_rollouts_and_nothing_else_of_them():
    agents = network.build(make_job(env={"type": "agent", "agent": "program:run"}), config=CONFIG)
    reached = {port for port in PORTS if allows(agents, PLACES["env"], PLACES["rollout"], port)}
    assert reached == {ENDPOINT} and not any(allows(POLICIES, PLACES["env"], PLACES["rollout"], port) for port in PORTS)
    for source in PLACES.keys() - {"actor-0", "actor-1", "rollout", "env"}:
        assert not allows(agents, PLACES[source], PLACES["rollout"], ENDPOINT), source
    assert not any(allows(agents, PLACES["env"], PLACES[name], ENDPOINT) for name in ("actor-0", "actor-1", "internet"))


def test_there_is_one_policy_per_role_and_one_more_for_actor_0():
    assert [policy["metadata"]["name"] for policy in POLICIES] == [
        "sums-actor",
        "sums-actor-0",
        "sums-rollout",
        "sums-env",
    ]


def test_the_administrator_says_who_scrapes_and_where_the_operator_lives():
    config = type(CONFIG)(images=CONFIG.images, namespace="ops", metrics_namespace_labels={"team": "sre"})
    policies = network.build(JOB, config=config)
    operator = Endpoint(namespace="ops", labels=OPERATOR_LABELS, namespace_labels={naming.LABEL_NAMESPACE: "ops"})
    scraper = Endpoint(namespace="mon", namespace_labels={"team": "sre"})
    assert allows(policies, operator, PLACES["actor-0"], CONTROL) and allows(policies, scraper, PLACES["env"], HEALTH)
    assert not allows(policies, PLACES["operator"], PLACES["actor-0"], CONTROL)
    assert not allows(policies, PLACES["prometheus"], PLACES["env"], HEALTH)


# --- the judge, by the definition of networking.k8s.io/v1 ------------------------------------------------------------------------

WEB = Endpoint(namespace="default", labels={"app": "web"}, namespace_labels=HOME, ip="10.0.0.1")
CLIENT = Endpoint(namespace="other", labels={"app": "client"}, namespace_labels={"team": "a"}, ip="10.0.1.1")


def policy(**spec):
    return {"metadata": {"name": "p", "namespace": "default"}, "spec": {"podSelector": {}} | spec}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param({"podSelector": {"matchLabels": {"app": "db"}}, "ingress": []}, True, id="not selected: open"),
        pytest.param({}, False, id="selected without a rule: closed"),
        pytest.param({"ingress": [{}]}, True, id="an empty rule lets all in"),
        pytest.param({"policyTypes": ["Egress"], "egress": []}, True, id="egress rules do not bind the way in"),
        pytest.param({"ingress": [{"from": [{"podSelector": {}}]}]}, False, id="a pod selector alone means this namespace"),
        pytest.param({"ingress": [{"from": [{"namespaceSelector": {}}]}]}, True, id="an empty namespace selector means all"),
        pytest.param(
            {"ingress": [{"from": [{"namespaceSelector": {"matchLabels": {"team": "a"}}, "podSelector": {"matchLabels": {"app": "x"}}}]}]},
            False,
            id="both selectors of one peer must hold",
        ),
        pytest.param(
            {"ingress": [{"from": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}, {"podSelector": {"matchLabels": {"app": "x"}}}]}]},
            True,
            id="one of two peers is enough",
        ),
        pytest.param({"ingress": [{"ports": [{"port": 80}]}]}, True, id="port"),
        pytest.param({"ingress": [{"ports": [{"port": 81}]}]}, False, id="another port"),
        pytest.param({"ingress": [{"ports": [{"port": 70, "endPort": 90}]}]}, True, id="range of ports"),
        pytest.param({"ingress": [{"ports": [{"protocol": "UDP", "port": 80}]}]}, False, id="another protocol"),
        pytest.param({"ingress": [{"from": [{"ipBlock": {"cidr": "10.0.0.0/16"}}]}]}, True, id="block"),
        pytest.param({"ingress": [{"from": [{"ipBlock": {"cidr": "10.0.0.0/16", "except": ["10.0.1.0/24"]}}]}]}, False, id="excepted"),
    ],
)  # fmt: skip
def test_the_judge_knows_the_rules(spec, expected):
    assert allows([policy(**spec)], CLIENT, WEB, 80) is expected


def test_policies_add_up_and_no_policy_means_open():
    closed, opened = policy(), policy(ingress=[{"ports": [{"port": 80}]}])
    assert allows([], CLIENT, WEB, 80) and allows([closed, opened], CLIENT, WEB, 80)
    assert not allows([closed, opened], CLIENT, WEB, 81)


@pytest.mark.parametrize(
    ("expression", "labels", "expected"),
    [
        ({"operator": "In", "values": ["a", "b"]}, {"k": "b"}, True),
        ({"operator": "In", "values": ["a"]}, {}, False),
        ({"operator": "NotIn", "values": ["a"]}, {}, True),
        ({"operator": "NotIn", "values": ["a"]}, {"k": "a"}, False),
        ({"operator": "Exists"}, {"k": ""}, True),
        ({"operator": "Exists"}, {}, False),
        ({"operator": "DoesNotExist"}, {}, True),
        ({"operator": "DoesNotExist"}, {"k": "a"}, False),
    ],
)
def test_the_judge_knows_selectors(expression, labels, expected):
    selected = policy(podSelector={"matchExpressions": [{"key": "k", **expression}]}, ingress=[])
    target = Endpoint(namespace="default", labels=labels)
    assert (not allows([selected], CLIENT, target, 80)) is expected


def on_a_node(address):
    """A pod on the network of its node: to a policy it is an address, and which one depends on the network plug-in."""
    return Endpoint(ip=address)


@pytest.mark.parametrize("address", ["10.1.0.7", "2001:db8::7"], ids=["of the node", "of a tunnel"])
def test_a_job_on_the_network_of_its_nodes_has_the_paths_that_keys_protect_and_no_others(address):
    job = make_job(
        actor={"replicas": 2, "hostNetwork": True},
        rollout={"replicas": 2, "maxReplicas": 3, "hostNetwork": True},
        env={"type": "agent", "agent": "mine:program"},
    )
    policies, node, env = network.build(job, config=CONFIG), on_a_node(address), pod("env")
    plan = {p.name: p for p in build_launch_plan(job, name="sums", uid=UID).pods}
    endpoints = [int(plan[f"sums-rollout-{n}"].containers[0].processes[0].env["RLJOB_ENDPOINT_PORT"]) for n in (0, 1)]
    outwards = {HUB, CHANNEL, *endpoints}
    assert all(allows(policies, env, node, port) for port in outwards), "env to runner and to the rollouts' endpoints"
    assert allows(policies, node, env, RPC), "rollouts and the runner to env"
    for port in (22, 443, HUB - 1, MASTER, *range(7800, 7810), 40123):
        assert not allows(policies, env, node, port), port
    assert not any(allows(policies, node, env, port) for port in PORTS if port != RPC)


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
def test_agents_reach_the_endpoint_of_each_engine_of_a_pod(mode):
    job = make_job(
        actor={"gpus": 4},
        rollout={"engine": "sglang", "gpus": 4, "engineArgs": {"tp_size": 2}},
        env={"type": "agent", "agent": "mine:program"},
        algorithm={"promptsPerStep": 32},
        placement={"mode": mode},
    )
    policies, env = network.build(job, config=CONFIG), pod("env")
    host = pod("rollout" if mode == "disaggregated" else "actor")
    plan = build_launch_plan(job, name="sums", uid=UID)
    processes = [p for one in plan.pods for c in one.containers for p in c.processes if p.group == "rollout"]
    endpoints = [int(process.env["RLJOB_ENDPOINT_PORT"]) for process in processes]
    assert len(set(endpoints)) == 2
    assert all(allows(policies, env, host, port) for port in endpoints)
    assert not any(allows(policies, env, host, port + 1) for port in endpoints)


def test_without_pods_on_nodes_no_address_is_permitted():
    assert not any("from" not in rule for p in POLICIES for rule in p["spec"]["ingress"])
    assert not any("to" not in rule for p in POLICIES for rule in p["spec"].get("egress", []))
