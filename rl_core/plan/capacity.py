"""How much memory each role needs in each phase, before anything is started (runtime.md 2, Capacity).

An estimate from above, per process, from sizes alone. On CPU the device is the host: then `device` counts there too.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_core.api.errors import CapacityError
from rl_core.api.job import RLJob, RLJobSpec
from rl_core.plan.model_facts import ModelFacts
from rl_core.plan.slots import guests
from rl_core.plan.trainer_memory import WIDTH, trainer_host, trainer_phases

__all__ = ["CapacityReport", "CapacityRow", "ModelFacts", "admit", "estimate"]

logger = logging.getLogger(__name__)

CHECK_VARIABLE = "CAPACITY_CHECK"
"""Environment variable; `warn`: a device that is too small by the estimate is told of and used."""

CONTEXT_BYTES = 1024**3
"""What a process holds before it holds anything: device context, libraries, allocator."""
MARGIN = 0.08
"""Share added for fragmentation and what is not counted."""
LOGIT_BYTES = 8
"""Per token and vocabulary entry: a float32 logit and its gradient."""
LEAVES_FOR_SYNC = frozenset({"optimizer", "master", "gradients", "kv_cache"})
"""What is on the host while colocated roles hand weights over."""

_WAYS_OUT = {
    "weights": "use a smaller model, bfloat16 or more actor processes (megatron: a larger actor.parallel)",
    "reference": "set algorithm.loss.klCoefficient 0 or use more actor processes (megatron: a larger actor.parallel)",
    "gradients": "use more actor processes (megatron: a larger actor.parallel)",
    "optimizer": "use more actor processes (megatron: a larger actor.parallel)",
    "master": "use more actor processes (megatron: a larger actor.parallel)",
    "gather": "use a smaller model",
    "activations": "lower actor.microBatchTokens or set actor.gradientCheckpointing",
    "logits": "lower actor.microBatchTokens or rollout.maxBatch",
    "kv_cache": "lower rollout.maxBatch or rollout.maxSequenceLength",
    "neighbour": "use a smaller model, bfloat16, or placement.mode disaggregated",
    "buckets": "lower weights.bucketBytes",
    "publisher_copy": "use a smaller model or bfloat16",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityRow:
    """The memory of one process of a role in one phase, bytes."""

    role: str
    phase: str
    """load, train, logprob, generate, sync or idle."""
    device: int
    """On the accelerator; on the host for a CPU role."""
    host: int
    """Host copies besides."""
    parts: Mapping[str, int]
    """What `device` is the sum of."""

    @property
    def largest_part(self) -> str:
        """Return the name of the largest part, context and margin aside where there is another."""
        named = {name: size for name, size in self.parts.items() if name not in ("context", "margin")} or self.parts
        return max(named, key=lambda name: named[name])


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityReport:
    """All rows, and what there is."""

    rows: tuple[CapacityRow, ...]
    processes: Mapping[str, int]
    """Role -> processes per pod."""
    on_cpu: frozenset[str]
    """Roles without accelerators."""
    device_memory: int | None = None
    """Bytes of one accelerator; None = unknown, not checked. Roles on CPU are held against the host's."""
    host_memory: int | None = None
    """Bytes of host memory a pod may use; None = unknown, not checked."""

    def peak(self, role: str) -> int:
        """Return the largest `device` bytes of a process of `role` over its phases. Raises KeyError for an unknown role."""
        sizes = [row.device for row in self.rows if row.role == role]
        if not sizes:
            raise KeyError(f"role must be one of {sorted({row.role for row in self.rows})}, got {role!r}")
        return max(sizes)

    def check(self, role: str | None = None) -> None:
        """Raise CapacityError for the row (of `role`; None: of any) that lacks most, with needed, available and its largest part."""
        lacking: list[tuple[int, str]] = []
        for row in (row for row in self.rows if role in (None, row.role)):
            on_cpu = row.role in self.on_cpu
            on_host = row.host + (row.device if on_cpu else 0)
            needs = [("host", on_host * self.processes[row.role], self.host_memory)]
            if not on_cpu:
                needs.append(("device", row.device, self.device_memory))
            for place, needed, available in needs:
                if available is not None and needed > available:
                    lacking.append((needed - available, _shortage(row, place, needed, available)))
        if lacking:
            raise CapacityError(max(lacking)[1])


