"""`spec.env.options` of a job whose policy acts in simulators (`program: embodied`), and the checks over several fields of such a job."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError
from pydantic.alias_generators import to_camel

from rl_core.api.backends import EMBODIED_PROGRAMS
from rl_core.api.base import Spec
from rl_core.api.env import SIMULATORS
from rl_core.api.errors import ConfigError

if TYPE_CHECKING:
    from rl_core.api.algorithm import AlgorithmSpec
    from rl_core.api.job import RLJobSpec
    from rl_core.api.settings import DeadlinesSpec

POLICY_BACKENDS = ("fsdp1", "fsdp2")
"""Values of `actor.backend` that train policies that act in simulators."""
OF_TEXT = (
    *(f"model.{name}" for name in ("lora", "float32_head", "dtype")),
    *(f"data.{name}" for name in ("validation", "sets", "chat_template", "system_prompt", "on_overlong")),
    *(
        f"algorithm.{name}"
        for name in ("prompts_per_step", "recompute_log_probs", "inference", "importance", "sequence_error_threshold")
    ),
    *(
        f"algorithm.{name}"
        for name in ("distillation", "reward_scale", "keep_per_group", "dynamic_sampling", "overlong")
    ),
    *(f"algorithm.{name}" for name in ("reward_kl_coefficient", "loss.kl_coefficient", "reference_update_steps")),
    *(f"algorithm.{name}" for name in ("straggler_seconds", "min_batch_fraction", "max_generation_batches", "on_drop")),
    *(f"algorithm.{name}" for name in ("max_dropped_groups", "allow_truncated_sampling", "critic.separate")),
    *(f"actor.{name}" for name in ("attention", "compile", "gradient_checkpointing", "gradient_checkpointing_mode")),
    *(f"actor.parallel.{name}" for name in ("tensor", "pipeline", "virtual_pipeline", "sequence", "context", "expert")),
    *(f"rollout.{name}" for name in ("engine", "sampling", "parallel", "compile", "engine_args", "oversample")),
    *(f"rollout.{name}" for name in ("max_sequence_length", "max_batch", "batching")),
    *(f"env.{name}" for name in ("reward", "agent", "command", "factory", "max_turns", "processes")),
    *(f"validation.{name}" for name in ("samples_per_prompt", "temperature", "max_prompts")),
    "samples",
)
"""Fields that the embodied programs do not read."""


class EmbodiedOptions(Spec):
    """Simulators, the size of a step, and how episodes become training rows."""

    id: str = Field(min_length=1)
    """Gymnasium id such as CartPole-v1 or Meta-World/reach-v3, or `module:Class` of one's own with the interface of gymnasium.Env."""
    num_envs: int = Field(8, ge=1, le=4096)
    """Simulators of one env pod."""
    horizon: int = Field(128, ge=1, lt=2**31)
    """Steps of each simulator in one rollout epoch."""
    rollout_epochs: int = Field(1, ge=1, le=1024)
    """How often a training step makes `horizon` steps of each simulator. Each time groups get new seeds; without auto-reset all episodes
    begin again."""
    weight_sync_interval: int = Field(1, ge=1, le=1024)
    """Rollouts get new weights after every so many training steps, and before each evaluation."""
    chunk: int = Field(1, ge=1, le=1024)
    """Actions that the policy chooses at once."""
    stages: Literal[1, 2] = 1
    """Pipeline stages: with 2, one half of the simulators steps while the policy chooses the actions of the other half."""
    auto_reset: bool = True
    """true: a finished simulator begins its next episode at once. false: it rests until the next rollout epoch."""
    ignore_terminations: bool = False
    """true: an episode goes on after its task has ended, until it is truncated. Without auto-reset all must be truncated together."""
    vectorization: Literal["process", "sync"] = "process"
    """process: each simulator runs in a child process, which may hang or end. sync: all run in the process of the env worker."""
    batching: Literal["lockstep", "decoupled"] = "lockstep"
    """lockstep: a rollout decides for all its env workers at once. decoupled: for those whose observations have come."""
    min_batch_size: int = Field(1, ge=1, le=1024)
    """With `batching: decoupled`: observations that a decision waits for, one per env worker and stage. It waits at most 20 ms after the
    first, and then decides for those that have come."""
    bootstrap: Literal["standard", "always", "none"] = "standard"
    """With auto-reset and a critic: which ends of an episode add gamma times the value of the final observation to the last reward.
    standard: truncated ones; always: all ends; none: no end."""
    reward_scale: float = Field(1.0, gt=0)
    """Factor of the rewards that are trained on; the metrics of episodes have the rewards of the simulators."""
    log_prob_level: Literal["chunk", "action", "token"] = "chunk"
    """What the policy ratio is computed for: the whole chunk, each action, or each token or dimension of an action."""
    reward_filter: tuple[float, float] | None = None
    """Groups whose mean episode return, in scaled rewards, is outside [low, high] are not trained on; null: all groups are trained on.
    Not with auto-reset."""
    eval_episodes: int = Field(16, ge=1, lt=2**20)
    """Episodes of an evaluation, over all env pods."""
    eval_horizon: int = Field(1000, ge=1, lt=2**31)
    """Longest episode of an evaluation, steps."""
    videos: int = Field(0, ge=0, le=4)
    """Evaluation episodes of which each validation keeps a video."""
    kwargs: dict[str, Any] = {}
    """Further arguments of gymnasium.make, or of the class."""

    @property
    def decisions(self) -> int:
        """Decisions of a simulator in one rollout epoch."""
        return self.horizon // self.chunk


