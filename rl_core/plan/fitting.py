"""Finds settings with which the trainer and the rollouts of a job fit into the memory of their devices."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from rl_core.api.job import RLJobSpec
from rl_core.plan.groups import ACTOR, ROLLOUT

Change = tuple[str, dict[str, object]]
"""How a person writes a setting, and the fields of the group that it changes."""
MOST_IN_A_POD = 8
"""Accelerators up to which a single pod of the actor is given more of them, before there are more pods."""


def changes_that_fit(job: RLJobSpec, group: str, fits: Callable[[RLJobSpec], bool]) -> str | None:
    """Return, as text, changes to the settings of `group` after which `fits(job)` is true.

    Changes of settings alone are tried before more devices. Among those that fit the shortest combination is returned, and among
    combinations of the same length the one whose changes come first in the list of the group. `job` itself must not fit: at least one change
    is made. Returns None if no combination fits, and for groups other than actor and rollout. Changes of the actor have no effect on what is
    trained, except for the order of floating-point sums.
    """
    settings, devices = {
        ACTOR: (list(_settings(job)), list(_more_processes(job))),
        ROLLOUT: (list(_smaller_batches(job)), list(_larger_engines(job))),
    }.get(group, ([], []))
    max_settings = len(settings) if group == ACTOR else 1  # The rollout's settings are alternatives.
    for device_changes in ([], *([change] for change in devices)):
        for count in range(max_settings + 1):
            for setting_changes in combinations(settings, count):
                changes = [*setting_changes, *device_changes]
                if changes and fits(_changed(job, group, changes)):
                    return " and ".join(text for text, _ in changes)
    return None


def _changed(job: RLJobSpec, group: str, changes: Sequence[Change]) -> RLJobSpec:
    update = {name: value for _, fields in changes for name, value in fields.items()}
    return job.model_copy(update={group: getattr(job, group).model_copy(update=update)})


def _settings(job: RLJobSpec) -> Iterator[Change]:
    """Yield the changes that the actor leaves, those that people try first."""
    actor, longest = job.actor, job.rollout.max_sequence_length
    if actor.accumulate_without_sync and actor.backend != "megatron":
        yield "actor.accumulateWithoutSync false", {"accumulate_without_sync": False}
    if not actor.gradient_checkpointing or actor.gradient_checkpointing_mode != "full":
        fields: dict[str, object] = {"gradient_checkpointing": True, "gradient_checkpointing_mode": "full"}
        text = "" if actor.gradient_checkpointing_mode == "full" else " with gradientCheckpointingMode full"
        yield f"actor.gradientCheckpointing true{text}", fields
    smaller = max(actor.micro_batch_tokens // 4, longest or actor.micro_batch_tokens)
    if smaller < actor.micro_batch_tokens:
        yield f"actor.microBatchTokens {smaller}", {"micro_batch_tokens": smaller}
    if not actor.offload.optimizer:
        yield "actor.offload.optimizer true", {"offload": actor.offload.model_copy(update={"optimizer": True})}


def _more_processes(job: RLJobSpec) -> Iterator[Change]:
    actor = job.actor
    in_pod = actor.replicas == 1 and actor.gpus > 0 and actor.processes_per_pod is None
    for factor in (2, 4, 8):
        if job.algorithm.prompts_per_step % (actor.data_parallel * factor):
            continue
        if in_pod and actor.gpus * factor <= MOST_IN_A_POD and job.placement.mode == "disaggregated":
            yield f"actor.gpus {actor.gpus * factor}", {"gpus": actor.gpus * factor}
        else:
            replicas = actor.replicas * factor
            shared = job.placement.mode != "disaggregated"  # each pod of the actor has a rollout
            rollout_change = f" and rollout.replicas {replicas}" if shared and job.rollout.replicas < replicas else ""
            yield f"actor.replicas {replicas}{rollout_change}", {"replicas": replicas}


def _smaller_batches(job: RLJobSpec) -> Iterator[Change]:
    """Yield smaller batches for an engine that allocates its KV cache for them."""
    batch = job.rollout.max_batch // 2 if job.rollout.engine == "hf" else 0
    while batch:
        yield f"rollout.maxBatch {batch}", {"max_batch": batch}
        batch //= 2


def _larger_engines(job: RLJobSpec) -> Iterator[Change]:
    if job.placement.mode != "disaggregated" or not job.rollout.gpus:
        return
    rollout = job.rollout
    engine = "" if rollout.engine == "sglang" else "rollout.engine sglang and "
    engine_args = {name: value for name, value in rollout.engine_args.items() if name not in ("tp_size", "dp_size")}
    for gpus in (2, 4, 8):
        if gpus <= rollout.tensor_parallel:
            continue
        if rollout.engines == 1:
            yield f"{engine}rollout.gpus {gpus}", {"engine": "sglang", "gpus": gpus, "engine_args": engine_args}
        elif rollout.gpus % gpus == 0:
            yield f"tp_size {gpus} in rollout.engineArgs", {"engine_args": engine_args | {"tp_size": gpus}}
