"""The chart against a real API server by a real helm: it renders, installs, upgrades and goes.

The operator's pods do not run here (no nodes); that its rights are sufficient and no more is tested where the operator runs. What its
policies refuse stands in test_chart_policy.py and test_operator_account.py.
"""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from rljob_operator import naming
from rljob_operator.runtime.settings import Settings
from tests.cluster.operator_rig.charts import CHART, eventually, job
from tests.unit.operator.network_policies import selects

ROOT = Path(__file__).parents[3]
NAMESPACE = "chart-test"
POLICY = {
    "allowedImagePrefixes": ["registry.test/"],
    "maxGpusPerJob": 8,
    "claimDevices": {"nic": 0},
    "allowedPriorityClasses": ["low"],
    "allowedServiceAccounts": ["trainer"],
    "forbiddenTolerations": [],
    "allowedCsiDrivers": ["*"],
    "allowedNfsServers": ["*"],
    "allowIpcLock": True,
    "allowHostNetwork": True,
}
EVERYTHING = {
    "policy": POLICY,
    "serviceMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "dashboard": {"enabled": True},
    "imagePullSecrets": [{"name": "registry"}],
    "priorityClassName": "system-cluster-critical",
    "tolerations": [{"operator": "Exists"}],
    "podLabels": {"team": "rl"},
}
MONITORING = ("ServiceMonitor", "PrometheusRule")
HOOKS = "helm.sh/hook"


def render(access, *words, **values):
    """Return the chart's objects for some values."""
    given = [f"--set-json={name}={json.dumps(value)}" for name, value in values.items()]
    text = access.helm("template", "rljob", CHART, "-n", NAMESPACE, *given, *words).stdout
    return [document for document in yaml.safe_load_all(text) if document]


def of_kind(objects, kind, name=None):
    found = [item for item in objects if item["kind"] == kind and name in (None, item["metadata"]["name"])]
    assert found, f"no {kind} {name or ''}"
    return found[0]


@pytest.fixture(scope="module")
def installed(cluster):
    """The chart without operator pods, over whatever definition is there."""
    words = ["-n", NAMESPACE, "--set", "replicas=0", "--take-ownership"]
    cluster.helm("install", "rljob", CHART, "--create-namespace", *words)
    cluster.wait_served("rljob.dev", "v1alpha1", "rljobs")
    try:
        yield cluster
    finally:
        cluster.helm("uninstall", "rljob", "-n", NAMESPACE)
        cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def test_the_chart_passes_lint(cluster):
    assert "0 chart(s) failed" in cluster.helm("lint", CHART, "--strict").stdout


@pytest.mark.parametrize(
    "values", [{}, EVERYTHING, EVERYTHING | {"watchNamespaces": ["default"]}], ids=["default", "all", "one"]
)
def test_the_api_server_takes_every_object(cluster, values):
    cluster.kubectl("create", "namespace", NAMESPACE, check=False)
    # The monitoring kinds are not served here; the test's pod needs its account, and a restricted namespace takes it below.
    objects = [item for item in render(cluster, **values) if item["kind"] not in (*MONITORING, "Pod")]
    words = ["apply", "--server-side", "--dry-run=server", "--force-conflicts", "-f", "-"]
    taken = cluster.kubectl(*words, stdin=yaml.safe_dump_all(objects)).stdout
    assert taken.count("(server dry run)") == len(objects)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replica": 3}, "additional properties 'replica' not allowed"),
        ({"settings": {"workers": 0}}, "minimum: got 0, want 1"),
        ({"images": {"operator": ""}}, "/images/operator"),
        ({"imagePullPolicy": "Sometimes"}, "/imagePullPolicy"),
        ({"watchNamespaces": ["Not a name"]}, "/watchNamespaces/0"),
        ({"policy": {"maxGpusPerJob": -1}}, "/policy/maxGpusPerJob"),
        ({"watchNamespaces": ["default"]}, "watchNamespaces must not name the operator's own namespace, got default"),
    ],
)
def test_a_wrong_value_is_refused_by_name(cluster, values, words):
    given = [f"--set-json={name}={json.dumps(value)}" for name, value in values.items()]
    answer = cluster.helm("template", "rljob", CHART, *given, check=False)
    assert answer.returncode == 1 and words in answer.stderr