def estimate(
    job: RLJob | RLJobSpec, facts: ModelFacts, device_memory: int | None = None, host_memory: int | None = None
) -> CapacityReport:
    """Return what each role of `job` needs in each phase; memory sizes in bytes, None = unknown."""
    job = job.spec if isinstance(job, RLJob) else job
    rows = [*_actor_rows(job, facts), *_rollout_rows(job, facts), _row("env", "idle", {})]
    rows = _in_turns(rows) if guests(job) else rows
    roles = {"actor": job.actor, "rollout": job.rollout, "env": job.env}
    return CapacityReport(
        rows=tuple(rows),
        processes={"actor": job.actor.processes_per_pod, "rollout": 1, "env": 1},
        on_cpu=frozenset(role for role, spec in roles.items() if spec.gpus == 0),
        device_memory=device_memory,
        host_memory=host_memory,
    )


def admit(report: CapacityReport, role: str | None = None) -> None:
    """Raise CapacityError as `report.check` does; with CAPACITY_CHECK=warn in the environment log it instead."""
    try:
        report.check(role)
    except CapacityError as error:
        if os.environ.get(CHECK_VARIABLE) != "warn":
            raise CapacityError(
                f"{error}; this is an estimate from above: where it is wrong set the variable {CHECK_VARIABLE}=warn, in a job with the role's env"
            ) from None
        logger.warning("%s=warn, so the job goes on: %s", CHECK_VARIABLE, error)


def _actor_rows(job: RLJobSpec, facts: ModelFacts) -> list[CapacityRow]:
    host = trainer_host(job, facts)
    return [
        _row("actor", phase, parts, host=0 if phase == "load" else host)
        for phase, parts in trainer_phases(job, facts).items()
    ]


def _rollout_rows(job: RLJobSpec, facts: ModelFacts) -> list[CapacityRow]:
    width = WIDTH[job.model.dtype]
    tokens = job.rollout.max_batch * (job.rollout.max_sequence_length or facts.max_length)
    # SGLang is tensor parallel over its pod's accelerators; key-value heads that they do not divide are there several times.
    ranks = max(1, job.rollout.gpus) if job.rollout.engine == "sglang" else 1
    weights = {"weights": -(-facts.parameters // ranks) * width}
    heads = -(-facts.kv_heads // ranks)
    cache = {"kv_cache": 2 * facts.layers * heads * facts.head_dim * width * tokens}
    logits = {"logits": job.rollout.max_batch * -(-facts.vocab // ranks) * LOGIT_BYTES}
    buckets = 2 * job.weights.bucket_bytes
    return [
        _row("rollout", "load", weights),
        _row("rollout", "generate", weights | cache | logits),
        _row("rollout", "sync", weights | cache | {"buckets": buckets}, host=buckets),
        _row("rollout", "idle", weights | cache),
    ]


def _in_turns(rows: Sequence[CapacityRow]) -> list[CapacityRow]:
    """Return the rows of an actor and rollouts that share devices: what one has there beside the other, and what lies on the host meanwhile."""
    weights = {row.role: row.parts["weights"] for row in rows if row.phase == "idle" and "weights" in row.parts}
    found = []
    for row in rows:
        if row.role not in weights:
            found.append(row)
            continue
        parts = {name: size for name, size in row.parts.items() if name not in ("context", "margin")}
        leaves = {"idle": frozenset(parts), "sync": LEAVES_FOR_SYNC}.get(row.phase, frozenset())
        away = {name: parts.pop(name) for name in leaves & parts.keys()}
        other = weights["rollout" if row.role == "actor" else "actor"] if row.phase == "sync" else 0
        beside = {"neighbour": CONTEXT_BYTES + other}
        found.append(_row(row.role, row.phase, parts | beside, host=row.host + sum(away.values())))
    return found


def _row(role: str, phase: str, parts: Mapping[str, int], *, host: int = 0) -> CapacityRow:
    counted = {"context": CONTEXT_BYTES, **parts}
    counted["margin"] = int(sum(counted.values()) * MARGIN)
    return CapacityRow(role=role, phase=phase, device=sum(counted.values()), host=host, parts=counted)


def _shortage(row: CapacityRow, place: str, needed: int, available: int) -> str:
    part = row.largest_part
    return (
        f"role {row.role}, phase {row.phase}: needs {_gib(needed)} of {place} memory, got {_gib(available)} available; "
        f"largest part {part} {_gib(row.parts[part])}; {_WAYS_OUT.get(part, 'use fewer processes per pod')}"
    )


def _gib(size: int) -> str:
    return f"{size / 1024**3:.2f} GiB"
