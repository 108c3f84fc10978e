"""Names that newcomers bring from TRL, verl and prime-rl: the answer is the name used here, or the reason why there is none.

The names are those of the installed TRL, and of the configuration files of verl (ppo_trainer) and prime-rl (rl).
"""

import copy
import dataclasses
import re

import pytest
import trl

from rl_core.api.foreign_names import LIBRARIES, foreign_names
from rl_core.cli.problems import find_problems

GOOD = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "a"},
    "spec": {"model": {"path": "m"}, "data": {"train": "t.jsonl"}},
}
TRL_NAMES = [
    field.name
    for config in (trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments)
    for field in dataclasses.fields(config)
]
VERL_NAMES = {
    "actor_rollout_ref.actor": """
        strategy ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu clip_ratio
        clip_ratio_low clip_ratio_high policy_loss.loss_mode clip_ratio_c loss_agg_mode entropy_coeff use_kl_loss use_torch_compile
        kl_loss_coef kl_loss_type ppo_epochs shuffle checkpoint.save_contents checkpoint.load_contents checkpoint.async_save optim.lr
        optim.lr_warmup_steps_ratio optim.weight_decay optim.lr_warmup_steps optim.min_lr_ratio optim.num_cycles optim.warmup_style
        optim.lr_scheduler_type use_fused_kernels grad_clip ulysses_sequence_parallel_size entropy_from_logits_with_chunking
        entropy_checkpointing fsdp_config.param_offload fsdp_config.optimizer_offload fsdp_config.offload_policy
        fsdp_config.reshard_after_forward fsdp_config.fsdp_size fsdp_config.forward_prefetch use_remove_padding""",
    "actor_rollout_ref.ref": "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.rollout": """
        name mode temperature top_k top_p prompt_length response_length dtype gpu_memory_utilization ignore_eos enforce_eager
        cudagraph_capture_sizes free_cache_engine tensor_model_parallel_size max_num_batched_tokens max_model_len max_num_seqs
        log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz disable_log_stats do_sample n over_sample_rate
        multi_stage_wake_up val_kwargs.temperature val_kwargs.n val_kwargs.do_sample multi_turn.enable multi_turn.max_assistant_turns
        multi_turn.tool_config_path multi_turn.max_user_turns multi_turn.max_parallel_calls multi_turn.max_tool_response_length
        multi_turn.format calculate_log_probs agent.num_workers agent.agent_loop_config_path update_weights_bucket_megabytes skip_rollout
        enable_chunked_prefill load_format layered_summon""",
    "actor_rollout_ref": "hybrid_engine nccl_timeout",
    "actor_rollout_ref.model": """
        path custom_chat_template use_shm external_lib enable_gradient_checkpointing enable_activation_offload use_remove_padding lora_rank
        lora_alpha target_modules exclude_modules use_liger use_fused_kernels trust_remote_code""",
    "data": """
        train_files val_files prompt_key reward_fn_key max_prompt_length max_response_length train_batch_size val_batch_size
        return_raw_input_ids return_raw_chat return_full_prompt dataloader_num_workers validation_shuffle filter_overlong_prompts
        filter_overlong_prompts_workers truncation image_key video_key trust_remote_code custom_cls.path sampler.class_path
        return_multi_modal_inputs apply_chat_template_kwargs use_shm""",
    "critic": "optim.lr cliprange_value model.path forward_max_token_len_per_gpu",
    "reward_model": "enable model.path reward_manager launch_reward_fn_async sandbox_fusion.url",
    "custom_reward_function": "path",
    "algorithm": """
        gamma lam adv_estimator norm_adv_by_std_in_grpo use_kl_in_reward kl_penalty kl_ctrl.type kl_ctrl.kl_coef kl_ctrl.horizon
        kl_ctrl.target_kl use_pf_ppo rollout_correction.rollout_is rollout_correction.rollout_is_threshold""",
    "trainer": """
        balance_batch total_epochs total_training_steps project_name experiment_name logger log_val_generations rollout_data_dir
        validation_data_dir nnodes n_gpus_per_node save_freq esi_redundant_time resume_mode resume_from_path val_before_train val_only
        test_freq critic_warmup default_hdfs_dir del_local_ckpt_after_load default_local_dir max_actor_ckpt_to_keep max_critic_ckpt_to_keep
        ray_wait_register_center_timeout device""",
    "global_profiler": "steps",
    "ray_kwargs": "ray_init.num_cpus",
}
PRIME_RL_NAMES = {
    "": """
        output_dir clean_output_dir max_steps max_model_len seq_len max_async_level weight_broadcast.type weight_broadcast.port bench dry_run
        wandb.project wandb.name wandb.offline ckpt.interval ckpt.resume_step ckpt.keep_last ckpt.keep_interval log.level log.file
        log.json_logging deployment.gpus_per_node deployment.num_train_gpus deployment.num_train_nodes deployment.num_infer_nodes slurm""",
    "trainer": """
        model.seq_len model.attn model.compile model.ac model.ac_offloading model.fsdp_cpu_offload model.optim_cpu_offload
        model.reshard_after_forward model.dp_replicate model.ep model.tp model.cp model.impl model.optimization_dtype model.reduce_dtype
        model.moe_use_grouped_mm model.freeze_moe_router model.lora.rank model.lora.alpha model.lora.dropout model.lora.target_modules
        model.lora.modules_to_save model.fused_lm_head_chunk_size tokenizer.chat_template loss.type loss.kl_tau loss.adv_tau
        loss.ipo_mask_low loss.ipo_mask_high loss.teacher_tau optim.type optim.lr optim.weight_decay optim.max_norm optim.betas1
        optim.betas2 scheduler.type scheduler.warmup_steps scheduler.decay_steps scheduler.min_lr ckpt.weights ckpt.skip_progress
        ckpt.skip_scheduler ckpt.skip_dataloader enable_router_replay memory_profiler_path trace_path dist_timeout_seconds heartbeat
        metrics_server max_concurrent_runs""",
    "orchestrator": """
        teacher_model sampling.temperature sampling.repetition_penalty sampling.max_tokens sampling.min_tokens sampling.seed
        sampling.extra_body eval.num_examples eval.interval eval.eval_base_model buffer.seed buffer.env_ratios buffer.easy_threshold
        buffer.hard_threshold buffer.easy_fraction buffer.hard_fraction buffer.online_difficulty_filtering verification advantage filters
        prime_monitor max_concurrent tasks_per_minute batch_size token_batch_size oversampling_factor max_inflight_rollouts
        rollouts_per_example num_train_workers max_off_policy_steps strict_async_level seed use_token_client""",
    "inference": """
        model.name model.dtype model.quantization model.kv_cache_dtype model.max_model_len model.enforce_eager model.trust_remote_code
        model.tool_call_parser model.reasoning_parser model.rope_scaling server.host server.port parallel.tp enable_prefix_caching
        gpu_memory_utilization api_server_count""",
}