def test_each_value_is_told_by_the_values_schema():
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    free = {"global"}

    def compare(path, value, node):
        if "properties" in node and path not in ("resources",):
            assert set(value) == set(node["properties"]) - free, path
            assert node["additionalProperties"] is False, path
            for name, inner in value.items():
                compare(f"{path}.{name}".strip("."), inner, node["properties"][name])

    schema["additionalProperties"] = False
    compare("", values, schema)


def test_the_environment_is_read_by_the_operator_as_the_values_say(cluster):
    values = {
        "watchNamespaces": ["a", "b"],
        "settings": {"workers": 3, "logFormat": "text", "pollSeconds": 7.5, "apiInFlight": 9},
    }
    values |= {"dns": {"cidrs": []}}
    images = {"images": {"actor": "r.test/a:1", "rollout": "r.test/r@sha256:ab", "env": "r.test:5000/e"}}
    deployment = of_kind(render(cluster, **values, **images, imagePullPolicy="Always"), "Deployment", "rljob-operator")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    settings = Settings.from_env({entry["name"]: entry.get("value", "from-the-pod") for entry in container["env"]})
    assert settings.watch_namespaces == ("a", "b")
    assert (settings.workers, settings.log_format, settings.poll_seconds, settings.api_in_flight) == (3, "text", 7.5, 9)
    assert settings.identity == "from-the-pod"
    assert settings.config.namespace == NAMESPACE and settings.config.image_pull_policy == "Always"
    assert settings.config.images == {
        "actor": "r.test/a:1",
        "rollout": "r.test/r@sha256:ab",
        "env": "r.test:5000/e:0.1.0",
    }
    assert settings.config.metrics_namespace_labels == {"rljob.dev/metrics": "true"}
    assert settings.config.dns_pod_labels == {"k8s-app": "kube-dns"} and settings.config.dns_cidrs == ()


def test_the_operators_pods_carry_the_label_that_the_jobs_policies_name(cluster):
    pod = of_kind(render(cluster), "Deployment")["spec"]["template"]
    assert pod["metadata"]["labels"][naming.LABEL_NAME] == naming.OPERATOR_APP


def test_the_operators_pods_are_those_of_a_restricted_namespace(cluster, namespace):
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    objects = render(cluster)
    template = of_kind(objects, "Deployment")["spec"]["template"]
    pods = [template["spec"], of_kind(objects, "Pod")["spec"]]
    for spec in pods:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "pod"},
            "spec": spec | {"serviceAccountName": "default"},
        }
        cluster.kubectl("create", "--dry-run=server", "-n", namespace, "-f", "-", stdin=json.dumps(pod))


def test_the_charts_pods_are_what_a_hostile_reader_asks_of_pods(cluster):
    """What kube-score finds wrong in a chart, but for what is so on purpose: no CPU limit (values.yaml says why), the pull policy left to
    the cluster (tags are versions, a digest may be given), and hosts spread by topologySpreadConstraints instead of an anti-affinity.
    """
    objects = render(cluster)
    deployment, policies = of_kind(objects, "Deployment"), [o["spec"] for o in objects if o["kind"] == "NetworkPolicy"]
    assert (
        deployment["spec"]["template"]["spec"]["topologySpreadConstraints"][0]["topologyKey"]
        == "kubernetes.io/hostname"
    )
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(
        deployment["spec"]["template"]["spec"]["containers"][0]
    )
    for pod in (deployment["spec"]["template"], of_kind(objects, "Pod")):
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert min(spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]) >= 10000
        assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"]["requests"])
        assert {"memory", "ephemeral-storage"} <= set(container["resources"]["limits"])
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert ":" in container["image"] and not container["image"].endswith(":latest")
        fences = [policy for policy in policies if selects(policy["podSelector"], pod["metadata"]["labels"])]
        assert [policy["policyTypes"] for policy in fences] == [["Ingress", "Egress"]]


def test_no_right_is_a_wildcard_and_secrets_are_neither_listed_nor_watched(cluster):
    for values in ({}, {"watchNamespaces": ["a"]}):
        for role in render(cluster, **values):
            for right in role.get("rules", []) if role["kind"] in ("Role", "ClusterRole") else []:
                assert "*" not in [*right["apiGroups"], *right["resources"], *right["verbs"]], role["metadata"]["name"]
                if "secrets" in right["resources"]:
                    assert set(right["verbs"]) <= {"create", "get"}
                    assert "get" not in right["verbs"] or right.get("resourceNames") == ["rljob-operator-master-key"]
                assert not {"pods/exec", "pods/log", "nodes"} & set(right["resources"])


