"""Changes of a running job's spec: which fields `PUT /control` accepts, and why it rejects others.

The operator sends the whole spec with the generation of the job (Kubernetes metadata.generation). Differences in fields that only the
operator or a starting pod reads are ignored. Mutable fields are stored until the loop applies them at a step boundary. A request with any
other difference is rejected as a whole.
"""

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rl_core.actors.schedule import LRSchedule
from rl_core.api import document
from rl_core.api.embodied import check_job, is_embodied
from rl_core.api.errors import ConfigError
from rl_core.api.identity import ROLES
from rl_core.api.job import MUTABLE_FIELDS, OPERATOR_FIELDS, RLJob, RLJobSpec
from rl_core.api.pods import PodSpec
from rl_core.api.problems import explained, problem_lines
from rl_core.plan.groups import ACTOR, ENV, ROLLOUT, groups_of

POD_FIELDS = frozenset(field.alias or name for name, field in PodSpec.model_fields.items())
"""Fields of a role that take effect at a pod's next start."""
STARTING_REPLICAS = {"replicas": 1, "minReplicas": 1, "maxReplicas": None, "autoscale": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """An accepted spec that the loop has to apply, and its generation."""

    generation: int
    spec: RLJobSpec


class AppliedSpec:
    """The current spec of the run, and the newest accepted change that is not applied yet.

    Any thread offers changes; the loop applies them.
    """

    def __init__(self, spec: RLJobSpec) -> None:
        """Begin with the spec that the run was started with."""
        self.spec = spec
        self._pending: Change | None = None
        self._newest = 0
        self._lock = threading.Lock()
        """Guards the pending change: an offer is checked against the spec that it will replace."""

    def offer(self, generation: int, spec: Mapping[str, Any]) -> None:
        """Store a change until the loop takes it. A generation older than the newest one is ignored.

        Raises ValueError naming every field that is invalid or cannot change while the job runs.
        """
        with self._lock:
            if generation < self._newest:
                return
            self._pending = Change(generation=generation, spec=merge(self.spec, spec))
            self._newest = generation

    def take(self) -> Change | None:
        """Make the pending change the current spec and return it; None if there is none."""
        with self._lock:
            change, self._pending = self._pending, None
            if change is not None:
                self.spec = change.spec
            return change


def merge(present: RLJobSpec, wanted: Mapping[str, Any]) -> RLJobSpec:
    """Return `present` with the mutable fields of `wanted`. Raises ValueError for an invalid spec or a change of an immutable field."""
    with _in_our_words():
        requested = document.read(RLJobSpec, wanted)
    before, after = (_by_name(spec) for spec in (present, requested))
    elastic = [name for name, group in groups_of(present).items() if group.elastic]
    refused = [_refusal(path, old, new) for path, old, new in differences(before, after) if not _taken(path, elastic)]
    if refused:
        raise ValueError("; ".join(refused))
    for path in MUTABLE_FIELDS:
        *blocks, field = path.split(".")
        _block(before, blocks)[field] = _block(after, blocks)[field]
    for name, group in before["groups"].items():
        group["replicas"] = after["groups"][name]["replicas"]
    with _in_our_words():
        merged = RLJobSpec.model_validate(before | {"groups": list(before["groups"].values())})
    old, new = present.algorithm.max_staleness, merged.algorithm.max_staleness
    if (old > 0) != (new > 0):
        raise ValueError(
            f"spec.algorithm.maxStaleness cannot go between 0 and more while the job runs, got {new} in place of {old}; restore it, or "
            "suspend the job, change it, and resume"
        )
    check_schedule(merged)
    if is_embodied(merged):
        check_job(merged)
    return merged


def _by_name(spec: RLJobSpec) -> dict[str, Any]:
    """Return a spec as JSON, with `groups` as a mapping from their names, so that a difference in one of them has a path."""
    fields = spec.model_dump(mode="json", by_alias=True)
    return fields | {"groups": {group["name"]: group for group in fields["groups"]}}


def for_elastic_roles(spec: RLJobSpec) -> RLJobSpec:
    """Return the spec that rollouts and envs are built from: all mutable fields are reset to fixed values.

    A restart of the actors under a changed spec therefore does not make running rollouts build their engines again.
    """
    fields = spec.model_dump(mode="json", by_alias=True)
    for role in ROLES:
        fields[role] = {key: value for key, value in fields[role].items() if key not in POD_FIELDS}
    fields[ROLLOUT] |= STARTING_REPLICAS
    fields[ENV]["replicas"] = 1
    fields["groups"] = []
    for path in ("checkpoint", *OPERATOR_FIELDS):
        fields.pop(path)
    del fields["algorithm"]["steps"], fields[ACTOR]["optimizer"]
    if spec.algorithm.distillation is not None:  # Only the actors call the teachers, which are groups of the job.
        fields["algorithm"] |= {"name": "raw", "distillation": None}
    fields["algorithm"]["inference"] = None
    if fields["algorithm"]["critic"] is not None:
        fields["algorithm"]["critic"]["group"] = None
    # Rollouts and envs only need to know whether it is 0.
    fields["algorithm"]["maxStaleness"] = min(spec.algorithm.max_staleness, 1)
    return RLJobSpec.model_validate(fields)


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, old value, new value) for every leaf that differs; lists are leaves."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}):
            yield from differences(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif before != after:
        yield path, before, after


def _taken(path: str, elastic: Collection[str]) -> bool:
    """Return whether the runner applies or ignores a difference at `path`, instead of rejecting it.

    `elastic`: names of the elastic groups.
    """
    block, _, rest = path.partition(".")
    if declared := block == "groups":
        block, _, rest = rest.partition(".")
    field = rest.partition(".")[0]
    if (declared or block in ROLES) and (field in POD_FIELDS or (field == "gpus" and block in elastic)):
        return True
    if declared:
        return field == "replicas" and block in elastic
    return any(path == mutable or path.startswith(f"{mutable}.") for mutable in (*MUTABLE_FIELDS, *OPERATOR_FIELDS))


def _refusal(path: str, old: Any, new: Any) -> str:
    return (
        f"spec.{path} cannot change while the job runs, got {new!r} in place of {old!r}; restore it, or suspend the job, change it, "
        "and resume"
    )


def _block(fields: dict[str, Any], path: list[str]) -> dict[str, Any]:
    for part in path:
        fields = fields[part]
    return fields


def check_schedule(spec: RLJobSpec) -> None:
    """Raise ValueError when the learning-rate schedule or the critic's warm-up does not fit the number of steps."""
    total, warmup = optimizer_steps(spec), spec.actor.critic_warmup_steps
    if warmup >= total:
        raise ValueError(
            f"spec.actor.criticWarmupSteps must be below the run's {total} optimizer steps, got {warmup}; lower it"
        )
    try:
        LRSchedule.from_spec(spec.actor.optimizer, total=total - warmup)
    except ConfigError as error:
        raise ValueError(f"spec.actor.optimizer.{error}") from error


def optimizer_steps(spec: RLJobSpec) -> int:
    """Return the optimizer steps of the whole run."""
    algorithm = spec.algorithm
    return algorithm.steps * algorithm.update_epochs * algorithm.optimizer_steps_per_batch


@contextmanager
def _in_our_words() -> Iterator[None]:
    """Raise a ValidationError of a spec as a ValueError with the problems that `rljob validate` prints."""
    try:
        yield
    except ValidationError as error:
        raise ValueError("; ".join(problem_lines(explained(error, RLJob, at=("spec",))))) from error
