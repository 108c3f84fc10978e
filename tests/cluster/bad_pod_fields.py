"""Bad pod fields of a role: keys of others, variables, volumes and destinations that no job may have. A part of bad_jobs.CASES."""

from bad_placements import SAME

KEYS = "other-keys-0b7c1a2d"
MASTER = "rljob-operator-master-key"


def _keys(path, name=KEYS):
    return f"{path} must not be that of keys (NAME-keys-UID or the master key), got {name}; name a Secret of your own"


def _volume(**kind):
    return {"volumes": [{"name": "stolen", **kind}]}


POD_FIELDS = {
    # spec, field, message, whether pydantic says the same words
    "keys-as-variables": (
        {"env": {"envFrom": [{"secretRef": {"name": KEYS}}]}},
        "spec.env.envFrom[0].secretRef.name",
        _keys("secretRef.name"),
        SAME,
    ),
    "master-key-as-variables": (
        {"rollout": {"envFrom": [{"prefix": "X", "secretRef": {"name": MASTER}}]}},
        "spec.rollout.envFrom[0].secretRef.name",
        _keys("secretRef.name", MASTER),
        SAME,
    ),
    "keys-as-a-variable": (
        {"actor": {"envValueFrom": [{"name": "K", "secretKeyRef": {"name": KEYS, "key": "actor.secret"}}]}},
        "spec.actor.envValueFrom[0].secretKeyRef.name",
        _keys("secretKeyRef.name"),
        SAME,
    ),
    "keys-as-a-variable-of-an-init-container": (
        {"env": {"initContainers": [{"name": "i", "envValueFrom": [{"name": "K", "secretKeyRef": {"name": KEYS, "key": "k"}}]}]}},
        "spec.env.initContainers[0].envValueFrom[0].secretKeyRef.name",
        _keys("secretKeyRef.name"),
        SAME,
    ),
    "keys-as-files": (
        {"env": _volume(secret={"secretName": KEYS, "optional": True})},
        "spec.env.volumes[0].secret.secretName",
        _keys("secretName"),
        SAME,
    ),
    "keys-among-files": (
        {"env": _volume(projected={"sources": [{"secret": {"name": MASTER}}]})},
        "spec.env.volumes[0].projected.sources[0].secret.name",
        _keys("name", MASTER),
        SAME,
    ),
    "keys-for-a-driver": (
        {"env": _volume(csi={"driver": "d.example.com", "nodePublishSecretRef": {"name": KEYS}})},
        "spec.env.volumes[0].csi.nodePublishSecretRef.name",
        _keys("name"),
        SAME,
    ),
    "identity-by-a-source": (
        {"rollout": {"envValueFrom": [{"name": "NVIDIA_VISIBLE_DEVICES", "configMapKeyRef": {"name": "a", "key": "b"}}]}},
        "spec.rollout.envValueFrom[0].name",
        "name must not be a variable the launcher owns, got NVIDIA_VISIBLE_DEVICES; remove it",
        SAME,
    ),
    "value-from-two-places": (
        {"env": {"envValueFrom": [{"name": "A", "fieldRef": {"fieldPath": "status.podIP"}, "secretKeyRef": {"name": "a", "key": "b"}}]}},
        "spec.env.envValueFrom[0]",
        "an entry of envValueFrom must have exactly one of configMapKeyRef, secretKeyRef, fieldRef, resourceFieldRef, got 2; give one",
        SAME,
    ),
    "value-and-source": (
        {"env": {"env": {"A": "1"}, "envValueFrom": [{"name": "A", "fieldRef": {"fieldPath": "status.podIP"}}]}},
        "spec.env.envValueFrom",
        'envValueFrom must not set variables of env, got ["A"]; remove one of the two',
        SAME,
    ),
    "field-of-no-pod": (
        {"env": {"envValueFrom": [{"name": "A", "fieldRef": {"fieldPath": "status.phase"}}]}},
        "spec.env.envValueFrom[0].fieldRef.fieldPath",
        "must be a field of the pod such as spec.nodeName or status.podIP, got status.phase; choose such a field",
        SAME,
    ),
    "gpu-resource-twice": (
        {"actor": {"gpuResource": "amd.com/gpu", "resources": {"limits": {"amd.com/gpu": 8}}}},
        "spec.actor.resources",
        "resources.limits must not name the role's gpuResource, got amd.com/gpu; set the role's gpus instead",
        SAME,
    ),
    "gpu-resource-without-a-vendor": (
        {"actor": {"gpuResource": "memory"}},
        "spec.actor.gpuResource",
        "must be a resource of a device plugin such as nvidia.com/gpu, got memory; write vendor/resource",
        SAME,
    ),
    "annotation-for-devices": (
        {"env": {"annotations": {"cdi.k8s.io/env": "nvidia.com/gpu=all"}}},
        "spec.env.annotations",
        'annotations must not start with rljob.dev/ or set apparmor, seccomp or devices, which the operator does, got ["cdi.k8s.io/env"]; remove them',
        SAME,
    ),
    "egress-to-the-metadata-service": (
        {"env": {"egress": [{"cidr": "169.254.169.254/32"}]}},
        "spec.env.egress[0].cidr",
        "cidr must not be of link-local addresses or the cloud's metadata service, got 169.254.169.254/32; remove the entry",
        SAME,
    ),
    "egress-to-no-address": (
        {"actor": {"egress": [{"cidr": "10.0.0.300/8"}]}},
        "spec.actor.egress[0].cidr",
        "cidr must be an address block such as 10.0.0.0/8, got 10.0.0.300/8; write address/bits",
        SAME,
    ),
}  # fmt: skip