def test_with_namespaces_given_the_operator_has_no_right_elsewhere(cluster):
    objects = render(cluster, watchNamespaces=["a", "b"], **{"rbac.aggregate": False})
    assert not [item for item in objects if item["kind"] in ("ClusterRole", "ClusterRoleBinding")]
    assert {item["metadata"]["namespace"] for item in objects if item["kind"] == "RoleBinding"} == {"a", "b", NAMESPACE}


@pytest.mark.parametrize(
    ("role", "may", "may_not"),
    [("view", ["list", "get"], ["create", "delete"]), ("edit", ["list", "create", "patch", "delete"], [])],
)
def test_viewers_see_jobs_and_editors_change_them_but_never_the_status(installed, namespace, role, may, may_not):
    account = f"{namespace}:{role}"
    installed.kubectl("create", "serviceaccount", role, "-n", namespace)
    binding = ["create", "rolebinding", role, f"--clusterrole={role}", f"--serviceaccount={account}", "-n", namespace]
    installed.kubectl(*binding)

    def can(verb, *words):
        asking = ["auth", "can-i", verb, "rljobs.rljob.dev", *words, "-n", namespace]
        return installed.kubectl(*asking, f"--as=system:serviceaccount:{account}", check=False).stdout.strip() == "yes"

    eventually(lambda: all(can(verb) for verb in may))  # controllers gather the rights in the cluster's own roles
    assert [verb for verb in (*may, *may_not) if can(verb)] == may
    assert can("get", "--subresource=status") and not can("patch", "--subresource=status")
    assert can("patch", "--subresource=scale") == (role == "edit")


def test_uninstalling_keeps_the_definition_and_the_jobs(cluster, namespace):
    words = ["-n", "short", "--create-namespace", "--set", "replicas=0", "--set", "rbac.aggregate=false"]
    try:
        cluster.helm("install", "short", CHART, *words, "--take-ownership")
        cluster.wait_served("rljob.dev", "v1alpha1", "rljobs")
        cluster.kubectl("create", "-n", namespace, "-f", "-", stdin=json.dumps(job("stays", suspend=True)))
    finally:  # its policies are of the whole cluster, and hold for the next tests' jobs
        cluster.helm("uninstall", "short", "-n", "short", "--ignore-not-found")
    assert cluster.get("rljob", "stays", namespace=namespace)["spec"]["suspend"] is True
    assert not cluster.get("deployments", namespace="short")["items"]


def test_alerts_are_well_formed_and_lead_to_their_section_of_the_runbook(cluster):
    rule = of_kind(render(cluster, prometheusRule={"enabled": True}), "PrometheusRule")
    sections = anchors()
    for group in rule["spec"]["groups"]:
        for alert in group["rules"]:
            url = alert["annotations"]["runbook_url"]
            assert url.endswith(f"docs/runbook.md#{alert['alert'].lower()}")
            assert alert["alert"].lower() in sections, f"docs/runbook.md has no section for {alert['alert']}"
            assert alert["labels"]["severity"] in ("info", "warning", "critical")


def anchors():
    lines = (ROOT / "docs" / "runbook.md").read_text().splitlines()
    return {line.lstrip("#").strip().lower().replace(" ", "-") for line in lines if line.startswith("#")}


def test_alerts_and_the_dashboard_ask_for_metrics_that_the_operator_has():
    import re

    import rljob_operator.runtime.metrics as metrics

    known = set(re.findall(r"^\| (rljob_\w+)", metrics.__doc__, re.MULTILINE))
    text = (CHART / "files" / "alerts.yaml").read_text() + (CHART / "files" / "dashboard.json").read_text()
    asked = set(re.findall(r"\brljob_\w+", text))
    assert asked and {name.removesuffix("_bucket") for name in asked} <= known


def test_the_test_pods_program_compiles():
    done = subprocess.run(
        ["python3", "-c", f"compile(open({str(CHART / 'files' / 'check.py')!r}).read(), 'check', 'exec')"], check=False
    )
    assert done.returncode == 0
