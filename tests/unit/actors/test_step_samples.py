"""What a training step keeps for people to look at: its first groups, with the numbers that the step computed."""

import asyncio

import numpy as np
import pytest
import torch

from rl_core.channel import Channel
from rl_core.messages.samples import GIVEN, TRAINED
from tests.unit.actors.actor_steps import train


def kept(actor, records):
    train(actor, records)
    return actor.take_samples()


@pytest.mark.parametrize("recompute", [False, True])
def test_the_trainers_log_probabilities_are_those_of_transformers_before_the_update(
    make_actor, records, model_folder, recompute
):
    from transformers import Qwen2ForCausalLM

    taken = kept(make_actor(samples__groups=2, algorithm__recomputeLogProbs=recompute), records)
    log_probs = dict(taken.log_probs)
    assert [sample.row for sample in taken.samples] == list(range(8)) == sorted(log_probs)
    model = Qwen2ForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    compared = 0
    for sample in taken.samples:
        ids = torch.tensor(sample.token_ids[None].astype(np.int64))
        with torch.no_grad():
            expected = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
        trained = sample.mask == TRAINED
        known = log_probs[sample.row]
        assert np.array_equal(~np.isnan(known), trained)
        assert np.abs(known[1:] - expected)[trained[1:]].max(initial=0) < 1e-5
        compared += int(trained.sum())
    assert compared > 20


def test_the_first_groups_are_kept_whole_with_rewards_and_advantages(make_actor, records):
    actor = make_actor(samples__groups=3)
    taken = kept(actor, records[::-1])
    assert [(sample.group_id, sample.index) for sample in taken.samples] == [
        (f"0-{group}", index) for group in range(3) for index in range(4)
    ]
    for sample in taken.samples:
        original = records[int(sample.group_id[2:])].completions[sample.index]
        answer = original.message_log[-1]
        assert sample.reward == original.reward == pytest.approx(sample.shaped_reward)
        assert sample.token_ids[-len(answer["token_ids"]) :].tolist() == answer["token_ids"].tolist()
        assert sample.advantages is not None and not sample.advantages[sample.mask == GIVEN].any()
        assert len(set(sample.advantages[sample.mask == TRAINED].tolist())) <= 1
    assert actor.take_samples().samples == ()


def test_groups_that_are_not_trained_are_read_off_the_channel_by_their_tokens(make_actor, records):
    channel = Channel.create("trajectories", local=True)
    for record in records[:3]:
        channel.put(record, key=record.lease_token)
    actor = make_actor(samples__groups=3)
    tokens = {records[n].lease_token: records[n].group_id for n in (2, 0)}
    read = asyncio.run(actor.read_samples(channel, tokens))
    assert [(sample.group_id, sample.index) for sample in read] == [
        (f"0-{group}", index) for group in (2, 0) for index in range(4)
    ]
    for sample in read:
        completion = records[int(sample.group_id[2:])].completions[sample.index]
        assert sample.reward == completion.reward and sample.advantages is None
        assert sample.token_ids.tolist()[-1] == completion.message_log[-1]["token_ids"][-1]
    assert channel.qsize(key=records[1].lease_token) == 1 and channel.qsize(key=records[0].lease_token) == 0


def test_a_failed_completion_is_kept_without_a_reward_and_trains_nothing(make_actor, make_spec):
    from tests.actor_samples import make_record

    records = [make_record(group) for group in (3, 4, 5, 6)]  # the first completion of group 3 failed
    sample = kept(make_actor(samples__groups=1), records).samples[0]
    assert sample.reason == "error" and np.isnan(sample.reward) and not (sample.mask == TRAINED).any()


def test_nothing_is_kept_of_a_step_that_was_cancelled_or_with_groups_0(make_actor, records):
    none = make_actor(samples__groups=0)
    train(none, records)
    assert none.take_samples().samples == none.take_samples().log_probs == ()
    actor = make_actor()
    actor.load_batch(records)
    actor.compute_advantages_and_returns()
    actor.engine.cancel()
    assert actor.run_training(1) is None
    assert actor.take_samples().samples == actor.take_samples().log_probs == ()


def test_a_sample_that_cannot_be_kept_costs_the_step_nothing(make_actor, records, caplog):
    plain, broken = make_actor(samples__groups=0), make_actor()
    expected = train(plain, records)
    broken.load_batch(records)
    broken.compute_advantages_and_returns()
    broken.engine._records = broken.engine._records[:1]
    assert broken.run_training(1)["actor/loss"] == expected["actor/loss"]
    assert broken.take_samples().samples == () and "samples of a step are not kept" in caplog.text
