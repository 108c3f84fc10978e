"""Obstacles to the creation of a job's pods: the operator's own namespace, names that are taken, missing or unshareable volume claims.

Also decides whether checkpoints outlive the pods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from posixpath import normpath

from rl_core.api.roles import RoleSpec
from rl_core.plan.groups import Group
from rljob_operator.manifests import containers, gang
from rljob_operator.manifests.containers import image_of
from rljob_operator.model import Object
from rljob_operator.reconcile.job_view import JobView

HOSTNAME = "kubernetes.io/hostname"
SHARED = {"ReadWriteMany"}
SHARED_READING = {"ReadWriteMany", "ReadOnlyMany"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Obstacle:
    """Why the pods of a job cannot be created at present."""

    reason: str
    message: str


def obstacle(view: JobView) -> Obstacle | None:
    """Return the first obstacle; None when the pods can be created."""
    if view.job.metadata.namespace == view.config.namespace:
        return Obstacle(
            reason="NamespaceNotServed",
            message=(
                "metadata.namespace must not be the namespace of the operator and its master key, "
                f"got {view.config.namespace}; create the job in another namespace"
            ),
        )
    pod_names = set(view.wanted_pod_names(*view.groups))
    name_conflicts = {
        *view.observed.name_conflicts,
        *(f"Pod/{name}" for name in view.unowned_pods if name in pod_names),
    }
    if name_conflicts:
        names = ", ".join(sorted(name_conflicts))
        return Obstacle(
            reason="NameConflict",
            message=f"{names} must not exist or must be owned by the job, got an object of another owner; delete it or rename the job",
        )
    for group in containers.groups_with_containers(view.job, view.groups):
        if image_of(group, config=view.config) is None:
            return Obstacle(
                reason="ImageMissing",
                message=f"{group.name}.image must name an image, because the operator has no default for the group, got none; set {group.name}.image",
            )
    if problem_text := gang.unavailable(view.job, view.config.gang_api):
        return Obstacle(reason="GangUnavailable", message=problem_text)
    if (source_obstacle := _source_away(view)) is not None:
        return source_obstacle
    for group in view.groups.values():
        for name, read_only in _claims(group.spec):
            claim = view.observed.claims.get(name)
            if claim is None:
                return Obstacle(
                    reason="VolumeClaimNotFound",
                    message=(
                        f'PersistentVolumeClaim "{name}" of {group.name}.volumes must exist in the namespace, got none; '
                        "create it or correct claimName"
                    ),
                )
            problem = _unshared(view, group, name, claim, read_only=read_only)
            if problem is not None:
                return problem
    return None


def checkpoints_persist(view: JobView) -> bool:
    """Return whether checkpoints are kept on a volume that outlives the actor's pods."""
    path, actor = view.spec.checkpoint.path, view.spec.actor
    claimed = {volume.name for volume in actor.volumes if volume.persistent_volume_claim is not None}
    if path is None:
        return False
    return any(
        mount.name in claimed and not mount.read_only and _below(path, mount.mount_path)
        for mount in actor.volume_mounts
    )


def _source_away(view: JobView) -> Obstacle | None:
    """Return the obstacle for a checkpoint.resumeFrom path that is on no volume of the actor.

    Links are resolved and checked by the runner.
    """
    checkpoint = view.spec.checkpoint
    source = checkpoint.resume_from
    if source is None:
        return None
    path = checkpoint.path if source.path is None else source.path
    mounts = [mount.mount_path for mount in view.spec.actor.volume_mounts]
    if path is not None and any(_below(normpath(path), mount) for mount in mounts):
        return None
    field = "checkpoint.path" if source.path is None else "checkpoint.resumeFrom.path"
    return Obstacle(
        reason="CheckpointNotMounted",
        message=(
            f"{field} must be below a volume mount of the actor, got {path} and mounts {', '.join(mounts) or 'none'}; mount the claim of the run "
            "to resume from in the actor, and give its path there"
        ),
    )


def _claims(spec: RoleSpec) -> Iterator[tuple[str, bool]]:
    for volume in spec.volumes:
        claim = volume.persistent_volume_claim
        if claim is not None:
            mounts = [mount for mount in spec.volume_mounts if mount.name == volume.name]
            yield claim.claim_name, claim.read_only or all(mount.read_only for mount in mounts)


def _unshared(view: JobView, group: Group, name: str, claim: Object, *, read_only: bool) -> Obstacle | None:
    spec = claim.get("spec")
    modes = spec.get("accessModes") if isinstance(spec, Mapping) else None
    pods = view.wanted_indices(group.name).stop
    if pods < 2 or not isinstance(modes, list) or not modes:
        return None
    allowed = "ReadWriteOncePod" not in modes and _on_one_node(group.spec)
    if allowed or not set(map(str, modes)).isdisjoint(SHARED_READING if read_only else SHARED):
        return None
    return Obstacle(
        reason="VolumeNotShared",
        message=(
            f'PersistentVolumeClaim "{name}" must be ReadWriteMany, because {pods} {group.name} pods mount it, got '
            f"{', '.join(map(str, modes))}; use one {group.name} pod, a nodeSelector {HOSTNAME}, or another claim"
        ),
    )


def _on_one_node(spec: RoleSpec) -> bool:
    """Return whether a node selector or a required pod affinity keeps all pods of the group on one node."""
    if HOSTNAME in spec.node_selector:
        return True
    affinity = spec.affinity.pod_affinity if spec.affinity is not None else None
    terms = affinity.required_during_scheduling_ignored_during_execution if affinity is not None else []
    return any(term.topology_key == HOSTNAME for term in terms)


def _below(path: str, folder: str) -> bool:
    folder = folder.rstrip("/")
    return path == folder or path.startswith(folder + "/")