def hints(path, value=1):
    """Return the problems of a job in which `value` stands at `path` below spec, as far as they are about unknown fields."""
    document = copy.deepcopy(GOOD)
    block = document["spec"]
    *parents, name = path.split(".")
    for part in parents:
        block = block.setdefault(part, {})
    block[name] = value
    return [line for line in find_problems(document)[1] if "is not a known field" in line]


def paths(names):
    return [f"{block}.{name}".strip(".") for block, listed in names.items() for name in listed.split()]


def assert_answered(path):
    (hint,) = hints(path)
    found = re.search(r", (write|remove) .*", hint)
    assert found and ("write" in found[0] or "no counterpart here: " in found[0]), hint


@pytest.mark.parametrize("name", TRL_NAMES)
def test_every_setting_of_trl_is_answered(name):
    assert_answered(name)


@pytest.mark.parametrize("path", paths(VERL_NAMES))
def test_every_main_setting_of_verl_is_answered(path):
    assert_answered(path)


@pytest.mark.parametrize("path", [path for path in paths(VERL_NAMES) if path.startswith("actor_rollout_ref.")])
def test_the_settings_of_verl_are_answered_without_the_outer_block(path):
    inner = path.removeprefix("actor_rollout_ref.")
    if inner not in ("model.path", "rollout.n"):  # the first is ours too
        assert_answered(inner)


