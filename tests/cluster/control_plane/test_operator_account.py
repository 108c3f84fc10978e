"""Who takes the operator's account over gets no other pod, Secret or namespace: its token is tried on the real API server."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from rljob_operator import manifests
from tests.cluster.control_plane.conftest import AUDIENCE
from tests.cluster.testcluster.access import Access
from tests.unit.operator.manifest_samples import CONFIG, make_job, make_plan

UNOWNED = "the operator must touch only what an RLJob owns"
SYSTEM = "the operator must not touch namespace kube-system"
PRIVILEGED = "must be unprivileged, not root, under RuntimeDefault seccomp and without capabilities"


@pytest.fixture
def act(control_plane: Access, account: Path, namespace: str):
    """Run kubectl as the operator's account; returns what it says against it, empty when it is done."""

    def act(*words: str, document: dict[str, Any] | None = None) -> str:
        text = json.dumps(document) if document is not None else None
        given = (*words, *(("-f", "-") if text else ()), "--kubeconfig", account)
        done = control_plane.kubectl(*given, *(() if "-n" in words else ("-n", namespace)), stdin=text, check=False)
        return "" if done.returncode == 0 else done.stderr

    return act


@pytest.fixture
def pod(namespace: str) -> dict[str, Any]:
    """A pod as the operator makes it."""
    made = make_job(namespace=namespace)
    return manifests.pods.build(made, make_plan(made).pods[0], config=CONFIG)


def changed(pod: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return the pod with another value at `path`; None takes the field away."""
    found = copy.deepcopy(pod)
    at: Any = found
    *steps, last = path.split(".")
    for step in steps:
        at = at[int(step)] if step.isdigit() else at.setdefault(step, {})
    if value is None:
        at.pop(last)
    elif isinstance(at.get(last), list) and isinstance(value, dict):
        at[last].append(value)
    else:
        at[last] = value
    return found


def test_its_pods_are_those_of_jobs_and_no_others(act, pod):
    assert act("create", "--dry-run=server", document=pod) == ""
    token = {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}
    other = {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t", "audience": "vault"}}]}}
    of_cloud = {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t", "audience": AUDIENCE}}]}}
    assert act("create", "--dry-run=server", document=changed(pod, "spec.volumes", of_cloud)) == ""
    main = "spec.containers.0.securityContext"
    wrong = [
        ("metadata.ownerReferences", None, UNOWNED),
        ("metadata.ownerReferences.0.kind", "Deployment", UNOWNED),
        ("spec.automountServiceAccountToken", True, "automountServiceAccountToken of a job's pod must be false"),
        ("spec.hostNetwork", True, "must not have nodeName, hostPID, hostIPC or hostNetwork"),
        ("spec.hostPID", True, "must not have nodeName, hostPID"),
        ("spec.nodeName", "node-1", "must not have nodeName"),
        ("spec.containers.0.ports.0.hostPort", 7700, "must not have a hostPort"),
        ("spec.priorityClassName", "system-node-critical", "must not have a priority class of the system"),
        ("spec.volumes", {"name": "h", "hostPath": {"path": "/"}}, "volumes of the host"),
        ("spec.volumes", token, "a service account's token"),
        ("spec.volumes", other, "a service account's token"),
        (f"{main}.privileged", True, PRIVILEGED),
        (f"{main}.runAsNonRoot", False, PRIVILEGED),
        (f"{main}.capabilities.add", ["SYS_ADMIN"], PRIVILEGED),
        (f"{main}.seccompProfile.type", "Unconfined", PRIVILEGED),
        ("spec.securityContext.seccompProfile.type", "Unconfined", PRIVILEGED),
        ("spec.initContainers", [{"name": "i", "image": "i"}], PRIVILEGED),
    ]
    for path, value, words in wrong:
        refused = changed(pod, path, value)
        if path == f"{main}.privileged":
            refused["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
        said = act("create", "--dry-run=server", document=refused)
        assert words in said, (path, said)


def test_it_touches_nothing_of_others_and_gets_no_token_though_it_has_the_right(
    control_plane, act, pod, namespace, home
):
    token = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/service-account-token",
        "metadata": {
            "name": "x-keys-0b7c1a2d",
            "annotations": {"kubernetes.io/service-account.name": "default"},
            "ownerReferences": [manifests.secret.build(make_job(), master=bytes(32))["metadata"]["ownerReferences"][0]],
        },
    }
    assert "must make no Secret but those of keys" in act("create", "--dry-run=server", document=token)
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "theirs"}, "data": {"a": "1"}}
    control_plane.apply(theirs, namespace=namespace)
    stolen = changed(theirs, "metadata.ownerReferences", token["metadata"]["ownerReferences"])
    assert UNOWNED in act("apply", "--server-side", "--force-conflicts", document=stolen)
    control_plane.kubectl("run", "web", "--image=web", "-n", namespace)
    assert UNOWNED in act("delete", "pod", "web", "--wait=false")
    control_plane.kubectl("get", "pod", "web", "-n", namespace)
    bound = ("--clusterrole=admin", f"--serviceaccount={home}:rljob-operator", "-n", "kube-system")
    control_plane.kubectl("create", "rolebinding", f"{namespace}-test", *bound)
    try:
        pod["metadata"]["namespace"] = "kube-system"
        assert SYSTEM in act("create", "--dry-run=server", "-n", "kube-system", document=pod)
    finally:
        control_plane.kubectl("delete", "rolebinding", f"{namespace}-test", "-n", "kube-system")
