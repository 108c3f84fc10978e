"""PPO with a critic: values, advantages, losses and their gradients are those written out; what is the critic's stays the critic's."""

import copy

import pytest
import torch
from safetensors.torch import load_file

from rl_core.actors.critic import decoder_and_head, is_critic_name
from rl_core.actors.reference import ReferencePolicy
from tests.unit.actors.actor_steps import gradients, gradients_of, prepare, sums, train

KINDS = pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
GAMMA, LAM, CLIP, COEFFICIENT = 0.9, 0.8, 0.05, 0.7


@pytest.fixture
def make_ppo(make_actor):
    """Make an actor whose value head is not 0, so that values differ from token to token."""

    def make(separate=False, **changes):
        critic = {"separate": separate, **changes.pop("critic", {})}
        actor = make_actor(**{"algorithm__name": "gae", "algorithm__critic": critic, **changes})
        head = decoder_and_head(actor.manager.model)[1].weight
        with torch.no_grad():
            head.copy_(torch.linspace(-0.2, 0.3, head.numel()).view_as(head))
        return actor

    return make


def parts_of(actor, critic):
    return {
        name: p.detach().clone() for name, p in actor.manager.model.named_parameters() if is_critic_name(name) is critic
    }


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def valid_rows(records):
    """Yield (prompt, answer, reward) of the completions that did not fail."""
    for record in records:
        for completion in record.completions:
            if completion.reward == completion.reward:
                prompt, answer = (message["token_ids"] for message in completion.message_log)
                yield prompt, answer, completion.reward


