"""What the chart's policy lets users of jobs have, by default and where the administrator says more. Users act with tokens of their own.

Two releases, each bound to a namespace: one with the chart's defaults, one with a policy written out.
"""

import json
from collections.abc import Iterator

import pytest
import yaml

from tests.cluster.operator_rig.charts import CHART, eventually, job
from tests.cluster.testcluster.access import Access

STRICT = {
    "allowedImagePrefixes": ["registry.test/", "ghcr.io/team/"],
    "maxGpusPerJob": 8,
    "claimDevices": {"nic": 0, "four": 4},
    "allowedPriorityClasses": ["low", "high"],
    "allowedServiceAccounts": ["trainer"],
    "allowedCsiDrivers": ["secrets-store.csi.k8s.io"],
    "allowedNfsServers": ["nfs.test"],
    "allowIpcLock": True,
    "allowHostNetwork": True,
}
POLICIES = {"defaults": {}, "strict": STRICT}
KINDS = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
ASK = "or ask the cluster administrator (chart value policy."
ELASTIC = {"name": "judge", "worker": "judges:Judge"}


def of_group(**fields):
    """Return a spec with a group of these fields beside one that obeys."""
    return {"groups": [{**ELASTIC, "name": "scorer"}, {**ELASTIC, **fields}]}


DRA = {"gpuAllocation": "dra", "deviceClass": "gpu.example.com"}


def shared(mode="colocated", *, rollouts=None, **fields):
    """Return a spec with these fields of actor and rollout, which share devices; `rollouts` are more fields of the rollout."""
    return {"placement": {"mode": mode}, "actor": fields, "rollout": fields | (rollouts or {})}


CAPABILITIES = {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}


class User:
    """Somebody who may do all with RLJobs of one namespace, and nothing else."""

    def __init__(self, access: Access, namespace: str) -> None:
        self._access, self._namespace = access, namespace
        bound = ("--role=jobs", f"--serviceaccount={namespace}:researcher")
        for words in (
            ("create", "namespace", namespace),
            ("create", "serviceaccount", "researcher", "-n", namespace),
            ("create", "role", "jobs", "--verb=*", "--resource=rljobs.rljob.dev", "-n", namespace),
            ("create", "rolebinding", "jobs", *bound, "-n", namespace),
        ):
            access.kubectl(*words)
        self._kubeconfig = access.kubeconfig_of("researcher", namespace=namespace)

    def __call__(self, *words: str, document: dict | None = None) -> str:
        """Run kubectl as the user; return what it says against it, empty when it is done."""
        text = json.dumps(document) if document is not None else None
        words = (*words, "-n", self._namespace, "--kubeconfig", str(self._kubeconfig))
        done = self._access.kubectl(*words, *(("-f", "-") if text else ()), stdin=text, check=False)
        return "" if done.returncode == 0 else done.stderr

    def tries(self, **spec: object) -> str:
        """Say what keeps the user from creating a job; empty when nothing does."""
        return self("create", "--dry-run=server", document=job(**spec))


def policies(access: Access, name: str, **changed: object) -> list[dict]:
    """Return the policies of a release that serves the namespace of that name."""
    values = [
        f"--set-json=policy={json.dumps(POLICIES[name] | changed)}",
        f"--set-json=watchNamespaces={json.dumps([space(name)])}",
    ]
    text = access.helm("template", "rljob", CHART, "-n", f"policy-{name}-op", *values).stdout
    return [obj for obj in yaml.safe_load_all(text) if obj and obj["kind"] in KINDS]


def space(name: str) -> str:
    return f"policy-{name}"


@pytest.fixture(scope="module")
def users(control_plane: Access) -> Iterator[dict[str, User]]:
    """A user under each policy, once it is in force."""
    objects = [obj for name in POLICIES for obj in policies(control_plane, name)]
    found = {name: User(control_plane, space(name)) for name in POLICIES}
    control_plane.apply(*objects)
    try:
        for user in found.values():
            eventually(
                lambda user=user: "serviceAccountName must be" in user.tries(env={"serviceAccountName": "admin"})
            )
        yield found
    finally:
        for obj in objects:
            control_plane.kubectl("delete", obj["kind"], obj["metadata"]["name"], "--wait=false")
        for name in POLICIES:
            control_plane.delete_namespace(space(name), pods_first=False)


