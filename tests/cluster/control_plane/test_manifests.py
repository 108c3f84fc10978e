"""Generated objects before a real API server: taken without a warning, unknown field or loss, in a namespace that enforces `restricted`."""

import json

import pytest
import yaml

from rl_core.plan.colocated import colocate
from rljob_operator import manifests
from rljob_operator.manifests import network
from tests.unit.operator.manifest_samples import CONFIG, MASTER, full_job, make_job, make_plan

DRA = {"gpuAllocation": "dra", "deviceClass": "gpu.example.com"}
JOBS = {
    "minimal": {},
    "longest name": {"name": "j" * 40},
    "gang": {"actor": {"replicas": 3}, "algorithm": {"promptsPerStep": 33}, "rollout": {"replicas": 2}},
    "device plugin": {"actor": {"gpus": 2, "processesPerPod": 2}, "rollout": {"gpus": 1}},
    "claims": {"actor": {"gpus": 2} | DRA, "rollout": {"gpus": 1} | DRA},
    "storage": {"checkpoint": {"path": "/data/ckpt"}, "actor": {
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}]}},
}  # fmt: skip


@pytest.fixture
def restricted(control_plane, namespace):
    """A namespace in which only pods of the profile `restricted` are taken, and warned about."""
    labels = [f"pod-security.kubernetes.io/{mode}=restricted" for mode in ("enforce", "warn")]
    control_plane.kubectl("label", "namespace", namespace, *labels)
    return namespace


@pytest.fixture
def real_job(control_plane, namespace):
    """Make a job that the API server knows: the garbage collector takes what has an unknown owner."""

    def make(**spec):
        written = make_job(namespace=namespace, **spec).model_dump(mode="json", by_alias=True, exclude_unset=True)
        made = control_plane.custom.create_namespaced_custom_object(
            "rljob.dev", "v1alpha1", namespace, "rljobs", written
        )
        return make_job(namespace=namespace, uid=made["metadata"]["uid"], **spec)

    return make


@pytest.fixture
def job_in(restricted):
    """Make a job of that namespace."""
    return lambda make=make_job, **spec: make(namespace=restricted, **spec)


def dry_run(access, namespace, objects):
    """Return the objects as the API server would store them; fails on unknown fields, refusals and warnings."""
    done = access.kubectl(
        *("create", "--dry-run=server", "--validate=strict", "-n", namespace, "-o", "json", "-f", "-"),
        stdin=yaml.safe_dump_all(objects),
    )
    assert not done.stderr, done.stderr
    decoder, found, rest = json.JSONDecoder(), [], done.stdout.lstrip()
    while rest:
        stored, end = decoder.raw_decode(rest)
        found.append(stored)
        rest = rest[end:].lstrip()
    return found


def kept(stored, sent, path=""):
    """Yield where `stored` lost or changed something of `sent`; the API server may add defaults."""
    if isinstance(sent, dict):
        for key, value in sent.items():
            if key not in (stored or {}):
                if value not in ({}, [], "", False):  # defaults the server leaves out
                    yield f"{path}.{key} was dropped"
            else:
                yield from kept(stored[key], value, f"{path}.{key}")
    elif isinstance(sent, list):
        if len(stored) < len(sent):
            yield f"{path} has {len(stored)} of {len(sent)} items"
        for index, value in enumerate(sent):
            yield from kept(stored[index], value, f"{path}[{index}]")
    elif stored != sent and str(stored) != str(sent):
        yield f"{path}: {sent!r} became {stored!r}"


def check(access, namespace, objects):
    """Assert that the API server takes `objects` as they are, and network policies without any addition: no pod is created under others."""
    for stored, sent in zip(dry_run(access, namespace, objects), objects, strict=True):
        assert list(kept(stored, sent, f"{sent['kind']}/{sent['metadata']['name']}")) == []
        if sent["kind"] == network.KIND:
            assert network.digest_of(stored) == network.digest_of(sent)


def everything(job, plan=None):
    """Return all objects of a job."""
    plan = plan or make_plan(job)
    return [
        *manifests.support.build(job, config=CONFIG),
        manifests.secret.build(job, master=MASTER),
        *(manifests.pods.build(job, pod, config=CONFIG) for pod in plan.pods),
    ]


@pytest.mark.parametrize("spec", JOBS.values(), ids=JOBS)
def test_all_objects_of_a_job_are_taken_as_they_are(control_plane, restricted, job_in, spec):
    check(control_plane, restricted, everything(job_in(**spec)))


def test_a_pod_with_every_field_is_taken_as_it_is(control_plane, restricted, job_in):
    """Only what must exist is made first: the account, the classes."""
    control_plane.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "trainer"}},
        {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"},
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "team-high"}, "value": 10},
        namespace=restricted,
    )
    job = job_in(full_job)
    high = {
        role: getattr(job.spec, role).model_copy(update={"priority_class_name": "team-high"})
        for role in ("actor", "rollout", "env")
    }
    check(control_plane, restricted, everything(job.model_copy(update={"spec": job.spec.model_copy(update=high)})))


@pytest.mark.parametrize(("shape", "role"), [("containers", DRA), ("processes", {})])
def test_colocated_shapes_are_taken_as_they_are(control_plane, restricted, job_in, shape, role):
    job = job_in(actor={"gpus": 1} | role, rollout={"gpus": 1} | role)
    check(control_plane, restricted, everything(job, colocate(make_plan(job), shape=shape)))


def test_support_objects_are_the_same_after_a_second_server_side_apply(control_plane, namespace, real_job):
    objects = manifests.support.build(real_job(**JOBS["claims"]), config=CONFIG)

    def versions():
        control_plane.apply(*objects, namespace=namespace)
        return {
            (o["kind"], o["metadata"]["name"]): control_plane.get(o["kind"], o["metadata"]["name"], namespace=namespace)["metadata"]["resourceVersion"]
            for o in objects
        }  # fmt: skip

    assert versions() == versions()
    assert len(objects) == 9


def test_a_deleted_secret_comes_back_byte_equal(control_plane, namespace, real_job):
    secret = manifests.secret.build(real_job(), master=MASTER)
    name = secret["metadata"]["name"]
    seen = []
    for _ in range(2):
        control_plane.core.create_namespaced_secret(namespace, secret)
        seen.append(control_plane.core.read_namespaced_secret(name, namespace).data)
        control_plane.core.delete_namespaced_secret(name, namespace)
    assert seen[0] == seen[1] == secret["data"]
