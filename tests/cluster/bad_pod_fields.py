"""Bad pod fields of a role, as rows of `bad_jobs`: keys of others, variables, devices, volumes and destinations that no job may have."""

from tests.cluster.bad_placements import SAME

KEYS = "other-keys-0b7c1a2d"
VOLUME = {"name": "data", "emptyDir": {}}
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
    "identity-variable": (
        {"actor": {"env": {"RANK": "7"}}},
        "spec.actor.env",
        'env must not set variables the launcher owns, got ["RANK"]; remove them',
        SAME,
    ),
    "own-variable": (
        {"rollout": {"env": {"RLJOB_EPOCH": "7"}}},
        "spec.rollout.env",
        'env must not set variables the launcher owns, got ["RLJOB_EPOCH"]; remove them',
        SAME,
    ),
    "gpus-of-others": (
        {"env": {"initContainers": [{"name": "spy", "env": {"NVIDIA_VISIBLE_DEVICES": "all"}}]}},
        "spec.env.initContainers[0].env",
        'env must not set variables the launcher owns, got ["NVIDIA_VISIBLE_DEVICES"]; remove them',
        SAME,
    ),
    "gpus-as-a-resource": (
        {"rollout": {"resources": {"limits": {"nvidia.com/gpu": 2}}}},
        "spec.rollout.resources.limits",
        "resources.limits must not name nvidia.com/gpu, got 2; set the role's gpus instead",
        SAME,
    ),
    "class-without-dra": (
        {"actor": {"deviceClass": "gpu.nvidia.com"}},
        "spec.actor.deviceClass",
        "deviceClass needs gpuAllocation dra, got devicePlugin; set gpuAllocation: dra or remove deviceClass",
        SAME,
    ),
    "dra-without-class": (
        {"actor": {"gpuAllocation": "dra", "gpus": 1}},
        "spec.actor.gpuAllocation",
        "gpuAllocation dra needs deviceClass, got gpus 1 without one; name a DeviceClass of the cluster",
        SAME,
    ),
    "operator-label": (
        {"rollout": {"labels": {"rljob.dev/epoch": "1"}}},
        "spec.rollout.labels",
        'labels must not start with rljob.dev/ or app.kubernetes.io/, which the operator sets, got ["rljob.dev/epoch"]; rename them',
        SAME,
    ),
    "annotation-that-loosens-a-pod": (
        {"env": {"annotations": {"container.apparmor.security.beta.kubernetes.io/env": "unconfined"}}},
        "spec.env.annotations",
        'annotations must not start with rljob.dev/ or set apparmor, seccomp or devices, which the operator does, got ["container.apparmor.security.beta.kubernetes.io/env"]; remove them',
        SAME,
    ),
    "mount-over-the-keys": (
        {"actor": {"volumes": [VOLUME], "volumeMounts": [{"name": "data", "mountPath": "/etc/rljob/keys"}]}},
        "spec.actor.volumeMounts[0].mountPath",
        "mountPath must not be in /etc/rljob, /dev, /proc or /sys, got /etc/rljob/keys; choose another folder",
        SAME,
    ),
    "mount-by-a-detour": (
        {"actor": {"volumes": [VOLUME], "volumeMounts": [{"name": "data", "mountPath": "/data/../etc/rljob"}]}},
        "spec.actor.volumeMounts[0].mountPath",
        "must be an absolute path without :, // and .., got /data/../etc/rljob; begin it with / and name a folder",
        SAME,
    ),
    "volume-of-the-operator": (
        {"actor": {"volumes": [{"name": "rljob-keys", "emptyDir": {}}]}},
        "spec.actor.volumes[0].name",
        "name must not begin with rljob-, which the operator's own volumes do, got rljob-keys; rename it",
        SAME,
    ),
    "claim-of-the-operator": (
        {"rollout": {"resourceClaims": [{"name": "gpus", "resourceClaimName": "x"}]}},
        "spec.rollout.resourceClaims[0].name",
        "name must not be gpus, which is the claim of the role's gpus, got gpus; rename it",
        SAME,
    ),
    "volumes-of-one-name": (
        {"actor": {"volumes": [VOLUME, VOLUME]}},
        "spec.actor.volumes",
        "volumes must have unique names, got data more than once; change one",
        SAME,
    ),
    "init-containers-of-one-name": (
        {"actor": {"initContainers": [{"name": "fetch"}, {"name": "fetch"}]}},
        "spec.actor.initContainers",
        "initContainers must have unique names, got fetch more than once; change one",
        SAME,
    ),
    "two-mounts-on-one-path": (
        {"actor": {"volumes": [VOLUME], "volumeMounts": [{"name": "data", "mountPath": "/data"}] * 2}},
        "spec.actor.volumeMounts",
        "volumeMounts must have unique mountPaths, got /data more than once; change one",
        SAME,
    ),
    "mount-of-no-volume": (
        {"actor": {"volumes": [VOLUME], "volumeMounts": [{"name": "date", "mountPath": "/data"}]}},
        "spec.actor.volumeMounts",
        'volumeMounts must name a volume of the role, ["data"], got ["date"]; add it to volumes or correct the name',
        SAME,
    ),
    "init-mount-of-no-volume": (
        {
            "actor": {
                "initContainers": [{"name": "fetch", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}]
            }
        },
        "spec.actor.initContainers",
        'volumeMounts of init containers must name a volume of the role, [], got others in ["fetch"]; add it to volumes or correct the name',
        SAME,
    ),
    "volume-of-two-kinds": (
        {"actor": {"volumes": [VOLUME | {"configMap": {"name": "x"}}]}},
        "spec.actor.volumes[0]",
        "a volume must have exactly one of persistentVolumeClaim, ephemeral, configMap, secret, emptyDir, projected, image, nfs, csi, got 2; give one",
        SAME,
    ),
    "projection-of-nothing": (
        {"env": {"volumes": [{"name": "all", "projected": {"sources": [{}]}}]}},
        "spec.env.volumes[0].projected.sources[0]",
        "a source of a projected volume must have exactly one of configMap, secret, got 0; give one",
        SAME,
    ),
    "variables-from-two-places": (
        {"env": {"envFrom": [{"configMapRef": {"name": "a"}, "secretRef": {"name": "b"}}]}},
        "spec.env.envFrom[0]",
        "an entry of envFrom must have exactly one of configMapRef, secretRef, got 2; give one",
        SAME,
    ),
    "claim-from-nowhere": (
        {"rollout": {"resourceClaims": [{"name": "nic"}]}},
        "spec.rollout.resourceClaims[0]",
        "an entry of resourceClaims must have exactly one of resourceClaimName, resourceClaimTemplateName, got 0; give one",
        SAME,
    ),
    "quantity-in-words": (
        {"actor": {"shmSize": "1 GB"}},
        "spec.actor.shmSize",
        "must be a quantity: a whole number or text such as 500m or 2Gi, got 1 GB; write it so",
        SAME,
    ),
    "negative-memory": (
        {"env": {"resources": {"requests": {"memory": -1}}}},
        "spec.env.resources.requests[memory]",
        "must be a quantity: a whole number or text such as 500m or 2Gi, got -1; write it so",
        SAME,
    ),
    "relative-mount": (
        {"actor": {"volumes": [VOLUME], "volumeMounts": [{"name": "data", "mountPath": "data"}]}},
        "spec.actor.volumeMounts[0].mountPath",
        "must be an absolute path without :, // and .., got data; begin it with / and name a folder",
        SAME,
    ),
    "volume-name-in-capitals": (
        {"actor": {"volumes": [{"name": "Data", "emptyDir": {}}]}},
        "spec.actor.volumes[0].name",
        "must be a DNS-1123 label (a-z, 0-9 and -, a letter or digit at both ends), got Data; rename it",
        SAME,
    ),
    "egress-to-a-name": (
        {"env": {"egress": [{"cidr": "example.com"}]}},
        "spec.env.egress[0].cidr",
        "must be an address block such as 10.0.0.0/8, got example.com; write address/bits",
        SAME,
    ),
}  # fmt: skip
