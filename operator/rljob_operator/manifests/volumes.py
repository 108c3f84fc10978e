"""The volumes of a pod and their mounts in its containers.

The names of the operator's volumes begin with `rljob-`. Only the pods of the control group mount the ConfigMap and an output folder. Each
pod mounts only the secret keys of its own processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.api.job import RLJob
from rl_core.api.volumes import VolumeMount
from rl_core.plan.groups import CONTROL_GROUP, Group
from rl_core.plan.launch import CONFIG_PATH, CURVE_PATH, PodPlan
from rljob_operator import naming
from rljob_operator.manifests import meta, secret
from rljob_operator.manifests.config import KEY as CONFIG_KEY

PREFIX = "rljob-"
KEYS, CONFIG, CODE_VOLUME, TMP_VOLUME, SHM, OUTPUT = (
    f"{PREFIX}{name}" for name in ("keys", "config", "code", "tmp", "shm", "output")
)
TMP = "/tmp"
SHM_PATH = "/dev/shm"
CODE = "/etc/rljob/code"
LOCAL_OUTPUT = "/var/lib/rljob"
"""Output folder of an actor pod if the job has no checkpoint.path. It is deleted with the pod."""
PRIVATE, PUBLIC = 0o400, 0o444
"""File modes; fsGroup makes them 0440 and 0444."""


def output(job: RLJob) -> str:
    """Return the output folder of actor pods: a folder of this job (name and uid) below checkpoint.path, or one inside the pod."""
    path = job.spec.checkpoint.path
    if path is None:
        return LOCAL_OUTPUT
    name, _, uid = meta.identity(job)
    return f"{path.rstrip('/')}/{naming.output_folder(name, uid)}"


def build(job: RLJob, pod: PodPlan, groups: Mapping[str, Group]) -> list[dict[str, Any]]:
    """Return the volumes of a pod: those of the user for the groups of its containers, then those of the operator."""
    present = [groups[container.image_role] for container in pod.containers]
    users = {volume["name"]: volume for group in present for volume in map(meta.api, group.spec.volumes)}
    return [*users.values(), *_ours(job, pod, present, groups)]


def mounts(job: RLJob, group: str, users: Sequence[VolumeMount]) -> list[dict[str, Any]]:
    """Return the mounts of a supervisor's container. A user's mount on /tmp, /dev/shm or the output folder replaces the operator's."""
    own_mounts = [_mount(KEYS, CURVE_PATH, read_only=True), _mount(TMP_VOLUME, TMP), _mount(SHM, SHM_PATH), *_code(job)]
    if group == CONTROL_GROUP:
        own_mounts.append({**_mount(CONFIG, CONFIG_PATH, read_only=True), "subPath": CONFIG_KEY})
        if job.spec.checkpoint.path is None:
            own_mounts.append(_mount(OUTPUT, LOCAL_OUTPUT))
    return _merged(users, own_mounts)


def init_mounts(job: RLJob, users: Sequence[VolumeMount]) -> list[dict[str, Any]]:
    """Return the mounts of an init container, without keys."""
    return _merged(users, [_mount(TMP_VOLUME, TMP), *_code(job)])


def _ours(job: RLJob, pod: PodPlan, present: Sequence[Group], groups: Mapping[str, Group]) -> list[dict[str, Any]]:
    name, _, uid = meta.identity(job)
    private, public = secret.files_of(pod, groups)
    sources = [
        {"secret": {"name": naming.secret(name, uid), "items": _items(private, PRIVATE) + _items(public, PUBLIC)}}
    ]
    volumes: list[dict[str, Any]] = [
        {"name": KEYS, "projected": {"defaultMode": PRIVATE, "sources": sources}},
        {"name": TMP_VOLUME, "emptyDir": {}},
        {"name": SHM, "emptyDir": {"medium": "Memory", **_shm_limit(present)}},
    ]
    if job.spec.code is not None:
        volumes.append({"name": CODE_VOLUME, "configMap": {"name": job.spec.code.config_map}})
    if any(group.name == CONTROL_GROUP for group in present):
        volumes.append({"name": CONFIG, "configMap": {"name": naming.config_map(name)}})
        if job.spec.checkpoint.path is None:
            volumes.append({"name": OUTPUT, "emptyDir": {}})
    return volumes


def _shm_limit(present: Sequence[Group]) -> dict[str, str]:
    """Return the size limit of /dev/shm that the job sets. Without one, only the memory of the pod limits it."""
    sizes = [size for group in present if (size := group.spec.shm_size) is not None]
    return {"sizeLimit": str(sizes[0])} if sizes else {}


def _items(files: Sequence[str], mode: int) -> list[dict[str, Any]]:
    return [{"key": file, "path": file, "mode": mode} for file in files]


def _code(job: RLJob) -> list[dict[str, Any]]:
    return [_mount(CODE_VOLUME, CODE, read_only=True)] if job.spec.code is not None else []


def _mount(name: str, path: str, *, read_only: bool = False) -> dict[str, Any]:
    return {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}


def _merged(users: Sequence[VolumeMount], own_mounts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    user_mounts = [meta.api(mount) for mount in users]
    paths = {mount["mountPath"].rstrip("/") for mount in user_mounts}
    return user_mounts + [mount for mount in own_mounts if mount["mountPath"] not in paths]
