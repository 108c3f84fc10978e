"""The job by which the group `algorithm.critic.group` trains its critic."""

from rl_core.api.critic import CriticSpec
from rl_core.api.job import RLJobSpec
from rl_core.api.roles import ParallelSpec
from rl_core.plan.groups import ACTOR


def critic_spec(spec: RLJobSpec, *, group: str) -> RLJobSpec:
    """Return the spec by which the critic of a job trains: a model with a value head, on the devices of `group`, without a policy."""
    (critic_group,) = [candidate for candidate in spec.groups if candidate.name == group]
    critic, optimizer = spec.algorithm.critic_in_use or CriticSpec(), spec.actor.optimizer
    rate = optimizer.value_learning_rate or optimizer.learning_rate
    actor = {
        "backend": "fsdp2" if spec.actor.backend == "megatron" else spec.actor.backend,
        "replicas": 1,
        "processes_per_pod": 1,
        "gpus": critic_group.gpus,
        "parallel": ParallelSpec(),
        "optimizer": optimizer.model_copy(update={"learning_rate": rate, "distributed": True}),
    }
    algorithm = {
        "critic": critic.model_copy(update={"separate": False, "group": None}),
        "loss": spec.algorithm.loss.model_copy(update={"kl_coefficient": 0.0}),
        "reward_kl_coefficient": 0.0,
    }
    return spec.model_copy(
        update={
            ACTOR: spec.actor.model_copy(update=actor),
            "algorithm": spec.algorithm.model_copy(update=algorithm),
            "model": spec.model.model_copy(update={"lora": None}),
        }
    )