@pytest.mark.parametrize("path", paths(PRIME_RL_NAMES))
def test_every_main_setting_of_prime_rl_is_answered(path):
    assert_answered(path)


@pytest.mark.parametrize(
    ("path", "way_out"),
    [
        ("rollout.mode", "remove it, it has no counterpart here: Generation overlaps with training where"),
        ("trainer.project_name", "write trackers for project_name (Of an entry: `trackers: [{name: wandb, project: NAME"),
        ("trainer.balance_batch", "write actor.balance for balance_batch"),
        ("data.dataset_config", "write data.train (Part of the reference"),
        ("dataset_config", "write data.train (Part of the reference"),
        ("data.chat_template_kwargs", "remove it, it has no counterpart here: The template of the data gets no variables"),
        ("rollout.agent.num_workers", "write env.processes for num_workers"),
        ("rollout.free_cache_engine", "write placement.mode"),
        ("rollout.freeCacheEngine", "write placement.mode"),
        ("remove_unused_columns", "no counterpart here: The reward function gets all columns"),
        ("actor.use_dynamic_bsz", "write actor.microBatchTokens"),
        ("data.filter_overlong_prompts", "write data.onOverlong"),
        ("hub_model_id", "no counterpart here: A run uploads no model"),
        ("push_to_hub", "no counterpart here: A run uploads no model"),
        ("modelPath", "write model.path"),
        ("rollout.sampling.bad_words", "write rollout.sampling.logitBias (`logitBias: {'ID': -100}` bans the token ID"),
        ("rollout.sampling.badWords", "write rollout.sampling.logitBias ("),
        ("actor.shuffle", "no counterpart here: The rows of a step are shuffled"),
        ("data.trainer", "did you mean train?"),
        ("trainer.nothing", "remove it; docs/coming-from.md lists the settings of other libraries"),
    ],
)  # fmt: skip
def test_the_answer_is_about_the_setting_in_its_block(path, way_out):
    (hint,) = hints(path)
    assert way_out in hint, hint


def test_a_block_with_several_settings_names_those_with_and_those_without_counterpart():
    (hint,) = hints("trainer", {"balance_batch": True, "nnodes": 1, "val_only": False})
    assert [line.strip() for line in hint.splitlines()[1:]] == [
        "actor.balance for balance_batch (On unless it is set to false)",
        "actor.replicas for nnodes",
        "nothing for val_only: A job always trains; `validation` says when it also evaluates",
    ]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("clipHigh", "did you mean algorithm.loss.clipHigh?"),
        ("learningRat", "did you mean actor.optimizer.learningRate?"),
        ("algorithm.learningrate", "did you mean actor.optimizer.learningRate?"),
        ("runtime.heartbeat", "did you mean runtime.deadlines.heartbeat?"),
        ("image", "did you mean actor.image?"),
        ("nodeSelector", "did you mean actor.nodeSelector?"),
        ("rollout.maxNewToken", "did you mean rollout.sampling.maxNewTokens?"),
        ("actor.affinities", "did you mean affinity?"),
        ("data.chatTemplates", "did you mean chatTemplate?"),
        ("steps", "did you mean algorithm.steps?"),
        ("environment", "did you mean env?"),
    ],
)
def test_a_field_that_is_near_is_still_found(path, meant):
    (hint,) = hints(path)
    assert hint.endswith(meant), hint


@pytest.mark.parametrize(
    "path",
    ["rollout.items", "actor.claimName", "actor.mountPath", "rollout.mounts", "operator", "trainingSet", "rollout.keys", "medium"],
)  # fmt: skip
def test_no_field_is_guessed_that_lies_inside_a_field_of_pods_or_is_only_a_beginning(path):
    for line in hints(path):
        assert "did you mean" not in line, line


def test_no_name_of_a_library_is_listed_twice():
    for library in LIBRARIES:
        names = [name for setting in foreign_names() for name in setting.names.get(library, ())]
        assert len(names) == len(set(names)), library
