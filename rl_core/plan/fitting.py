"""Finds settings of the trainer with which a job fits into the memory of its devices."""

from collections.abc import Callable, Iterator
from itertools import combinations

from rl_core.api.job import RLJobSpec
from rl_core.plan.groups import ACTOR

Change = tuple[str, dict[str, object]]
"""How a person writes a setting, and the fields of the actor that it changes."""


def changes_that_fit(job: RLJobSpec, fits: Callable[[RLJobSpec], bool]) -> str | None:
    """Return the fewest changes of the actor, the cheapest first, with which `fits` holds, as text; None when no combination is enough.

    More pods are asked for only where settings are not enough. None of the changes has an effect on what is trained, except for the order
    of floating-point sums.
    """
    settings = list(_settings(job))
    for pods in ([], *([change] for change in _more_pods(job))):
        for count in range(len(settings) + 1):
            for chosen in combinations(settings, count):
                changes = [*chosen, *pods]
                update = {name: value for _, fields in changes for name, value in fields.items()}
                if changes and fits(job.model_copy(update={ACTOR: job.actor.model_copy(update=update)})):
                    return " and ".join(text for text, _ in changes)
    return None


def _settings(job: RLJobSpec) -> Iterator[Change]:
    """Yield the changes that the job leaves, those that cost least time first."""
    actor, longest = job.actor, job.rollout.max_sequence_length
    if actor.accumulate_without_sync and actor.backend != "megatron":
        yield "actor.accumulateWithoutSync false", {"accumulate_without_sync": False}
    smaller = max(actor.micro_batch_tokens // 4, longest or actor.micro_batch_tokens)
    if smaller < actor.micro_batch_tokens:
        yield f"actor.microBatchTokens {smaller}", {"micro_batch_tokens": smaller}
    if not actor.gradient_checkpointing or actor.gradient_checkpointing_mode != "full":
        fields: dict[str, object] = {"gradient_checkpointing": True, "gradient_checkpointing_mode": "full"}
        text = "" if actor.gradient_checkpointing_mode == "full" else " with gradientCheckpointingMode full"
        yield f"actor.gradientCheckpointing true{text}", fields
    if not actor.offload.optimizer:
        yield "actor.offload.optimizer true", {"offload": actor.offload.model_copy(update={"optimizer": True})}


def _more_pods(job: RLJobSpec) -> Iterator[Change]:
    actor = job.actor
    for factor in (2, 4, 8):
        if job.algorithm.prompts_per_step % (actor.data_parallel * factor) == 0:
            yield f"actor.replicas {actor.replicas * factor}", {"replicas": actor.replicas * factor}
