"""Parsing of an RLJob object into a typed job, and the support objects that the job lacks.

Both are expensive, and the spec rarely changes between two reconciles. The caller may keep a `ParsedJob` for each job as a cache. The
cache does not change the result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pydantic import ValidationError

from rl_core.api import defaults as kept_defaults
from rl_core.api.defaults import Defaults
from rl_core.api.errors import ConfigError
from rl_core.api.job import API_VERSION, RLJob
from rl_core.api.problems import problem_lines
from rl_core.plan.groups import Group
from rl_core.plan.launch import build_launch_plan
from rljob_operator import manifests, naming
from rljob_operator.manifests import network
from rljob_operator.model import Deletion, Object, OperatorConfig

LONGEST_PROBLEM = 2000
"""Characters of a validation message in a condition."""
KEPT_METADATA = ("name", "namespace", "uid", "labels", "annotations")
CLAIM_TEMPLATE: Final = "ResourceClaimTemplate"
KUBECTL_COPY = "kubectl.kubernetes.io/last-applied-configuration"


@dataclass(slots=True)
class ParsedJob:
    """Cache of the parsed spec of one job, about 20 KB. The caller deletes it together with the job."""

    text: str | None = None
    """Name, labels and spec that were parsed, as canonical JSON; None before the first call."""
    result: RLJob | str = ""
    defaults: Defaults = field(default_factory=kept_defaults.present)
    """The defaults with which `result` was resolved."""
    config: OperatorConfig | None = None
    """The configuration with which `digests` were computed; None when they are not computed for this text."""
    digests: tuple[tuple[str, str, str, str], ...] = ()
    """(kind, name, manifest hash, digest of the rules of a network policy or "") of the support objects."""


def parse(job: Object, accepted: Defaults | None, known: ParsedJob) -> RLJob | str:
    """Return the typed job, or a message about the errors in its spec.

    `accepted` are the defaults that the job was accepted under. Without them, the job is resolved with the defaults of this operator:
    a new job, or a job whose ConfigMap was lost, which gets another schemaVersion in its status and the event DefaultsLost.
    """
    meta = job.get("metadata")
    kept_metadata = {key: meta[key] for key in KEPT_METADATA if key in meta} if isinstance(meta, Mapping) else {}
    if isinstance(kept_metadata.get("annotations"), Mapping) and KUBECTL_COPY in kept_metadata["annotations"]:
        kept_metadata["annotations"] = {
            key: value for key, value in kept_metadata["annotations"].items() if key != KUBECTL_COPY
        }
    try:
        text = json.dumps({"metadata": kept_metadata, "spec": job.get("spec")}, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        return f"the object is not JSON: {error}"
    accepted = accepted or kept_defaults.present()
    if known.text != text or known.defaults.version != accepted.version:
        known.text, known.defaults, known.result, known.config = text, accepted, _parse(text, accepted), None
    return known.result


def _parse(text: str, defaults: Defaults) -> RLJob | str:
    manifest = {"apiVersion": API_VERSION, "kind": "RLJob", **json.loads(text)}
    try:
        job = RLJob.model_validate(manifest, context=defaults.context)
        build_launch_plan(job, name=job.metadata.name, uid=job.metadata.uid or "")
    except ValidationError as error:
        return _shortened("; ".join(problem_lines(error)))
    except ConfigError as error:
        return _shortened(str(error))
    return job


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_PROBLEM else text[: LONGEST_PROBLEM - 3] + "..."


def missing_objects(
    job: RLJob, present: Sequence[Object], *, config: OperatorConfig, known: ParsedJob, groups: Mapping[str, Group]
) -> tuple[Object, ...]:
    """Return the support objects (Service, ConfigMap, policies, claim templates, gang) that are not in `present` or differ there.

    `known` is the cache that `parse` returned `job` from.
    """
    existing = {(obj.get("kind"), _meta(obj).get("name")): obj for obj in present}
    uid = job.metadata.uid
    digests = _digests(job, config, known, groups)
    missing = {
        (kind, name)
        for kind, name, hashed, rules in digests
        if not _holds(existing.get((kind, name)), hashed, rules, uid)
    }
    if not missing:
        return ()
    desired = manifests.support.build(job, defaults=known.defaults, config=config, groups=groups)
    return tuple(obj for obj in desired if (obj["kind"], _meta(obj)["name"]) in missing)


def old_templates(
    job: RLJob, present: Sequence[Object], *, config: OperatorConfig, known: ParsedJob, groups: Mapping[str, Group]
) -> tuple[Deletion, ...]:
    """Return the deletions of the ResourceClaimTemplates in `present` that the job owns and that its spec does not need any more."""
    desired = {name for kind, name, *_ in _digests(job, config, known, groups) if kind == CLAIM_TEMPLATE}
    owned = (obj for obj in present if obj.get("kind") == CLAIM_TEMPLATE and _owned(obj, job.metadata.uid))
    return tuple(
        Deletion(kind=CLAIM_TEMPLATE, name=str(_meta(obj)["name"]), uid=str(_meta(obj)["uid"]))
        for obj in owned
        if _meta(obj)["name"] not in desired
    )


def _digests(
    job: RLJob, config: OperatorConfig, parsed: ParsedJob, groups: Mapping[str, Group]
) -> tuple[tuple[str, str, str, str], ...]:
    if parsed.config != config:
        objects = manifests.support.build(job, defaults=parsed.defaults, config=config, groups=groups)
        parsed.digests = tuple((obj["kind"], obj["metadata"]["name"], _digest(obj), _rules(obj)) for obj in objects)
        parsed.config = config
    return parsed.digests


def _holds(obj: Object | None, digest: str, rules: str, uid: str | None) -> bool:
    """Return whether the job owns an object, its manifest hash is the desired one, and nobody has edited it if it is a network policy."""
    return obj is not None and _digest(obj) == digest and _rules(obj) == rules and _owned(obj, uid)


def _rules(obj: Object) -> str:
    return network.digest_of(obj) if obj.get("kind") == network.KIND else ""


def _owned(obj: Object, uid: str | None) -> bool:
    owners = _meta(obj).get("ownerReferences")
    return isinstance(owners, list) and any(isinstance(owner, Mapping) and owner.get("uid") == uid for owner in owners)


def _meta(obj: Object) -> Object:
    meta = obj.get("metadata")
    return meta if isinstance(meta, Mapping) else {}


def _digest(obj: Object) -> str:
    annotations = _meta(obj).get("annotations")
    return str(annotations.get(naming.ANNOTATION_MANIFEST_HASH, "")) if isinstance(annotations, Mapping) else ""
