"""The settings of TRL, verl and prime-rl under the names of this project: one list, for hints and for docs/coming-from.md."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForeignName:
    """A setting of another library and where it is set here."""

    ours: str
    """Path below `spec`, or an option of `rljob`."""
    trl: tuple[str, ...] = ()
    """Fields of GRPOConfig or arguments of GRPOTrainer."""
    verl: tuple[str, ...] = ()
    """Keys of verl's configuration, with their blocks."""
    prime_rl: tuple[str, ...] = ()
    """Keys of prime-rl's configuration."""
    note: str = ""
    """What differs."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the last parts of all names."""
        return tuple(name.rpartition(".")[2] for name in (*self.trl, *self.verl, *self.prime_rl))


FOREIGN_NAMES = (
    ForeignName(
        "model.path",
        ("model_name_or_path",),
        ("actor_rollout_ref.model.path",),
        ("model.name",),
        "A name of the hub gets `hf://`.",
    ),
    ForeignName("model.dtype", ("torch_dtype",), (), (), "Weights that train are float32."),
    ForeignName(
        "data.train",
        ("train_dataset", "dataset_name"),
        ("data.train_files",),
        (),
        "A file, `hf://owner/name?split=train` or `reasoning-gym://`; several are `data.sets`.",
    ),
    ForeignName("data.validation", ("eval_dataset",), ("data.val_files",)),
    ForeignName("data.promptKey", (), ("data.prompt_key",)),
    ForeignName("data.shuffle", ("shuffle_dataset",), ("data.shuffle",)),
    ForeignName("algorithm.name", (), ("algorithm.adv_estimator",), (), "`grpo`, `dr_grpo`, `rloo`, `gae`, ..."),
    ForeignName(
        "algorithm.groupSize", ("num_generations",), ("actor_rollout_ref.rollout.n",), ("rollouts_per_example",)
    ),
    ForeignName(
        "algorithm.promptsPerStep",
        ("per_device_train_batch_size", "generation_batch_size"),
        ("data.train_batch_size",),
        ("batch_size",),
        "Prompts of all devices; a step has promptsPerStep x groupSize completions.",
    ),
    ForeignName(
        "algorithm.steps",
        ("max_steps", "num_train_epochs"),
        ("trainer.total_training_steps", "trainer.total_epochs"),
        ("max_steps",),
        "Steps; the data are repeated as needed.",
    ),
    ForeignName(
        "algorithm.optimizerStepsPerBatch",
        ("steps_per_generation",),
        ("actor_rollout_ref.actor.ppo_mini_batch_size",),
        (),
        "A number of optimizer steps, not a size.",
    ),
    ForeignName("algorithm.updateEpochs", ("num_iterations",), ("actor_rollout_ref.actor.ppo_epochs",)),
    ForeignName("algorithm.maxStaleness", (), (), ("max_async_level", "max_off_policy_steps"), "0 = on policy."),
    ForeignName("algorithm.seed", ("seed",), (), ("seed",)),
    ForeignName("algorithm.whiten", (), ("algorithm.norm_adv",)),
    ForeignName("algorithm.rewardKlCoefficient", (), ("algorithm.kl_ctrl.kl_coef", "algorithm.use_kl_in_reward")),
    ForeignName("algorithm.loss.name", ("loss_type",), ("actor_rollout_ref.actor.policy_loss.loss_mode",)),
    ForeignName(
        "algorithm.loss.klCoefficient",
        ("beta",),
        ("actor_rollout_ref.actor.kl_loss_coef", "actor_rollout_ref.actor.use_kl_loss"),
        ("kl_coef",),
    ),
    ForeignName(
        "algorithm.loss.clipLow",
        ("epsilon",),
        ("actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio"),
    ),
    ForeignName("algorithm.loss.clipHigh", ("epsilon_high",), ("actor_rollout_ref.actor.clip_ratio_high",)),
    ForeignName("algorithm.loss.dualClip", ("delta",), ("actor_rollout_ref.actor.clip_ratio_c",)),
    ForeignName("algorithm.loss.aggregation", (), ("actor_rollout_ref.actor.loss_agg_mode",)),
    ForeignName("algorithm.loss.entropyCoefficient", (), ("actor_rollout_ref.actor.entropy_coeff",)),
    ForeignName("algorithm.overlong.filter", ("mask_truncated_completions",)),
    ForeignName("algorithm.dynamicSampling.enabled", (), ("algorithm.filter_groups.enable",)),
    ForeignName("actor.backend", (), ("actor_rollout_ref.actor.strategy",)),
    ForeignName("actor.replicas", (), ("trainer.nnodes",)),
    ForeignName("actor.gpus", (), ("trainer.n_gpus_per_node",)),
    ForeignName(
        "actor.microBatchTokens",
        ("gradient_accumulation_steps",),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ("micro_batch_size",),
        "Tokens of a micro-batch; accumulation follows from it.",
    ),
    ForeignName("actor.gradClip", ("max_grad_norm",), ("actor_rollout_ref.actor.grad_clip",), ("max_norm",)),
    ForeignName(
        "actor.gradientCheckpointing",
        ("gradient_checkpointing",),
        ("actor_rollout_ref.model.enable_gradient_checkpointing",),
        ("model.ac",),
    ),
    ForeignName(
        "actor.optimizer.learningRate", ("learning_rate",), ("actor_rollout_ref.actor.optim.lr",), ("optim.lr",)
    ),
    ForeignName(
        "actor.optimizer.weightDecay",
        ("weight_decay",),
        ("actor_rollout_ref.actor.optim.weight_decay",),
        ("optim.weight_decay",),
    ),
    ForeignName("actor.optimizer.schedule.style", ("lr_scheduler_type",), (), ("scheduler.type",)),
    ForeignName(
        "actor.optimizer.schedule.warmupSteps",
        ("warmup_steps",),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps",),
        ("scheduler.warmup_steps",),
    ),
    ForeignName(
        "actor.optimizer.schedule.warmupRatio",
        ("warmup_ratio",),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",),
    ),
    ForeignName(
        "rollout.engine", ("use_vllm", "vllm_mode"), ("actor_rollout_ref.rollout.name",), (), "`hf` or `sglang`."
    ),
    ForeignName(
        "rollout.gpus",
        ("vllm_tensor_parallel_size",),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size",),
        ("tp",),
    ),
    ForeignName(
        "rollout.sampling.temperature",
        ("temperature",),
        ("actor_rollout_ref.rollout.temperature",),
        ("sampling.temperature",),
    ),
    ForeignName(
        "rollout.sampling.topP",
        ("top_p",),
        ("actor_rollout_ref.rollout.top_p",),
        (),
        "Biases the policy ratio: see algorithm.allowTruncatedSampling.",
    ),
    ForeignName("rollout.sampling.topK", ("top_k",), ("actor_rollout_ref.rollout.top_k",)),
    ForeignName("rollout.sampling.minP", ("min_p",)),
    ForeignName("rollout.sampling.repetitionPenalty", ("repetition_penalty",)),
    ForeignName(
        "rollout.sampling.maxNewTokens",
        ("max_completion_length",),
        ("data.max_response_length",),
        ("sampling.max_tokens",),
    ),
    ForeignName(
        "rollout.maxSequenceLength",
        ("max_prompt_length", "max_model_length"),
        ("data.max_prompt_length", "actor_rollout_ref.rollout.max_model_len"),
        ("seq_len",),
        "Prompt and completion together.",
    ),
    ForeignName(
        "env.reward",
        ("reward_funcs",),
        ("custom_reward_function.path",),
        (),
        "`module:function`, with `env.type: reward`.",
    ),
    ForeignName("env.maxTurns", (), ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns",), ("max_turns",)),
    ForeignName(
        "placement.mode", (), ("actor_rollout_ref.hybrid_engine",), (), "`colocated`, `hybrid` or `disaggregated`."
    ),
    ForeignName("checkpoint.everySteps", ("save_steps",), ("trainer.save_freq",), ("ckpt.interval",)),
    ForeignName("checkpoint.keep", ("save_total_limit",), ("trainer.max_actor_ckpt_to_keep",), ("ckpt.keep",)),
    ForeignName("validation.everySteps", ("eval_steps",), ("trainer.test_freq",), ("eval.interval",)),
    ForeignName("validation.beforeTraining", ("eval_on_start",), ("trainer.val_before_train",)),
    ForeignName("trackers", ("report_to",), ("trainer.logger",), ("wandb",)),
    ForeignName("metadata.name", ("run_name",), ("trainer.experiment_name",), (), "Not below `spec`."),
    ForeignName(
        "rljob run --output",
        ("output_dir",),
        ("trainer.default_local_dir",),
        ("output_dir",),
        "An option, not a field.",
    ),
    ForeignName(
        "rljob run --resume",
        ("resume_from_checkpoint",),
        ("trainer.resume_mode",),
        ("ckpt.resume_step",),
        "An option, not a field.",
    ),
)


def by_name() -> dict[str, ForeignName]:
    """Return the settings by the last part of each of their names; the first in the list where two share one."""
    found: dict[str, ForeignName] = {}
    for setting in FOREIGN_NAMES:
        for name in setting.names:
            found.setdefault(name, setting)
    return found


def render_page() -> str:
    """Return docs/coming-from.md: a table for each library, one name in a row."""
    lines = [
        "# Coming from TRL, verl or prime-rl",
        "",
        "Generated from rl_core.cli.foreign_names by `make docs`. Fields of a job are below `spec`, in camelCase; one of the other names in a",
        "job is refused with the name here. What a field means: [reference](reference/rljob.md). Names of several versions are listed.",
    ]
    libraries = {"TRL": "trl", "verl (below `actor_rollout_ref` without it)": "verl", "prime-rl": "prime_rl"}
    for title, attribute in libraries.items():
        lines += ["", f"## {title.partition(' (')[0]}", "", f"| {title} | here | note |", "| --- | --- | --- |"]
        for setting in FOREIGN_NAMES:
            for name in getattr(setting, attribute):
                lines.append(f"| `{name.removeprefix('actor_rollout_ref.')}` | `{setting.ours}` | {setting.note} |")
    return "\n".join(lines) + "\n"
