"""Records to tensors: what trains, what is masked, where tokens lie."""

import math

import numpy as np
import pytest
import torch

from rl_core.api.errors import DataError
from rl_core.api.records import Completion, PromptGroupRecord
from rl_core.batching.collate import collate_groups


def message(role, ids, logprobs=None, **more):
    found = {"role": role, "content": "", "token_ids": torch.tensor(ids)}
    if logprobs is not None:
        found["generation_logprobs"] = torch.tensor(logprobs)
    return found | more


def group(completions, *, prompt=(1, 2, 3), group_id="0-7", **more):
    log = [message("user", list(prompt))]
    return PromptGroupRecord(
        prompt_idx=7, prompt=log, extra_env_info=None, metadata={}, group_id=group_id,
        completions=[
            c if isinstance(c, Completion) else Completion(message_log=[*log, *c], reward=1.0) for c in completions
        ],
        **more,
    )  # fmt: skip


def answer(*ids, value=-0.5, **more):
    return [message("assistant", list(ids), [value] * len(ids), **more)]


def collate(records, **options):
    return collate_groups(records, **({"pad_token_id": 0, "max_length": 64} | options))


def test_only_generated_assistant_tokens_train():
    turns = [
        message("assistant", [4, 5], [-0.1, -0.2], policy_versions=[(0, 1, 6), (1, 2, 7)]),
        message("environment", [6, 6, 6]),
        message("assistant", [7], None),  # an assistant message nobody generated, such as an example
        message("assistant", [8, 9], [-0.3, -0.4], token_loss_mask=torch.tensor([0, 1]), policy_versions=[(0, 2, 8)]),
        message("tool", [10], [-9.0]),
    ]
    batch = collate([group([turns])])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 6, 6, 7, 8, 9, 10]]
    assert batch.loss_mask.long().tolist() == [[0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0]]
    torch.testing.assert_close(batch.rollout_log_probs, torch.tensor([[0, 0, 0, -0.1, -0.2, 0, 0, 0, 0, 0, -0.4, 0]]))
    assert batch.versions.tolist() == [[-1, -1, -1, 6, 7, -1, -1, -1, -1, -1, 8, -1]]
    assert batch.prompt_lengths.tolist() == [3] and batch.lengths.tolist() == [12]


def test_rows_are_padded_to_the_longest_and_positions_run_on():
    batch = collate([group([answer(4, 5), answer(6, 7, 8, 9)])], pad_token_id=99)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 99, 99], [1, 2, 3, 6, 7, 8, 9]]
    assert batch.attention_mask.long().sum(1).tolist() == [5, 7]
    assert batch.position_ids.tolist() == [list(range(7))] * 2


def test_failed_completion_trains_nothing_and_keeps_no_reward():
    failed = Completion(message_log=[], finish_reason="error")
    excluded = Completion(message_log=group([]).prompt + answer(4), reward=3.0, loss_multiplier=0.0)
    batch = collate([group([answer(5), failed, excluded])])
    assert batch.valid.tolist() == batch.sample_mask.tolist() == [True, False, False]
    assert batch.loss_mask.sum(1).tolist() == [1, 0, 0] and batch.versions[1:].eq(-1).all()
    assert batch.rewards[0] == 1.0 and math.isnan(batch.rewards[1]) and batch.raw_rewards[2] == 3.0
    assert batch.lengths.tolist() == [4, 3, 4]


def test_group_codes_follow_first_appearance_and_texts_are_kept():
    records = [group([answer(4), answer(5)], group_id=text) for text in ("1-9", "0-2")]
    batch = collate(records)
    assert batch.group_ids.tolist() == [0, 0, 1, 1] and batch.group_texts == ["1-9", "0-2"]
    assert batch.sample_ids == ["1-9_g0", "1-9_g1", "0-2_g0", "0-2_g1"]


def test_records_without_an_id_are_never_merged():
    batch = collate([group([answer(4)], group_id=""), group([answer(5)], group_id="")])
    assert batch.group_ids.tolist() == [0, 1] and len(set(batch.sample_ids)) == 2


def test_reward_components_become_columns():
    log = [*group([]).prompt, *answer(4)]
    parts = [{"reward/right": 1.0, "reward/form": 0.5, "turns": 2}, {"reward/right": 0.0}]
    batch = collate([group([Completion(message_log=log, reward=1.0, metrics=metrics) for metrics in parts])])
    assert list(batch.reward_components) == ["right", "form"]
    assert batch.reward_components["right"].tolist() == [1.0, 0.0]
    assert batch.reward_components["form"][0] == 0.5 and math.isnan(batch.reward_components["form"][1])


def test_numpy_fields_and_missing_versions_are_read():
    turn = {
        "role": "assistant",
        "content": "",
        "token_ids": np.array([4, 5]),
        "generation_logprobs": np.array([-1.0, -2.0]),
    }
    batch = collate([group([[turn]], start_version=5)])
    assert batch.versions[0, 3:].tolist() == [5, 5] and batch.rollout_log_probs[0, 3:].tolist() == [-1.0, -2.0]


@pytest.mark.parametrize(
    ("turn", "options", "text"),
    [
        ([message("assistant", [4, 5], [-1.0])], {}, "generation_logprobs must have one entry per token, got 1 for 2"),
        (answer(4, token_loss_mask=torch.ones(2)), {}, "token_loss_mask"),
        (answer(4, 5), {"max_length": 4}, "0-7_g0 must have at most 4 tokens.*got 5"),
        ([{"role": "assistant", "content": "x"}], {}, "token_ids must be present"),
    ],
)
def test_sample_that_does_not_fit_is_refused_by_name(turn, options, text):
    with pytest.raises(DataError, match=text):
        collate([group([turn])], **options)


@pytest.mark.parametrize(("field", "value"), [("reward", math.inf), ("reward", -1e39), ("loss_multiplier", 0.5)])
def test_value_that_cannot_be_honoured_is_refused(field, value):
    log = [*group([]).prompt, *answer(4)]
    with pytest.raises(DataError, match=field):
        collate([group([Completion(message_log=log, **({"reward": 1.0} | {field: value}))])])


def test_no_records_give_an_empty_batch():
    batch = collate([])
    assert len(batch) == 0 and batch.input_ids.shape == (0, 0) and batch.rewards.shape == (0,)


def test_taken_rows_keep_their_order_and_codes():
    batch = collate([group([answer(4), answer(5)]), group([answer(6)], group_id="0-8")])
    taken = batch.take([2, 0])
    assert taken.input_ids[:, 3].tolist() == [6, 4] and taken.group_ids.tolist() == [1, 0]
    assert taken.sample_ids == ["0-8_g0", "0-7_g0"] and len(taken) == 2 and taken.group_texts == batch.group_texts


@pytest.mark.parametrize(
    "ranges",
    [[], [(0, 1, 6)], [(0, 1, 6), (2, 3, 6)], [(0, 2, 6), (1, 3, 7)], [(0, 4, 6)]],
    ids=["none", "short", "gap", "overlap", "beyond"],
)
def test_versions_that_do_not_cover_the_tokens_are_refused_not_guessed(ranges):
    with pytest.raises(DataError, match="0-7_g0, message 1: policy_versions must cover its 3 tokens"):
        collate([group([answer(4, 5, 6, policy_versions=ranges)], start_version=9)])


def test_a_message_without_version_ranges_is_of_the_version_its_group_began_with():
    assert collate([group([answer(4, 5)], start_version=9)]).versions.tolist() == [[-1, -1, -1, 9, 9]]
