"""The settings of TRL, verl, prime-rl and OpenRLHF under the names of this project: one list, for hints and for docs/coming-from.md."""

from dataclasses import dataclass

from pydantic.alias_generators import to_camel

LIBRARIES = {"TRL": "trl", "verl": "verl", "prime-rl": "prime_rl", "OpenRLHF": "openrlhf"}
"""Title of a library -> the field of ForeignName with its names."""


@dataclass(frozen=True, slots=True)
class ForeignName:
    """A setting of other libraries and where it is set here. Names of a library, of several versions, are separated by spaces."""

    ours: str
    """Path below `spec`, or an option of `rljob`."""
    trl: str = ""
    """Fields of GRPOConfig, ModelConfig and ScriptArguments, and arguments of GRPOTrainer."""
    verl: str = ""
    """Keys of verl's configuration with their blocks; `actor_rollout_ref` is left out."""
    prime_rl: str = ""
    """Keys of prime-rl's configuration. The names of newer versions contain their block, as in `orchestrator.batch_size`."""
    openrlhf: str = ""
    """Options of `openrlhf.cli.train_ppo_ray`: the dotted names, and the flat ones of versions before."""
    note: str = ""
    """What differs."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the last parts of all names."""
        every = " ".join((self.trl, self.verl, self.prime_rl, self.openrlhf))
        return tuple(name.rpartition(".")[2] for name in every.split())