def is_embodied(spec: "RLJobSpec") -> bool:
    """Return whether the policy of a job acts in simulators."""
    return spec.program in EMBODIED_PROGRAMS


def embodied_options(spec: "RLJobSpec") -> EmbodiedOptions:
    """Return the options of a job's simulators. Raises ConfigError when one is wrong or does not fit the rest of the job.

    `check_job` checks the rest, which a worker does not know.
    """
    if spec.env.type != SIMULATORS:
        raise ConfigError(f"env.type must be {SIMULATORS} with program {spec.program}, got {spec.env.type}; set it")
    if idle := fields_of_text(spec):
        raise ConfigError(
            f"{' and '.join(idle)} must be left out with program {spec.program}: only programs of text read it; remove it"
        )
    if spec.algorithm.loss.name == "decoupled_ppo":
        raise ConfigError(
            f"algorithm.loss.name must not be decoupled_ppo with program {spec.program}, whose actors do not compute the log-probabilities "
            "that it needs; take ppo_clip"
        )
    if spec.actor.backend not in POLICY_BACKENDS:
        raise ConfigError(
            f"actor.backend must be {' or '.join(POLICY_BACKENDS)} with program {spec.program}, got {spec.actor.backend}; choose one"
        )
    env_options, bounds = spec.env.options, spec.env.options.get("rewardFilter")
    try:
        options = EmbodiedOptions.model_validate(
            {**env_options, "rewardFilter": tuple(bounds)} if isinstance(bounds, list) else env_options
        )
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        field_path = ".".join(map(str, details["loc"]))
        raise ConfigError(
            f"env.options.{field_path}: {details['msg'].removeprefix('Value error, ')}, got {details['input']!r}; correct it"
        ) from error
    check_reward_filter(options)
    check_sizes(spec, options)
    return options


def check_job(spec: "RLJobSpec") -> None:
    """Raise ConfigError when an option of a job's simulators is wrong or does not fit the rest of the job."""
    options = embodied_options(spec)
    max_staleness, interval = spec.algorithm.max_staleness, options.weight_sync_interval
    oldest = interval - 1 + (spec.program == "embodied_async")
    if max_staleness < oldest or (max_staleness and not oldest):
        raise ConfigError(
            f"algorithm.maxStaleness must be {f'{oldest} or more' if oldest else 0} with program {spec.program} and "
            f"env.options.weightSyncInterval {interval}, got {max_staleness}; correct one of them"
        )
    check_batch(spec, options)


def fields_of_text(spec: "RLJobSpec") -> list[str]:
    """Return the fields of OF_TEXT that a job sets to something else than their default."""
    fields = []
    for path in OF_TEXT:
        names = path.split(".")
        holder: Any = spec
        for name in names[:-1]:
            holder = getattr(holder, name, None)
        if holder is None:
            continue
        default = type(holder).model_fields[names[-1]].get_default(call_default_factory=True)
        if getattr(holder, names[-1]) != default:
            fields.append(".".join(map(to_camel, names)))
    return fields


