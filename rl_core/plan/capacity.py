"""Estimate of the memory that the processes of each group need in each phase, before anything is started.

The estimate is an upper bound per process, computed from the sizes of the model and the settings of the job. For a group on CPU the memory
counted as `device` is host memory.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rl_core.api.errors import CapacityError
from rl_core.api.job import RLJob, RLJobSpec
from rl_core.plan.critic_group import critic_spec
from rl_core.plan.fitting import changes_that_fit
from rl_core.plan.groups import ACTOR, ROLLOUT, Group, groups_of
from rl_core.plan.model_facts import ModelFacts
from rl_core.plan.rollout_memory import has_pool, rollout_phases, sequences_in_pool, static_fraction
from rl_core.plan.slots import colocated_rollouts
from rl_core.plan.trainer_memory import WIDTH, checkpoint_copy, trainer_host, trainer_phases

__all__ = ["CapacityReport", "CapacityRow", "ModelFacts", "admit", "estimate"]

logger = logging.getLogger(__name__)

CHECK_VARIABLE = "CAPACITY_CHECK"
"""Environment variable. With the value `warn`, a device that is too small by the estimate causes a warning instead of an error."""

CONTEXT_BYTES = 1024**3
"""Bytes that every process needs besides its tensors: device context, libraries, allocator."""
MARGIN = 0.08
"""Share added for fragmentation and for small things that are not counted."""
ROOM = 0.05
"""Share of a device that settings which are proposed leave free."""
FEW_SEQUENCES = 8
"""Sequences of the longest length below which a KV pool is called small."""
OFFLOADED_FOR_SYNC = frozenset({"optimizer", "master", "gradients", "kv_cache"})
"""Parts that are offloaded to the host during a weight sync between colocated processes."""
OPTIMIZER_STATE = frozenset({"optimizer", "master"})
"""Parts of the trainer that `actor.offload.optimizer` offloads."""
UPDATE = "update"
"""Phase of the optimizer step. It has a row of its own where the optimizer state is on the device in this phase only."""

_WAYS_OUT = {
    "weights": "use a smaller model, bfloat16 or more devices (actor.gpus; megatron: a larger actor.parallel too)",
    "reference": "set algorithm.loss.klCoefficient 0 or use more actor processes (megatron: a larger actor.parallel)",
    "gradients": "set actor.accumulateWithoutSync false (fsdp1 and fsdp2) or use more actor processes (megatron: a larger actor.parallel)",
    "optimizer": "set actor.offload.optimizer true or use more actor processes (megatron: a larger actor.parallel)",
    "master": "set actor.offload.optimizer true or use more actor processes (megatron: a larger actor.parallel)",
    "gather": "use a smaller model",
    "activations": "lower actor.microBatchTokens or set actor.gradientCheckpointing (mode full)",
    "logits": "lower actor.microBatchTokens or rollout.maxBatch",
    "kv_cache": "lower rollout.maxSequenceLength, or rollout.maxBatch with engine hf",
    "engine": "lower rollout.maxSequenceLength or raise mem_fraction_static of rollout.engineArgs",
    "neighbour": "use a smaller model, bfloat16, or placement.mode disaggregated",
    "buckets": "lower weights.bucketBytes",
    "publisher_copy": "set weights.transport auto, which sends weights from host memory where there is no room for the copy",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityRow:
    """The memory of one process of a group in one phase, bytes."""

    role: str
    phase: str
    """load, train, update, logprob, values, generate, sync or idle."""
    device: int
    """Bytes on the accelerator; on the host for a group on CPU."""
    host: int
    """Bytes of further copies in host memory."""
    parts: Mapping[str, int]
    """Bytes of each part of `device`, which is their sum."""
    optional: int = 0
    """Bytes of `device` for which there need not be room: without them weights go through host memory."""

    @property
    def largest_part(self) -> str:
        """Return the name of the largest part. The device context and the margin are returned only if there is no other part."""
        parts = {name: size for name, size in self.parts.items() if name not in ("context", "margin")} or self.parts
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityReport:
    """The estimates of a job, and the memory that is available."""

    rows: tuple[CapacityRow, ...]
    processes: Mapping[str, int]
    """Group -> processes per pod."""
    on_cpu: frozenset[str]
    """Groups without accelerators."""
    device_memory: int | None = None
    """Bytes of one accelerator; None = unknown, not checked. Groups on CPU are checked against `host_memory`."""
    host_memory: int | None = None
    """Bytes of host memory that a pod may use; None = unknown, not checked."""
    fits_with: Mapping[str, str] = field(default_factory=dict)
    """Group -> changes with which it fits on its devices, for actor and rollout where they do not and some were found."""
    pool: "PoolRoom | None" = None
    """The room of SGLang's KV pool; None = another engine, or the memory is unknown."""

    def peak(self, role: str) -> int:
        """Return the largest `device` bytes of a process of the worker group `role` over its phases.

        Raises KeyError for an unknown group.
        """
        sizes = [row.device for row in self.rows if row.role == role]
        if not sizes:
            raise KeyError(f"role must be one of {sorted({row.role for row in self.rows})}, got {role!r}")
        return max(sizes)

    def check(self, role: str | None = None) -> None:
        """Raise CapacityError if a process needs more memory than is available, with a line for each group in which one does.

        A line describes the row that lacks most, with its largest part. `role` restricts the check to one worker group; None checks all.
        """
        shortages: dict[str, tuple[int, str]] = {}
        for row in (row for row in self.rows if role in (None, row.role)):
            on_cpu = row.role in self.on_cpu
            on_host = row.host + (row.device if on_cpu else 0)
            requirements = [("host", on_host * self.processes[row.role], self.host_memory)]
            if not on_cpu:
                requirements.append(("device", row.device - row.optional, self.device_memory))
            for place, needed, available in requirements:
                if available is not None and needed > available:
                    fits_with = self.fits_with.get(row.role) if place == "device" else None
                    shortage = (needed - available, _shortage(row, place, needed, available, fits_with))
                    shortages[row.role] = max(shortages.get(row.role, shortage), shortage)
        if shortages:
            raise CapacityError("\n".join(line for _, line in shortages.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRoom:
    """How much SGLang generates at a time with the KV pool that a device has room for."""

    sequences: int
    """Sequences of `rollout.maxSequenceLength` tokens that the pool holds."""
    most: int
    """`rollout.maxBatch`."""
    fraction: float
    """`mem_fraction_static`."""

    @property
    def small(self) -> bool:
        """Whether sequences of full length would wait for each other most of the time."""
        return self.sequences < min(FEW_SEQUENCES, self.most)

    def __str__(self) -> str:
        return (
            f"rollout: the KV pool of SGLang (mem_fraction_static {self.fraction:g}) holds {self.sequences} sequences of "
            f"rollout.maxSequenceLength at a time, of {self.most} of rollout.maxBatch; others wait in its queue"
        )


def estimate(
    job: RLJob | RLJobSpec,
    facts: ModelFacts,
    device_memory: int | None = None,
    host_memory: int | None = None,
    *,
    groups: Mapping[str, Group] | None = None,
) -> CapacityReport:
    """Return the memory that the groups of `job` (None: those of `groups_of`) need in each phase.

    `device_memory` and `host_memory` are the available bytes. None means unknown: that memory is then not checked.
    """
    job = job.spec if isinstance(job, RLJob) else job
    groups = groups_of(job) if groups is None else groups

    def needed(changed: RLJobSpec, group: str) -> int:
        return max(row.device - row.optional for row in _rows(changed, facts, groups) if row.role == group)

    def way_out(group: str, memory: int) -> str | None:
        return changes_that_fit(job, group, lambda changed: needed(changed, group) <= memory * (1 - ROOM))

    fits_with, pool = {}, None
    if device_memory is not None:
        roles = [name for name, gpus in ((ACTOR, job.actor.gpus), (ROLLOUT, job.rollout.gpus)) if gpus]
        changes_by_role = {name: way_out(name, device_memory) for name in roles if needed(job, name) > device_memory}
        fits_with = {name: changes for name, changes in changes_by_role.items() if changes}
        if has_pool(job):
            pool = _pool_room(job, facts, device_memory)
    return CapacityReport(
        rows=tuple(_rows(job, facts, groups)),
        fits_with=fits_with,
        pool=pool,
        processes={name: group.processes_per_pod for name, group in groups.items()},
        on_cpu=frozenset(name for name, group in groups.items() if group.spec.gpus == 0),
        device_memory=device_memory,
        host_memory=host_memory,
    )


def _rows(job: RLJobSpec, facts: ModelFacts, groups: Mapping[str, Group]) -> list[CapacityRow]:
    rows = [row for group in groups.values() for row in _estimate_of(group, job)(group.name, job, facts)]
    return _colocated(rows) if colocated_rollouts(job) else rows


def _pool_room(job: RLJobSpec, facts: ModelFacts, device_memory: int) -> PoolRoom:
    contexts = 2 * CONTEXT_BYTES if colocated_rollouts(job) else CONTEXT_BYTES
    sequences = sequences_in_pool(job, facts, device_memory, beside=contexts)
    return PoolRoom(sequences=sequences, most=job.rollout.max_batch, fraction=static_fraction(job))


def admit(report: CapacityReport, role: str | None = None) -> None:
    """Call `report.check(role)`; with CAPACITY_CHECK=warn in the environment, log a warning instead of raising CapacityError.

    Of a small KV pool a warning is logged.
    """
    if role in (None, ROLLOUT) and report.pool is not None and report.pool.small:
        logger.warning("%s; lower rollout.maxSequenceLength or give an engine more accelerators", report.pool)
    try:
        report.check(role)
    except CapacityError as error:
        if os.environ.get(CHECK_VARIABLE) != "warn":
            raise CapacityError(
                f"{error}\nThe estimate is an upper bound. If it is wrong, set the environment variable {CHECK_VARIABLE}=warn (in the pods of a "
                "cluster: actor.env), and the job continues with a warning"
            ) from None
        logger.warning("%s=warn, so the job continues: %s", CHECK_VARIABLE, error)


def _actor_rows(name: str, job: RLJobSpec, facts: ModelFacts) -> list[CapacityRow]:
    return _trainer_rows(name, job, trainer_phases(job, facts), host=trainer_host(job, facts))


def _critic_rows(name: str, job: RLJobSpec, facts: ModelFacts) -> list[CapacityRow]:
    """Return the rows of the group that holds the critic: a trainer without logits that publishes nothing."""
    spec = critic_spec(job, group=name)
    phases = trainer_phases(spec, facts, logits=False)
    phases = {"values" if phase == "logprob" else phase: parts for phase, parts in phases.items() if phase != "sync"}
    # No other group shares its devices.
    offload = spec.actor.offload.model_copy(update={"params": False, "grads": False})
    spec = spec.model_copy(update={ACTOR: spec.actor.model_copy(update={"offload": offload})})
    return _trainer_rows(name, spec, phases, host=checkpoint_copy(spec, facts))


def _trainer_rows(name: str, job: RLJobSpec, phases: dict[str, dict[str, int]], *, host: int) -> list[CapacityRow]:
    if job.actor.offload.optimizer:
        phases[UPDATE] = _update(job, phases["train"])
    rows = []
    for phase, parts in phases.items():
        offloaded = {part: size for part, size in parts.items() if part in _offloaded(job, phase)}
        resident = {part: size for part, size in parts.items() if part not in offloaded}
        optional = resident.get("publisher_copy", 0) if job.weights.transport != "ipc" else 0
        rows.append(
            _row(
                name,
                phase,
                resident,
                host=(0 if phase == "load" else host) + sum(offloaded.values()),
                optional=optional,
            )
        )
    return rows


def _update(job: RLJobSpec, train: Mapping[str, int]) -> dict[str, int]:
    """Return what the optimizer step needs of the parts of the phase `train`; under FSDP each process has only its shard of the gradients."""
    parts = {name: size for name, size in train.items() if name not in ("activations", "logits", "gather")}
    if job.actor.backend != "megatron":
        parts["gradients"] = min(parts["gradients"], parts["weights"])
    return parts


def _offloaded(job: RLJobSpec, phase: str) -> frozenset[str]:
    """Return the parts of the trainer that `actor.offload` has in host memory in `phase`."""
    offload, parts = job.actor.offload, frozenset[str]()
    if offload.optimizer and phase not in ("load", UPDATE):
        parts |= OPTIMIZER_STATE
    if offload.grads and phase in ("sync", "idle"):
        parts |= {"gradients"}
    if offload.params and phase == "idle":
        parts |= {"weights"}
    return parts


def _rollout_rows(name: str, job: RLJobSpec, facts: ModelFacts) -> list[CapacityRow]:
    host = 2 * job.weights.bucket_bytes
    phases = rollout_phases(job, facts, context=CONTEXT_BYTES, margin=MARGIN)
    return [_row(name, phase, parts, host=host if phase == "sync" else 0) for phase, parts in phases.items()]


def _policy_rows(name: str, job: RLJobSpec, facts: ModelFacts) -> list[CapacityRow]:
    """Return the table rows of a group that pulls the weights of the policy. Its own computation is not known and not counted."""
    weights, buckets = {"weights": facts.parameters * WIDTH[job.model.dtype]}, 2 * job.weights.bucket_bytes
    return [
        _row(name, "load", weights),
        _row(name, "sync", weights | {"buckets": buckets}, host=buckets),
        _row(name, "idle", weights),
    ]


def _other_rows(name: str, job: RLJobSpec, facts: ModelFacts) -> list[CapacityRow]:
    """Return the row of a group without a model: what any process needs."""
    return [_row(name, "idle", {})]


_ESTIMATES: Mapping[str, Callable[[str, RLJobSpec, ModelFacts], list[CapacityRow]]] = {
    ACTOR: _actor_rows,
    ROLLOUT: _rollout_rows,
}


def _estimate_of(group: Group, job: RLJobSpec) -> Callable[[str, RLJobSpec, ModelFacts], list[CapacityRow]]:
    if group.name == job.algorithm.critic_group:
        return _critic_rows
    return _ESTIMATES.get(group.name, _policy_rows if group.pulls_weights else _other_rows)


def _colocated(rows: Sequence[CapacityRow]) -> list[CapacityRow]:
    """Return the rows of actors and rollouts that share devices.

    While one of the two works, the other holds only its context on the device, in a weight sync its weights too; what either offloads
    counts as host memory.
    """
    weights = {row.role: row.parts["weights"] for row in rows if row.phase == "load" and "weights" in row.parts}
    result = []
    for row in rows:
        if row.role not in weights:
            result.append(row)
            continue
        parts = {name: size for name, size in row.parts.items() if name not in ("context", "margin")}
        leaving = {"idle": frozenset(parts), "sync": OFFLOADED_FOR_SYNC}.get(row.phase, frozenset())
        offloaded = {name: parts.pop(name) for name in leaving & parts.keys()}
        other_weights = weights[ROLLOUT if row.role == ACTOR else ACTOR] if row.phase == "sync" else 0
        neighbour = {"neighbour": CONTEXT_BYTES + other_weights}
        host = row.host + sum(offloaded.values())
        result.append(
            _row(
                row.role,
                row.phase,
                parts | neighbour,
                host=host,
                optional=row.parts.get("publisher_copy", 0) if row.optional else 0,
            )
        )
    return result


def _row(role: str, phase: str, parts: Mapping[str, int], *, host: int = 0, optional: int = 0) -> CapacityRow:
    """Return the row of `parts`, of which `optional` bytes need not be there."""
    all_parts = {"context": CONTEXT_BYTES, **parts}
    all_parts["margin"] = int(sum(all_parts.values()) * MARGIN)
    optional += int(optional * MARGIN)
    return CapacityRow(
        role=role, phase=phase, device=sum(all_parts.values()), host=host, parts=all_parts, optional=optional
    )


def _shortage(row: CapacityRow, place: str, needed: int, available: int, fits_with: str | None) -> str:
    part = row.largest_part
    # The optimizer step is the one phase in which offloading the optimizer state is no way out.
    way_out = (
        _WAYS_OUT["weights" if row.phase == UPDATE else part] if part in _WAYS_OUT else "use fewer processes per pod"
    )
    way_out = way_out if fits_with is None else f"it fits with {fits_with}"
    return (
        f"role {row.role}, phase {row.phase}: needs {_gib(needed)} of {place} memory, got {_gib(available)} available; "
        f"largest part {part} {_gib(row.parts[part])}; {way_out}"
    )


def _gib(size: int) -> str:
    return f"{size / 1024**3:.2f} GiB"