FOREIGN_NAMES = (
    ForeignName(
        "model.path",
        trl="model_name_or_path",
        verl="model.path",
        prime_rl="model.name",
        openrlhf="actor.model_name_or_path pretrain",
        note="A name of the hub gets `hf://`.",
    ),
    ForeignName(
        "model.dtype", trl="torch_dtype dtype", openrlhf="ds.param_dtype bf16", note="Weights that train are float32."
    ),
    ForeignName("model.float32Head", trl="cast_lm_head_to_fp32", note="Of the rollouts too."),
    ForeignName(
        "model.lora.rank",
        trl="lora_r",
        verl="model.lora_rank",
        prime_rl="model.lora.rank",
        openrlhf="ds.lora.rank lora_rank",
    ),
    ForeignName(
        "model.lora.alpha",
        trl="lora_alpha",
        verl="model.lora_alpha",
        prime_rl="model.lora.alpha",
        openrlhf="ds.lora.alpha lora_alpha",
    ),
    ForeignName(
        "model.lora.targets",
        trl="lora_target_modules",
        verl="model.target_modules",
        prime_rl="model.lora.target_modules",
        openrlhf="ds.lora.target_modules target_modules",
    ),
    ForeignName(
        "data.train",
        trl="train_dataset dataset_name",
        verl="data.train_files",
        openrlhf="data.prompt_dataset prompt_data",
        note="A file, `hf://owner/name?split=train` or `reasoning-gym://`; several are `data.sets`.",
    ),
    ForeignName("data.validation", trl="eval_dataset", verl="data.val_files", openrlhf="eval.dataset eval_dataset"),
    ForeignName("data.promptKey", verl="data.prompt_key", openrlhf="data.input_key input_key"),
    ForeignName("data.answerKey", openrlhf="data.label_key label_key"),
    ForeignName(
        "data.chat",
        openrlhf="data.apply_chat_template apply_chat_template",
        note="Makes each text prompt a user message; messages are rendered in any case.",
    ),
    ForeignName("data.shuffle", trl="shuffle_dataset", verl="data.shuffle"),
    ForeignName(
        "algorithm.name",
        trl="scale_rewards",
        verl="algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo",
        prime_rl="algo.type",
        openrlhf="algo.advantage.estimator advantage_estimator algo.advantage.no_std_norm no_advantage_std_norm",
        note="`grpo`, `dr_grpo` (no division by the deviation), `rloo`, `gae` and others",
    ),
    ForeignName(
        "algorithm.groupSize",
        trl="num_generations",
        verl="rollout.n",
        prime_rl="group_size rollouts_per_example",
        openrlhf="rollout.n_samples_per_prompt n_samples_per_prompt",
    ),
    ForeignName(
        "algorithm.promptsPerStep",
        trl="per_device_train_batch_size generation_batch_size",
        verl="data.train_batch_size",
        prime_rl="batch_size",
        openrlhf="rollout.batch_size rollout_batch_size",
        note="Prompts, of all devices; TRL and prime-rl count completions.",
    ),
    ForeignName(
        "algorithm.steps",
        trl="max_steps num_train_epochs",
        verl="trainer.total_training_steps trainer.total_epochs",
        prime_rl="max_steps",
        openrlhf="train.num_episodes num_episodes",
        note="Steps; the data are repeated as needed.",
    ),
    ForeignName(
        "algorithm.optimizerStepsPerBatch",
        trl="steps_per_generation",
        verl="actor.ppo_mini_batch_size",
        openrlhf="train.batch_size train_batch_size",
        note="A number of optimizer steps, not a size.",
    ),
    ForeignName(
        "algorithm.updateEpochs", trl="num_iterations", verl="actor.ppo_epochs", openrlhf="train.max_epochs max_epochs"
    ),
    ForeignName(
        "algorithm.maxStaleness",
        prime_rl="max_off_policy_steps max_async_level",
        openrlhf="train.async_queue_size train.async_enable async_train",
        note="0 = on policy.",
    ),
    ForeignName("algorithm.seed", trl="seed", prime_rl="seed", openrlhf="train.seed seed"),
    ForeignName("algorithm.whiten"),
    ForeignName(
        "algorithm.rewardKlCoefficient",
        verl="algorithm.kl_ctrl.kl_coef algorithm.use_kl_in_reward",
        openrlhf="algo.kl.init_coef init_kl_coef",
        note="In the rewards; in the loss: `algorithm.loss.klCoefficient`.",
    ),
    ForeignName("algorithm.critic.gamma", verl="algorithm.gamma", openrlhf="algo.advantage.gamma gamma"),
    ForeignName("algorithm.critic.lam", verl="algorithm.lam", openrlhf="algo.advantage.lambd lambd"),
    ForeignName("algorithm.critic.valueClip", verl="critic.cliprange_value", openrlhf="critic.value_clip value_clip"),
    ForeignName(
        "algorithm.loss.name",
        trl="loss_type",
        verl="actor.policy_loss.loss_mode",
        prime_rl="loss.type",
        openrlhf="actor.policy_loss_type policy_loss_type",
    ),
    ForeignName(
        "algorithm.loss.klCoefficient",
        trl="beta",
        verl="actor.kl_loss_coef actor.use_kl_loss",
        openrlhf="algo.kl.use_loss use_kl_loss",
    ),
    ForeignName("algorithm.loss.klEstimator", verl="actor.kl_loss_type", openrlhf="algo.kl.estimator kl_estimator"),
    ForeignName(
        "algorithm.loss.clipLow",
        trl="epsilon",
        verl="actor.clip_ratio_low actor.clip_ratio",
        openrlhf="actor.eps_clip_low_high eps_clip_low_high actor.eps_clip eps_clip",
    ),
    ForeignName("algorithm.loss.clipHigh", trl="epsilon_high", verl="actor.clip_ratio_high"),
    ForeignName(
        "algorithm.loss.dualClip", trl="delta", verl="actor.clip_ratio_c", openrlhf="actor.dual_clip dual_clip"
    ),
    ForeignName("algorithm.loss.aggregation", verl="actor.loss_agg_mode"),
    ForeignName(
        "algorithm.loss.entropyCoefficient",
        trl="entropy_coef",
        verl="actor.entropy_coeff",
        openrlhf="actor.entropy_coef entropy_loss_coef",
    ),
    ForeignName("algorithm.overlong.filter", trl="mask_truncated_completions"),
    ForeignName("algorithm.overlong.buffer", openrlhf="reward.overlong_buffer_len overlong_buffer_len"),
    ForeignName("algorithm.overlong.penalty", openrlhf="reward.overlong_penalty_factor overlong_penalty_factor"),
    ForeignName(
        "algorithm.dynamicSampling.enabled",
        verl="algorithm.filter_groups.enable",
        prime_rl="train.filter_zero_advantages",
        openrlhf="algo.dynamic_filtering_enable dynamic_filtering",
    ),
    ForeignName(
        "algorithm.importance.mode",
        trl="vllm_importance_sampling_correction vllm_importance_sampling_mode",
        verl="algorithm.rollout_correction.rollout_is",
        openrlhf="algo.advantage.is_correction_enable enable_vllm_is_correction",
    ),
    ForeignName("algorithm.importance.level", trl="importance_sampling_level"),
    ForeignName("actor.backend", verl="actor.strategy"),
    ForeignName(
        "actor.replicas",
        verl="trainer.nnodes",
        prime_rl="deployment.num_train_nodes",
        openrlhf="actor.num_nodes actor_num_nodes",
    ),
    ForeignName(
        "actor.gpus",
        verl="trainer.n_gpus_per_node",
        prime_rl="deployment.num_train_gpus",
        openrlhf="actor.num_gpus_per_node actor_num_gpus_per_node",
    ),
    ForeignName(
        "rollout.replicas", prime_rl="deployment.num_infer_replicas", openrlhf="vllm.num_engines vllm_num_engines"
    ),
    ForeignName(
        "actor.microBatchTokens",
        trl="gradient_accumulation_steps",
        verl="actor.ppo_max_token_len_per_gpu actor.ppo_micro_batch_size_per_gpu",
        prime_rl="micro_batch_size",
        openrlhf="train.max_tokens_per_gpu train_max_tokens_per_gpu train.micro_batch_size micro_train_batch_size",
        note="Tokens of a micro-batch; accumulation follows from it.",
    ),
    ForeignName(
        "actor.gradClip",
        trl="max_grad_norm",
        verl="actor.grad_clip",
        prime_rl="max_norm",
        openrlhf="actor.max_norm max_norm",
    ),
    ForeignName(
        "actor.gradientCheckpointing",
        trl="gradient_checkpointing",
        verl="model.enable_gradient_checkpointing",
        prime_rl="model.ac",
        openrlhf="actor.gradient_checkpointing_enable gradient_checkpointing",
    ),
    ForeignName(
        "actor.attention",
        trl="attn_implementation",
        verl="model.override_config.attn_implementation",
        prime_rl="model.attn",
    ),
    ForeignName(
        "actor.compile",
        trl="torch_compile",
        verl="actor.use_torch_compile actor.fsdp_config.use_torch_compile",
        prime_rl="model.compile",
    ),
    ForeignName(
        "algorithm.referenceUpdateSteps",
        trl="ref_model_sync_steps sync_ref_model",
        note="The whole policy, as with ref_model_mixup_alpha 1.",
    ),
    ForeignName("actor.profileSteps", verl="global_profiler.steps trainer.profile_steps"),
    ForeignName(
        "actor.offload.optimizer",
        verl="actor.fsdp_config.optimizer_offload",
        prime_rl="model.optim_cpu_offload",
        openrlhf="ds.adam_offload adam_offload",
    ),
    ForeignName("actor.offload.params", verl="actor.fsdp_config.param_offload", prime_rl="model.fsdp_cpu_offload"),
    ForeignName(
        "actor.optimizer.learningRate",
        trl="learning_rate",
        verl="actor.optim.lr",
        prime_rl="optim.lr",
        openrlhf="actor.adam.lr actor_learning_rate",
    ),
    ForeignName(
        "actor.optimizer.valueLearningRate", verl="critic.optim.lr", openrlhf="critic.adam.lr critic_learning_rate"
    ),
    ForeignName("actor.optimizer.betas", verl="actor.optim.betas", openrlhf="actor.adam.betas adam_betas"),
    ForeignName(
        "actor.optimizer.weightDecay",
        trl="weight_decay",
        verl="actor.optim.weight_decay",
        prime_rl="optim.weight_decay",
        openrlhf="actor.adam.weight_decay l2",
    ),
    ForeignName(
        "actor.optimizer.schedule.style",
        trl="lr_scheduler_type",
        verl="actor.optim.lr_scheduler_type",
        prime_rl="scheduler.type",
        openrlhf="actor.lr_scheduler lr_scheduler",
    ),
    ForeignName(
        "actor.optimizer.schedule.warmupSteps",
        trl="warmup_steps",
        verl="actor.optim.lr_warmup_steps",
        prime_rl="scheduler.warmup_steps",
    ),
    ForeignName(
        "actor.optimizer.schedule.warmupRatio",
        trl="warmup_ratio",
        verl="actor.optim.lr_warmup_steps_ratio",
        openrlhf="actor.lr_warmup_ratio lr_warmup_ratio",
    ),
    ForeignName("actor.optimizer.schedule.minLearningRate", prime_rl="scheduler.min_lr"),
    ForeignName(
        "actor.optimizer.schedule.minLearningRateRatio", verl="actor.optim.min_lr_ratio", openrlhf="actor.min_lr_ratio"
    ),
    ForeignName("rollout.engine", trl="use_vllm vllm_mode", verl="rollout.name", note="`hf` or `sglang`."),
    ForeignName(
        "rollout.gpus",
        trl="vllm_tensor_parallel_size",
        verl="rollout.tensor_model_parallel_size",
        prime_rl="vllm.tensor_parallel_size parallel.tp",
        openrlhf="vllm.tensor_parallel_size vllm_tensor_parallel_size",
    ),
    ForeignName(
        "rollout.sampling.temperature",
        trl="temperature",
        verl="rollout.temperature",
        prime_rl="sampling.temperature",
        openrlhf="rollout.temperature temperature",
    ),
    ForeignName(
        "rollout.sampling.topP",
        trl="top_p",
        verl="rollout.top_p",
        openrlhf="rollout.top_p top_p",
        note="Biases the policy ratio: see algorithm.allowTruncatedSampling.",
    ),
    ForeignName("rollout.sampling.topK", trl="top_k", verl="rollout.top_k"),
    ForeignName("rollout.sampling.minP", trl="min_p"),
    ForeignName("rollout.sampling.repetitionPenalty", trl="repetition_penalty"),
    ForeignName(
        "rollout.sampling.maxNewTokens",
        trl="max_completion_length",
        verl="data.max_response_length",
        prime_rl="sampling.max_completion_tokens sampling.max_tokens",
        openrlhf="rollout.max_new_tokens generate_max_len",
    ),
    ForeignName(
        "rollout.maxSequenceLength",
        trl="max_prompt_length vllm_max_model_length",
        verl="data.max_prompt_length rollout.max_model_len",
        prime_rl="seq_len vllm.max_model_len",
        openrlhf="data.max_len max_len prompt_max_len",
        note="Prompt and completion together.",
    ),
    ForeignName(
        "rollout.engineArgs",
        trl="vllm_gpu_memory_utilization",
        verl="rollout.gpu_memory_utilization",
        prime_rl="vllm.gpu_memory_utilization",
        openrlhf="vllm.gpu_memory_utilization vllm_gpu_memory_utilization",
        note="Arguments of SGLang by their names, here `mem_fraction_static`.",
    ),
    ForeignName(
        "env.reward",
        trl="reward_funcs reward_weights",
        verl="custom_reward_function.path",
        openrlhf="reward.remote_url remote_rm_url",
        note="One `module:function`, `env.type: reward`; several rewards: `parts` of its result.",
    ),
    ForeignName(
        "env.agent",
        trl="rollout_func",
        openrlhf="train.agent_func_path agent_func_path",
        note="`module:function`, with `env.type: agent`; a function that calls the model by an OpenAI client.",
    ),
    ForeignName("env.factory", trl="environment_factory", note="With `env.type: environment_factory`."),
    ForeignName(
        "env.maxTurns",
        verl="rollout.multi_turn.max_assistant_turns",
        note="Of an environment; an agent program plays as many as it likes.",
    ),
    ForeignName(
        "placement.mode",
        verl="hybrid_engine",
        openrlhf="train.colocate_all colocate_all_models",
        note="`colocated`, `hybrid` or `disaggregated`.",
    ),
    ForeignName(
        "checkpoint.everySteps",
        trl="save_steps",
        verl="trainer.save_freq",
        prime_rl="ckpt.interval",
        openrlhf="ckpt.save_steps save_steps",
    ),
    ForeignName(
        "checkpoint.keep",
        trl="save_total_limit",
        verl="trainer.max_actor_ckpt_to_keep",
        prime_rl="ckpt.keep_last ckpt.keep",
        openrlhf="ckpt.max_num max_ckpt_num",
    ),
    ForeignName(
        "validation.everySteps",
        trl="eval_steps",
        verl="trainer.test_freq",
        prime_rl="eval.interval",
        openrlhf="eval.steps eval_steps",
    ),
    ForeignName(
        "validation.samplesPerPrompt",
        trl="num_generations_eval",
        verl="rollout.val_kwargs.n",
        prime_rl="eval.group_size",
        openrlhf="eval.n_samples_per_prompt eval_n_samples_per_prompt",
    ),
    ForeignName(
        "validation.temperature",
        verl="rollout.val_kwargs.temperature",
        prime_rl="eval.sampling.temperature",
        openrlhf="eval.temperature eval_temperature",
    ),
    ForeignName("validation.beforeTraining", trl="eval_on_start", verl="trainer.val_before_train"),
    ForeignName(
        "trackers",
        trl="report_to",
        verl="trainer.logger",
        prime_rl="wandb monitors",
        openrlhf="logger.wandb.project use_wandb",
    ),
    ForeignName(
        "samples",
        trl="log_completions",
        verl="trainer.rollout_data_dir trainer.log_val_generations",
        note="Kept by default; `rljob samples`, `rljob view`.",
    ),
    ForeignName(
        "metadata.name",
        trl="run_name",
        verl="trainer.experiment_name",
        prime_rl="run.name",
        openrlhf="logger.wandb.run_name wandb_run_name",
        note="Not below `spec`.",
    ),
    ForeignName(
        "rljob run --output",
        trl="output_dir",
        verl="trainer.default_local_dir",
        prime_rl="output_dir",
        openrlhf="ckpt.output_dir save_path ckpt_path",
        note="An option, not a field.",
    ),
    ForeignName(
        "rljob run --resume",
        trl="resume_from_checkpoint",
        verl="trainer.resume_mode",
        prime_rl="ckpt.resume_step resume.step",
        openrlhf="ckpt.load_enable load_checkpoint",
        note="An option, not a field.",
    ),
)