def check_reward_filter(options: EmbodiedOptions) -> None:
    """Raise ConfigError for bounds that no episode can meet, and for a filter of rewards that contain values of the policy."""
    if options.reward_filter is None:
        return
    lowest, highest = options.reward_filter
    if lowest > highest:
        raise ConfigError(
            f"env.options.rewardFilter must be [low, high] with low <= high, got [{lowest:g}, {highest:g}]; exchange them"
        )
    if options.auto_reset:
        raise ConfigError(
            "env.options.autoReset must be false with env.options.rewardFilter, because with auto-reset the rewards of an episode contain the "
            f"values of its final observation, got true and [{lowest:g}, {highest:g}]; set autoReset to false or remove rewardFilter"
        )


def check_sizes(spec: "RLJobSpec", options: EmbodiedOptions) -> None:
    """Raise ConfigError naming the first size that does not divide another one it must."""
    if options.batching == "lockstep" and options.min_batch_size != 1:
        raise ConfigError(
            f"env.options.minBatchSize needs env.options.batching: decoupled, got {options.min_batch_size} with lockstep; set it or remove "
            "minBatchSize"
        )
    group, per_stage = simulators_per_group(spec.algorithm), options.num_envs // options.stages
    rules = [
        ("env.options.horizon", options.horizon, "env.options.chunk", options.chunk),
        ("env.options.numEnvs", options.num_envs, "env.options.stages", options.stages),
        ("env.options.numEnvs of a stage", per_stage, "algorithm.groupSize", group),
    ]
    for field, value, divisor_field, divisor in rules:
        if value % divisor:
            raise ConfigError(
                f"{field} must be divisible by {divisor_field} {divisor}, got {value}; change one of them"
            )
    if spec.algorithm.name not in ("gae", "grpo"):
        raise ConfigError(
            f"algorithm.name must be gae or grpo with program {spec.program}, got {spec.algorithm.name}; choose one"
        )
    if spec.algorithm.name == "grpo" and options.auto_reset:
        raise ConfigError(
            "env.options.autoReset must be false with algorithm.name grpo, which compares one episode of each simulator of a group, "
            "got true; set it to false"
        )


def check_batch(spec: "RLJobSpec", options: EmbodiedOptions) -> None:
    """Raise ConfigError unless each rollout has simulators and the training rows of a step can be divided equally.

    A row is one decision of a simulator, that is one chunk of actions. Rows are divided among data-parallel ranks and mini-batches.
    """
    rollouts, ranks = spec.rollout.replicas, spec.actor.data_parallel
    groups = groups_of_stage(spec, options, spec.env.replicas)
    of_what = "groups of simulators" if spec.algorithm.name == "grpo" else "simulators"
    if groups < rollouts:
        raise ConfigError(
            f"rollout.replicas must not exceed the {groups} {of_what} of a stage, got {rollouts}; lower it or raise env.options.numEnvs"
        )
    rows = options.num_envs * spec.env.replicas * options.rollout_epochs * options.decisions
    minibatches = ranks * spec.algorithm.optimizer_steps_per_batch
    if rows % minibatches:
        raise ConfigError(
            f"the {rows} decisions of a step must be divisible by data-parallel size x algorithm.optimizerStepsPerBatch = {minibatches}; "
            "change env.options.horizon or optimizerStepsPerBatch"
        )


def groups_of_stage(spec: "RLJobSpec", options: EmbodiedOptions, env_workers: int) -> int:
    """Return the number of groups of simulators that `env_workers` env workers have in a pipeline stage.

    With a critic, each simulator is a group.
    """
    return options.num_envs // options.stages * env_workers // simulators_per_group(spec.algorithm)


def longest_collection(deadlines: "DeadlinesSpec") -> float:
    """Return the longest time in seconds that a collection may take, including its wait for training and weight sync."""
    return deadlines.rollout + deadlines.group_method + deadlines.weight_sync


def simulators_per_group(algorithm: "AlgorithmSpec") -> int:
    """Return how many simulators begin from the same seed, and are compared with each other: 1 with a critic."""
    return algorithm.group_size if algorithm.name == "grpo" else 1
