"""The names the specification promises can be imported from their module and from the package."""

import importlib

import pytest

import rl_core.algorithms

PROMISED = {
    "registry": "register resolve names",
    "advantages": "AdvantageResult AdvantageInputs compute_advantages grpo_advantages rloo_advantages "
    "reinforce_plus_plus_advantages gae_advantages embodied_gae_advantages gdpo_advantages opd_advantages raw_advantages "
    "place_terminal_reward whiten clip_advantages episode_scores embodied_loss_mask action_log_probs",
    "losses": "LossResult LossInputs compute_policy_loss ppo_clip_loss cispo_loss gspo_loss reinforce_loss "
    "decoupled_ppo_loss critic_loss explained_variance sft_loss entropy_term combine_losses importance_weights",
    "kl": "kl_penalty kl_loss",
    "aggregation": "LossNormalizers count_normalizers aggregate masked_mean masked_mean_ratio Stat merge_stats",
    "logprobs": "token_log_probs token_entropy",
    "rewards": "compute_rewards math_reward exact_reward format_reward scale_rewards shape_overlong shape_stop_properly",
    "filtering": "informative_groups DynamicSampler overlong_filter sequence_error_mask down_sample",
}


@pytest.mark.parametrize("module", PROMISED)
def test_promised_names_have_one_home_and_are_reexported(module):
    home = importlib.import_module(f"rl_core.algorithms.{module}")
    for name in PROMISED[module].split():
        assert getattr(rl_core.algorithms, name) is getattr(home, name)


def test_every_reexport_exists():
    assert all(getattr(rl_core.algorithms, name) is not None for name in rl_core.algorithms.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = rl_core.algorithms.no_such_name