def by_loop(rewards, values, gamma=GAMMA, lam=LAM):
    """Return advantages and returns of one row, token by token from its end."""
    advantages, following, carried = [0.0] * len(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        carried = rewards[t] + gamma * following - values[t] + gamma * lam * carried
        advantages[t], following = carried, values[t]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def forward(model, prompt, answer):
    """Return log-probabilities and values of an answer's tokens by a plain forward pass of one row."""
    ids, at = torch.cat((prompt, answer))[None], slice(len(prompt) - 1, -1)
    log_probs = model(ids).logits[0, at].log_softmax(-1).gather(-1, answer[:, None])[:, 0]
    decoder, head = decoder_and_head(model)
    return log_probs, (decoder(input_ids=ids).last_hidden_state[0, at] @ head.weight.T)[:, 0]


@KINDS
def test_the_gradient_is_that_of_both_losses_written_out_in_float64(make_ppo, records, separate):
    """Old values are moved off the critic's, so that the clip bites; advantages and returns follow from them by a loop."""
    actor = make_ppo(
        separate,
        critic={"gamma": GAMMA, "lam": LAM, "valueClip": CLIP, "coefficient": COEFFICIENT},
        algorithm__recomputeLogProbs=True,
    )
    prepared = prepare(actor, records)
    prepared.values += 0.1 * torch.randn(prepared.values.shape, generator=torch.Generator().manual_seed(1))
    actor.compute_advantages_and_returns()
    mask = prepared.batch.loss_mask
    rows = [row for row in range(len(mask)) if mask[row].any()]
    model, losses = copy.deepcopy(actor.manager.model).double(), []
    for row, (prompt, answer, reward) in zip(rows, valid_rows(records), strict=True):
        old = prepared.values[row][mask[row]].double()
        advantages, returns = by_loop([0.0] * (len(answer) - 1) + [reward], old.tolist())
        for ours, theirs in ((prepared.advantages, advantages), (prepared.returns, returns)):
            torch.testing.assert_close(ours[row][mask[row]], torch.tensor(theirs), atol=1e-5, rtol=1e-5)
        log_probs, values = forward(model, prompt, answer)
        target = torch.tensor(returns, dtype=torch.float64)
        clipped = old + (values - old).clamp(-CLIP, CLIP)
        value_loss = torch.maximum((target - values) ** 2, (target - clipped) ** 2) / 2
        losses.append(COEFFICIENT * value_loss - torch.tensor(advantages, dtype=torch.float64) * log_probs)
    (torch.cat(losses).sum() / len(torch.cat(losses))).backward()
    metrics, ours = gradients_of(actor)
    assert 0 < metrics["actor/value_clip_ratio"] < 1
    for name, parameter in model.named_parameters():
        assert torch.allclose(ours[name].double(), parameter.grad, rtol=1e-4, atol=1e-6), name


def test_values_are_of_what_came_before_the_token(make_ppo, records):
    actor = make_ppo()
    prepared = prepare(actor, records)
    mask = prepared.batch.loss_mask
    for row, (prompt, answer, _) in zip(mask.any(1).nonzero()[:, 0].tolist(), valid_rows(records), strict=True):
        with torch.no_grad():
            _, values = forward(actor.manager.model, prompt, answer)
        torch.testing.assert_close(prepared.values[row][mask[row]], values, atol=1e-5, rtol=1e-5)
    assert not prepared.values[~mask & ~prepared.collated.loss_mask].any()


@KINDS
def test_the_size_of_micro_batches_changes_neither_loss_nor_gradient(make_ppo, records, separate):
    seen = []
    for tokens in (32, 4096):
        actor = make_ppo(separate, critic={"valueClip": CLIP}, actor__microBatchTokens=tokens)
        seen.append(gradients(actor, records))
    (cut, cut_gradients), (whole, whole_gradients) = seen
    for name in ("loss", "value_loss", "values", "returns", "explained_variance"):
        assert cut[f"actor/{name}"] == pytest.approx(whole[f"actor/{name}"], rel=1e-5), name
    for name, gradient in whole_gradients.items():
        assert torch.allclose(gradient, cut_gradients[name], atol=1e-6), name


def test_a_kl_in_the_rewards_is_taken_off_at_every_token(make_ppo, records):
    actor = make_ppo(algorithm__rewardKlCoefficient=0.3, algorithm__recomputeLogProbs=True, critic={"lam": LAM})
    train(actor, records)  # away from the reference
    prepared = prepare(actor, records)
    mask = prepared.batch.loss_mask
    kl = (prepared.old_log_probs - prepared.ref_log_probs).double()
    assert kl[mask].abs().max() > 1e-4
    assert float(prepared.metrics["kl"].total) == pytest.approx(float(kl[mask].sum()), rel=1e-4)
    for row, (*_, reward) in zip(mask.any(1).nonzero()[:, 0].tolist(), valid_rows(records), strict=True):
        rewards = -0.3 * kl[row][mask[row]]
        rewards[-1] += reward
        expected, _ = by_loop(rewards.tolist(), prepared.values[row][mask[row]].tolist(), gamma=1.0)
        torch.testing.assert_close(prepared.advantages[row][mask[row]], torch.tensor(expected), atol=1e-5, rtol=1e-5)


@KINDS
def test_tokens_and_values_of_a_micro_batch_are_scored_in_one_pass_of_each_decoder(make_ppo, records, separate):
    actor, passes = make_ppo(separate, algorithm__recomputeLogProbs=True, actor__microBatchTokens=4096), []
    for decoder in {actor.manager.model.model, decoder_and_head(actor.manager.model)[0]}:
        decoder.register_forward_hook(lambda module, *_: passes.append(module))
    actor.load_batch(records)
    actor.compute_log_probs()
    assert len(passes) == len(set(passes)) == 1 + separate


def test_explained_variance_is_that_of_the_values_before_the_update(make_ppo, records):
    actor = make_ppo()
    prepared = prepare(actor, records)
    mask = prepared.batch.loss_mask
    returns, values = prepared.returns[mask].double(), prepared.values[mask].double()
    expected = 1 - float((returns - values).var() / returns.var())
    assert actor.run_training(1)["actor/explained_variance"] == pytest.approx(expected, rel=1e-5)


@KINDS
def test_in_warm_up_the_critic_alone_trains_and_then_everything_with_a_fresh_optimizer(make_ppo, records, separate):
    actor = make_ppo(
        separate,
        actor__criticWarmupSteps=2,
        actor__optimizer={"learningRate": 1e-3, "valueLearningRate": 1e-2, "schedule": {"warmupSteps": 2}},
    )
    policy, critic = parts_of(actor, False), parts_of(actor, True)
    rates = [train(actor, records, step)["actor/lr"] for step in (1, 2)]
    assert rates == [0.0, 0.0] and equal(parts_of(actor, False), policy)
    trained = parts_of(actor, True)
    assert all(not torch.equal(trained[name], critic[name]) for name in critic)
    assert train(actor, records, 3)["actor/lr"] == pytest.approx(0.5e-3), "the schedule begins after the warm-up"
    assert all(not torch.equal(after, policy[name]) for name, after in parts_of(actor, False).items())
    assert {float(state["step"]) for state in actor.manager.optimizer.state.values()} == {1.0}
    assert len(actor.manager.optimizer.state) == len(list(actor.manager.model.parameters()))


def test_another_rate_of_the_run_outlives_the_warm_up_of_the_critic(make_ppo, records):
    actor = make_ppo(actor__criticWarmupSteps=1, actor__optimizer={"learningRate": 1e-3})
    actor.set_schedule(2e-3, 10)
    train(actor, records, 1)
    assert train(actor, records, 2)["actor/lr"] == pytest.approx(2e-3)
    assert {group["lr"] for group in actor.manager.optimizer.param_groups} == {2e-3}


def test_the_critic_has_a_learning_rate_of_its_own_also_when_the_run_gets_another_one(make_ppo):
    plain, own = make_ppo(), make_ppo(actor__optimizer={"learningRate": 1e-3, "valueLearningRate": 1e-2})

    def peaks(actor):
        return {group["lr"] for group in actor.manager.optimizer.param_groups if group["critic"]}

    assert peaks(plain) == {1e-3} and peaks(own) == {1e-2}
    plain.set_schedule(2e-3, 10)
    own.set_schedule(2e-3, 10)
    assert peaks(plain) == {2e-3} and peaks(own) == {1e-2}
    assert {group["lr"] for group in own.manager.optimizer.param_groups if not group["critic"]} == {2e-3}


def test_a_critic_of_its_own_changes_nothing_of_the_policys_step(make_ppo, records):
    """Not even by the gradient's norm: each is clipped by its own."""
    after = []
    for coefficient in (1.0, 100.0):
        actor = make_ppo(True, critic={"coefficient": coefficient}, actor__gradClip=1e-3)
        train(actor, records)
        after.append(parts_of(actor, False))
    assert equal(*after)


@pytest.mark.parametrize(
    ("separate", "saved_at"), [(False, 1), (True, 1), (False, 3)], ids=["warm-up", "separate-warm-up", "after-it"]
)
def test_a_resumed_critic_goes_on_bit_for_bit(make_ppo, records, tmp_path, separate, saved_at):
    settings = {"actor__criticWarmupSteps": 2, "critic": {"valueClip": CLIP}}
    actor, expected = make_ppo(separate, **settings), []
    for step in range(1, 6):
        metrics = train(actor, records, step)
        if step == saved_at:
            actor.save_checkpoint(str(tmp_path), step)
        elif step > saved_at:
            expected.append(metrics)
    resumed = make_ppo(separate, **settings)
    resumed.load_checkpoint(str(tmp_path))
    seen = [train(resumed, records, step) for step in range(saved_at + 1, 6)]
    assert list(map(sums, seen)) == list(map(sums, expected))
    assert all(equal(parts_of(resumed, critic), parts_of(actor, critic)) for critic in (False, True))


def test_a_manager_past_its_warm_up_goes_back_into_it_with_an_older_checkpoint(make_ppo, records, tmp_path):
    actor = make_ppo(actor__criticWarmupSteps=2)
    train(actor, records, 1)
    actor.save_checkpoint(str(tmp_path), 1)
    for step in (2, 3):
        train(actor, records, step)
    actor.load_checkpoint(str(tmp_path))
    before = parts_of(actor, False)
    assert train(actor, records, 2)["actor/lr"] == 0.0 and equal(parts_of(actor, False), before)


@KINDS
def test_the_critic_is_neither_exported_nor_published(make_ppo, make_actor, records, tmp_path, separate):
    actor = make_ppo(separate)
    plain = make_actor()
    assert actor.manager.sync_names == plain.manager.sync_names
    assert (
        actor.manager.get_model_state_dict(True, True).keys() == plain.manager.get_model_state_dict(True, True).keys()
    )
    actor.export_hf(str(tmp_path / "model"))
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert exported.keys() == plain.manager.named_slices().keys() < actor.manager.named_slices().keys()


@KINDS
def test_offloading_between_steps_changes_no_bit(make_ppo, records, separate):
    actors = [make_ppo(separate, actor__criticWarmupSteps=1) for _ in range(2)]
    for step in (1, 2, 3):
        for actor in actors:
            train(actor, records, step)
        actors[1].manager.offload_param_and_grad(True)
        actors[1].manager.offload_optimizer()
        actors[1].manager.load_param_and_grad(0, True)
        actors[1].manager.load_optimizer(0)
    assert all(equal(*(parts_of(actor, critic) for actor in actors)) for critic in (False, True))


def test_a_critic_learns_what_the_groups_are_worth(make_ppo, records):
    actor = make_ppo(True, actor__criticWarmupSteps=39, algorithm__steps=40, actor__optimizer={"learningRate": 1e-2})
    seen = [train(actor, records, step) for step in range(1, 31)]
    assert seen[-1]["actor/value_loss"] < 0.3 * seen[0]["actor/value_loss"]
    assert seen[-1]["actor/explained_variance"] > 0.5 > seen[0]["actor/explained_variance"]


def test_a_reference_policy_swaps_whole_storages_whatever_views_of_them_it_is_given():
    """Wrappers that lay parameters end to end give a view of one storage for each."""
    flat = torch.arange(6.0)
    reference = ReferencePolicy([flat[:2], flat[2:]], torch.float32)
    flat += 10
    with reference.swapped():
        assert flat.tolist() == [0, 1, 2, 3, 4, 5]
    assert flat.tolist() == [10, 11, 12, 13, 14, 15]


def test_the_reference_policy_does_not_hold_the_critic(make_ppo, make_actor):
    kl = {"algorithm__loss": {"klCoefficient": 0.1}}
    held = [
        sum(part.numel() for part in actor.manager._reference._held)
        for actor in (make_actor(**kl), make_ppo(True, **kl))
    ]
    assert held[0] == held[1]