@pytest.mark.parametrize(
    ("policy", "spec", "message"),
    [
        ("defaults", {"actor": {"priorityClassName": "system-node-critical"}},
         f"spec.actor.priorityClassName must not be one of the system, got system-node-critical; choose another, {ASK}allowedPriorityClasses)"),
        ("defaults", {"env": {"serviceAccountName": "admin"}},
         f'spec.env.serviceAccountName must be one of ["default"], got admin; choose one, {ASK}allowedServiceAccounts)'),
        ("defaults", {"rollout": {"tolerations": [{"operator": "Exists"}]}},
         'spec.rollout.tolerations must not have the keys ["", "node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"] (the empty one tolerates all taints), got [""]; name the taint'),
        ("defaults", {"env": {"volumes": [{"name": "v", "csi": {"driver": "host.example.com"}}]}},
         f'spec.env.volumes: inline CSI drivers must be among [], got ["host.example.com"]; use a claim, {ASK}allowedCsiDrivers)'),
        ("defaults", {"env": {"volumes": [{"name": "v", "nfs": {"server": "nfs.test", "path": "/home"}}]}},
         f'spec.env.volumes: NFS servers must be among [], got ["nfs.test"]; use a claim, {ASK}allowedNfsServers)'),
        ("defaults", {"actor": CAPABILITIES},
         f"spec.actor.securityContext.capabilities must be empty, got IPC_LOCK; remove it, {ASK}allowIpcLock)"),
        ("defaults", {"rollout": {"hostNetwork": True}},
         f"spec.rollout.hostNetwork must be false, got true; remove it, {ASK}allowHostNetwork)"),
        ("strict", {"actor": {"image": "docker.io/evil"}},
         'spec.actor: images must begin with one of ["registry.test/", "ghcr.io/team/"], got ["docker.io/evil"]; use such an image'),
        ("strict", {"env": {"initContainers": [{"name": "i", "image": "evil"}]}}, 'images must begin with one of ["registry.test/", "ghcr.io/team/"], got ["evil"]'),
        ("strict", {"rollout": {"volumes": [{"name": "m", "image": {"reference": "evil/model"}}]}}, 'got ["evil/model"]; use such an image'),
        ("strict", {"rollout": {"priorityClassName": "urgent"}},
         f'spec.rollout.priorityClassName must be one of ["low", "high"], got urgent; choose one, {ASK}allowedPriorityClasses)'),
        ("strict", {"actor": {"serviceAccountName": "admin"}},
         'spec.actor.serviceAccountName must be one of ["default", "trainer"], got admin; choose one'),
        ("strict", {"actor": {"gpus": 4}, "rollout": {"gpus": 1, "replicas": 2, "maxReplicas": 5}},
         f"spec: devices of all pods must not exceed 8, got 9; lower gpus, resources or replicas, {ASK}maxGpusPerJob)"),
        ("strict", {"env": {"resources": {"limits": {"nvidia.com/mig-1g.10gb": 3}}, "replicas": 3}}, "must not exceed 8, got 9"),
        ("strict", {"actor": {"resources": {"limits": {"amd.com/gpu": "9", "rdma/hca": 1}}}}, "must not exceed 8, got 9"),
        ("strict", {"env": {"initContainers": [{"name": "i", "resources": {"limits": {"google.com/tpu": "1k"}}}]}}, "must not exceed 8, got 1000"),
        ("strict", {"actor": {"gpus": 5, "processesPerPod": 1, "resourceClaims": [{"name": "a", "resourceClaimTemplateName": "four"}]}}, "must not exceed 8, got 9"),
        ("strict", {"actor": {"resourceClaims": [{"name": "a", "resourceClaimName": "unknown"}]}},
         f'spec.actor.resourceClaims must name claims or templates whose devices are known, ["four", "nic"], got ["unknown"]; use gpus with gpuAllocation dra, {ASK}claimDevices)'),
        ("defaults", of_group(priorityClassName="system-node-critical"), "spec.groups: priorityClassName must not be one of the system"),
        ("defaults", of_group(serviceAccountName="admin"), "spec.groups: serviceAccountName must be one of default; choose one"),
        ("defaults", of_group(tolerations=[{"operator": "Exists"}]), "spec.groups: tolerations must name a taint that is not forbidden"),
        ("defaults", of_group(volumes=[{"name": "v", "csi": {"driver": "host.example.com"}}]), "spec.groups: inline CSI drivers must be among []"),
        ("defaults", of_group(volumes=[{"name": "v", "nfs": {"server": "nfs.test", "path": "/home"}}]), "spec.groups: NFS servers must be among []"),
        ("defaults", of_group(**CAPABILITIES), "spec.groups: securityContext.capabilities must be empty"),
        ("strict", of_group(image="docker.io/evil"),
         'spec.groups: images must begin with one of ["registry.test/", "ghcr.io/team/"], got [[], ["docker.io/evil"]]; use such an image'),
        ("strict", of_group(initContainers=[{"name": "i", "image": "evil"}]), 'got [[], ["evil"]]; use such an image'),
        ("strict", of_group(priorityClassName="urgent"), "spec.groups: priorityClassName must be one of low, high; choose one"),
        ("strict", {"actor": {"gpus": 4}, **of_group(gpus=1, replicas=5)}, "must not exceed 8, got 9"),
        ("strict", of_group(resources={"limits": {"nvidia.com/mig-1g.10gb": 3}}, replicas=3), "must not exceed 8, got 9"),
        ("strict", of_group(gpus=1, resourceClaims=[{"name": "a", "resourceClaimTemplateName": "four"}], replicas=2), "must not exceed 8, got 10"),
        ("strict", of_group(resourceClaims=[{"name": "a", "resourceClaimName": "unknown"}]),
         'spec.groups: resourceClaims must name claims or templates whose devices are known, ["four", "nic"], got [[], ["unknown"]]; use gpus'),
        ("strict", shared(gpus=4, replicas=4), "must not exceed 8, got 16"),
        ("strict", shared("hybrid", gpus=2, replicas=2, rollouts={"replicas": 3, "maxReplicas": 5}), "must not exceed 8, got 10"),
        ("strict", shared(gpus=2, replicas=2, **DRA, rollouts={"resources": {"limits": {"amd.com/gpu": 3}}}), "must not exceed 8, got 10"),
        ("strict", {"rollout": {"resources": {"limits": {"amd.com/gpu": 1}}}},
         "spec.rollout.maxReplicas must be given where devices per job are limited, got none; set it to the most rollouts that `kubectl scale` may ask for"),
    ],
)  # fmt: skip
def test_what_the_policy_refuses_a_user_with_field_rule_value_and_way_out(users, policy, spec, message):
    said = users[policy].tries(**spec)
    assert message in said, said


