"""How much memory each role needs in each phase, before anything is started (runtime.md 2, Capacity).

An estimate from above, per process, from sizes alone. On CPU the device is the host: then `device` counts there too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_core.api.errors import CapacityError
from rl_core.api.job import RLJob, RLJobSpec
from rl_core.plan.model_facts import ModelFacts
from rl_core.plan.slots import home_of

__all__ = ["CapacityReport", "CapacityRow", "ModelFacts", "estimate"]

CONTEXT_BYTES = 1024**3
"""What a process holds before it holds anything: device context, libraries, allocator."""
MARGIN = 0.08
"""Share added for fragmentation and what is not counted."""
ADAM_BYTES, MASTER_BYTES, GRADIENT_BYTES = 8, 4, 4
"""Per parameter: two float32 moments, a float32 master copy, a float32 gradient."""
LOGIT_BYTES = 8
"""Per token and vocabulary entry: a float32 logit and its gradient."""
WIDTH = {"float32": 4, "bfloat16": 2}
LEAVES_FOR_SYNC = frozenset({"optimizer", "master", "kv_cache"})
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
    """Bytes of one accelerator (of the host for CPU roles); None = unknown, not checked."""
    host_memory: int | None = None
    """Bytes of host memory a pod may use; None = unknown, not checked."""

    def peak(self, role: str) -> int:
        """Return the largest `device` bytes of a process of `role` over its phases. Raises KeyError for an unknown role."""
        sizes = [row.device for row in self.rows if row.role == role]
        if not sizes:
            raise KeyError(f"role must be one of {sorted({row.role for row in self.rows})}, got {role!r}")
        return max(sizes)

    def check(self) -> None:
        """Raise CapacityError for the row that lacks most, with role, phase, needed, available and its largest part."""
        lacking: list[tuple[int, str]] = []
        for row in self.rows:
            needs = [("device", row.device, self.device_memory)]
            on_host = row.host + (row.device if row.role in self.on_cpu else 0)
            needs.append(("host", on_host * self.processes[row.role], self.host_memory))
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
    rows = _in_turns(rows) if home_of(job, "rollout") == "actor" else rows
    roles = {"actor": job.actor, "rollout": job.rollout, "env": job.env}
    return CapacityReport(
        rows=tuple(rows),
        processes={"actor": job.actor.processes_per_pod, "rollout": 1, "env": 1},
        on_cpu=frozenset(role for role, spec in roles.items() if spec.gpus == 0),
        device_memory=device_memory,
        host_memory=host_memory,
    )


def _actor_rows(job: RLJobSpec, facts: ModelFacts) -> list[CapacityRow]:
    width, whole_layers = WIDTH[job.model.dtype], job.actor.backend == "megatron"
    # FSDP cuts parameters over all processes; megatron over those that share a model, and data ranks hold the same.
    shards = job.actor.parallel.model if whole_layers else job.actor.world_size
    policy = -(-facts.parameters // shards)
    critic = job.algorithm.critic_in_use
    models = 2 if critic is not None and critic.separate else 1
    share = models * policy
    resident = {"weights": share * width, "optimizer": share * ADAM_BYTES}
    if width != 4:
        resident["master"] = share * MASTER_BYTES
    if job.algorithm.needs_reference:
        resident["reference"] = policy * width
    sharded = (shards > 1 or width != 4) and not whole_layers
    gather = {"gather": 2 * facts.largest_layer * width} if sharded else {}
    tokens = _micro_batch_tokens(job, facts)
    per_layer = 2 if job.actor.gradient_checkpointing else 34
    train = {
        "gradients": share * GRADIENT_BYTES,
        "activations": models * tokens * facts.hidden * facts.layers * width * per_layer,
        "logits": tokens * -(-facts.vocab // job.actor.parallel.tensor) * LOGIT_BYTES,
    }
    no_gradient = {"activations": tokens * facts.hidden * width * 34, "logits": train["logits"]}
    buckets = {"buckets": 2 * job.weights.bucket_bytes}
    copy = facts.parameters * width  # rank 0 keeps the published version for receivers that join later
    return [
        _row("actor", "load", resident | gather),
        _row("actor", "train", resident | gather | train, host=copy),
        _row("actor", "logprob", resident | gather | no_gradient, host=copy),
        _row("actor", "sync", resident | gather | buckets, host=copy),
        _row("actor", "idle", resident, host=copy),
    ]


def _rollout_rows(job: RLJobSpec, facts: ModelFacts) -> list[CapacityRow]:
    width = WIDTH[job.model.dtype]
    tokens = job.rollout.max_batch * (job.rollout.max_sequence_length or facts.max_length)
    weights = {"weights": facts.parameters * width}
    cache = {"kv_cache": 2 * facts.layers * facts.kv_heads * facts.head_dim * width * tokens}
    logits = {"logits": job.rollout.max_batch * facts.vocab * LOGIT_BYTES}
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


def _micro_batch_tokens(job: RLJobSpec, facts: ModelFacts) -> int:
    """Return the tokens of a full micro-batch: the budget, or all rows of a rank where they are fewer."""
    rows = job.algorithm.prompts_per_step * job.algorithm.group_size // job.actor.data_parallel
    longest = job.rollout.max_sequence_length or facts.max_length
    return min(job.actor.micro_batch_tokens, max(rows, 1) * longest)


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