GENERIC = frozenset({"name", "type", "path", "interval", "step", "dataset", "project", "rank", "alpha", "n"})
"""Last parts that mean something else in other blocks: they lead to a field of the block that they stand in, or nowhere."""


def foreign_name(name: str, block: str) -> ForeignName | None:
    """Return the setting that other libraries call `name`, in snake_case or camelCase; None where none does.

    Of several settings the one in `block`, the path below spec at which the name was found, is preferred to the first.
    """
    found = [one for one in FOREIGN_NAMES if any(name in (other, to_camel(other)) for other in one.names)]
    here = [one for one in found if one.ours.rpartition(".")[0] == block]
    return next(iter(here or (() if name in GENERIC else found)), None)


def render_page() -> str:
    """Return docs/coming-from.md: a table for each library, one name in a row."""
    lines = [
        "# Coming from TRL, verl, prime-rl or OpenRLHF",
        "",
        "Generated from rl_core.cli.foreign_names by `make docs`. Fields of a job are below `spec`, in camelCase; one of the other names in a",
        "job is refused with the name here. What a field means: [reference](reference/rljob.md). Names of several versions are listed.",
        "The keys of verl below `actor_rollout_ref` are written without it.",
    ]
    for title, library in LIBRARIES.items():
        lines += ["", f"## {title}", "", f"| {title} | here | note |", "| --- | --- | --- |"]
        for setting in FOREIGN_NAMES:
            for name in getattr(setting, library).split():
                lines.append(f"| `{name}` | `{setting.ours}` | {setting.note} |")
    return "\n".join(lines) + "\n"