@pytest.mark.parametrize(
    ("policy", "spec"),
    [
        ("defaults", {}),
        ("defaults", of_group(image="any", gpus=64, serviceAccountName="default", priorityClassName="high")),
        ("strict", of_group(image="registry.test/judge", gpus=4, replicas=2, priorityClassName="low", **CAPABILITIES)),
        ("defaults", {"actor": {"image": "any", "gpus": 64, "processesPerPod": 1, "serviceAccountName": "default", "priorityClassName": "high"}}),
        ("defaults", {"env": {"tolerations": [{"key": "gpu", "operator": "Exists"}], "resourceClaims": [{"name": "a", "resourceClaimName": "b"}]}}),
        ("strict", {"actor": {"resourceClaims": [{"name": "a", "resourceClaimTemplateName": "nic"}], "gpus": 8, **CAPABILITIES, "hostNetwork": True}}),
        ("strict", shared(gpus=4, replicas=2)),
        ("strict", shared(gpus=4, replicas=2, **DRA)),
        ("strict", shared("hybrid", gpus=2, replicas=2, rollouts={"replicas": 2, "maxReplicas": 4})),
        ("strict", {"env": {"resources": {"limits": {"rdma/hca": 100, "cpu": 64}}, "serviceAccountName": "trainer"}}),
        ("strict", {"env": {"volumes": [{"name": "a", "nfs": {"server": "nfs.test", "path": "/x"}}, {"name": "b", "csi": {"driver": "secrets-store.csi.k8s.io"}}]}}),
    ],
    ids=["plain", "groups", "groups within limits", "much by default", "claims without a limit",
         "colocated", "colocated by claims", "hybrid", "rdma", "network cards", "volumes"],
)  # fmt: skip
def test_what_the_policy_lets_a_user_have(users, policy, spec):
    assert users[policy].tries(**spec) == ""


def test_the_limit_of_devices_holds_at_scale(users):
    user = users["strict"]
    good = job("scaled", actor={"gpus": 4}, rollout={"gpus": 1, "replicas": 1, "maxReplicas": 4})
    assert user("create", document=good) == ""
    assert "maxReplicas must not be below replicas 5, got 4" in user(
        "patch", "rlj/scaled", *merge(rollout={"replicas": 5})
    )
    assert user("patch", "rlj/scaled", *merge(rollout={"replicas": 4})) == ""
    assert "devices of all pods must not exceed 8, got 9" in user(
        "patch", "rlj/scaled", *merge(rollout={"maxReplicas": 5})
    )


def test_a_tightened_policy_leaves_metadata_of_older_jobs_editable(control_plane, users):
    user, older = users["strict"], job("older", actor={"serviceAccountName": "admin"})
    control_plane.apply(*policies(control_plane, "strict", allowedServiceAccounts=["*"]))
    eventually(lambda: user("apply", document=older) == "")
    control_plane.apply(*policies(control_plane, "strict"))
    eventually(
        lambda: "serviceAccountName must be" in user("patch", "rlj/older", "--dry-run=server", *merge(suspend=True))
    )
    assert user("annotate", "rlj/older", "note=kept") == ""


def merge(**spec: object) -> tuple[str, ...]:
    return "--type=merge", "-p", json.dumps({"spec": spec})


def test_no_job_is_taken_beside_the_master_key(control_plane, users):
    """Bound to no namespaces, as a release that serves all is."""
    text = control_plane.helm("template", "rljob", CHART, "-n", space("defaults")).stdout
    objects = [obj for obj in yaml.safe_load_all(text) if obj and obj["kind"] in KINDS]
    control_plane.apply(*objects)
    try:
        words = (
            "metadata.namespace must not be the namespace of the operator and its master key, got policy-defaults; "
            "create the job in another namespace"
        )
        eventually(lambda: words in users["defaults"].tries())
        assert users["strict"].tries() == ""
    finally:
        for obj in objects:
            control_plane.kubectl("delete", obj["kind"], obj["metadata"]["name"], "--wait=false")
