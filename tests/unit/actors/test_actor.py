"""The step of one rank: how it is cut changes nothing, what it is asked for is honoured, what comes too late is refused."""

import asyncio
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_core.actors.fsdp.actor import FSDPActor
from rl_core.api.errors import ConfigError, DataError, DeadlineExceeded
from rl_core.api.records import Completion
from rl_core.channel import Channel
from rl_core.messages.groups import rank_key
from tests import actor_samples
from tests.unit.actors.actor_steps import gradients, sums, train


def checksum(tensors):
    """Return a sum over the bits of the tensors."""
    return float(sum(tensor.detach().view(-1).view(torch.uint8).double().sum() for tensor in tensors))


def assert_same_step(ours, theirs, *, loss=1e-6, grad=1e-6):
    for name, value in sums(ours[0]).items():
        assert theirs[0][name] == pytest.approx(value, rel=1e-5, abs=loss), name
    for name, gradient in ours[1].items():
        assert torch.allclose(gradient, theirs[1][name], atol=grad), name


@pytest.mark.parametrize("micro_batch_tokens", [32, 50, 100])
@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_the_size_of_micro_batches_changes_neither_loss_nor_gradient(
    make_actor, records, micro_batch_tokens, aggregation
):
    loss = {"aggregation": aggregation, "klCoefficient": 0.1, "entropyCoefficient": 0.05}
    whole = gradients(make_actor(actor__microBatchTokens=4096, algorithm__loss=loss), records)
    cut = gradients(make_actor(actor__microBatchTokens=micro_batch_tokens, algorithm__loss=loss), records)
    assert whole[0]["actor/loss"] != 0
    assert_same_step(whole, cut)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["whole", "lora"])
def test_gradient_checkpointing_changes_nothing(make_actor, records, mode, lora):
    options = {"actor__gradientCheckpointing": True, "actor__gradientCheckpointingMode": mode}
    plain, recomputed = make_actor(model__lora=lora), make_actor(model__lora=lora, **options)
    assert_same_step(gradients(plain, records), gradients(recomputed, records))


@pytest.mark.parametrize("backend", ["fsdp1", "fsdp2"])
def test_eager_attention_is_that_of_the_fused_kernels(make_actor, records, backend):
    made = (make_actor(actor__attention=attention, actor__backend=backend) for attention in ("sdpa", "eager"))
    runs = []
    for actor in made:
        with Operations() as seen:
            runs.append(gradients(actor, records))
        runs[-1] += (seen.attention,)
    assert_same_step(*runs)
    assert runs[0][2] > 0 == runs[1][2]


class Operations(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self):
        super().__init__()
        self.attention = self.products = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.attention += op is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        self.products += str(op) in ("aten.mm.default", "aten.addmm.default", "mkldnn._linear_pointwise.default")
        return op(*args, **(kwargs or {}))


def test_selective_checkpointing_computes_attention_and_every_second_product_once(make_actor, records):
    def run(**options):
        actor = make_actor(actor__microBatchTokens=4096, **options)
        with Operations() as seen:
            gradients(actor, records)
        return seen

    full = {"actor__gradientCheckpointing": True}
    plain, whole, selective = run(), run(**full), run(**full, actor__gradientCheckpointingMode="selective")
    assert whole.attention == 2 * plain.attention and selective.attention == plain.attention
    # Of the seven products of each of the two layers, the three that are not kept are computed a second time. Without keeping any, the last
    # one is computed a second time only by kernels whose backward pass asks for it, which depends on the processor.
    assert selective.products - plain.products == 6 and whole.products - plain.products in (12, 14)


def test_the_order_of_arrival_changes_no_bit(make_actor, records):
    one, two = make_actor(), make_actor()
    first, second = train(one, records), train(two, records[::-1])
    assert sums(first) == sums(second)
    for left, right in zip(one.manager.model.parameters(), two.manager.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_the_gradient_is_that_of_the_loss_written_out(make_actor, records):
    """ppo_clip at ratio 1 with grpo advantages, token-mean: -mean(A log p), on padded rows of a plain forward."""
    actor = make_actor(algorithm__recomputeLogProbs=True)
    _, ours = gradients(actor, records)
    rows, rewards = [], []
    for record in records:
        scores = torch.tensor([c.reward for c in record.completions], dtype=torch.float64)
        valid = scores[~scores.isnan()]
        for score, completion in zip(scores, record.completions, strict=True):
            if not score.isnan():
                advantage = (score - valid.mean()) / (valid.std() + 1e-6) if valid.max() > valid.min() else 0.0
                rows.append([m["token_ids"] for m in completion.message_log])
                rewards.append(float(advantage))
    tokens = sum(len(answer) for _, answer in rows)
    actor.manager.optimizer.zero_grad()
    for (prompt, answer), advantage in zip(rows, rewards, strict=True):
        ids = torch.cat((prompt, answer))[None]
        log_probs = actor.manager.model(ids).logits[0].log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, answer[:, None])
        (-advantage * log_probs.sum() / tokens).backward()
    for name, parameter in actor.manager.model.named_parameters():
        assert torch.allclose(ours[name], parameter.grad, atol=1e-6), name


def test_training_raises_the_probability_of_what_was_rewarded(make_actor, records):
    actor = make_actor(actor__optimizer={"learningRate": 1e-2}, algorithm__recomputeLogProbs=True)

    def preference():
        actor.load_batch(records)
        actor.compute_log_probs()
        actor.compute_advantages_and_returns()
        prepared = actor.engine.prepared
        return float((prepared.old_log_probs * prepared.advantages)[prepared.batch.loss_mask].sum())

    before = preference()
    for step in range(1, 4):
        train(actor, records, step)
    assert preference() > before + 1


def test_the_entropy_is_told_without_a_coefficient_and_has_no_part_in_the_loss(make_actor, records):
    plain, weighed = (train(make_actor(algorithm__loss={"entropyCoefficient": c}), records) for c in (0.0, 0.5))
    assert plain["actor/entropy"] == pytest.approx(weighed["actor/entropy"], abs=1e-6) and plain["actor/entropy"] > 0
    assert plain["actor/loss"] == pytest.approx(plain["actor/policy_loss"], abs=1e-7)
    assert weighed["actor/grad_norm"] != pytest.approx(plain["actor/grad_norm"], rel=1e-4)


def test_metrics_are_complete_and_finite(make_actor, records):
    metrics = train(make_actor(algorithm__loss={"klCoefficient": 0.1, "entropyCoefficient": 0.01}), records)
    wanted = ("loss", "policy_loss", "kl", "entropy", "clip_fraction", "ratio_mean", "grad_norm", "lr")
    wanted += ("update_success", "skipped_updates", "empty_steps", "early_stopped")
    assert {f"actor/{name}" for name in wanted} | {
        "perf/tokens_per_second",
        "perf/padding_waste",
        "perf/dp_imbalance",
    } <= metrics.keys()
    assert all(math.isfinite(value) for value in metrics.values())


def test_tokens_run_for_no_row_are_told_as_waste(make_actor, records, monkeypatch):
    actor = make_actor()
    assert train(actor, records)["perf/padding_waste"] == 0.0
    tokens = sum(len(m["token_ids"]) for r in records for c in r.completions for m in c.message_log)
    monkeypatch.setattr(actor.engine, "_cut", lambda lengths: [list(range(len(lengths))), []])
    assert train(actor, records)["perf/padding_waste"] == pytest.approx(1 / (tokens + 1))


def test_the_reference_policy_is_the_starting_one_and_swapping_it_in_leaves_the_trained_bits(
    make_actor, records, tmp_path
):
    changes = {"algorithm__loss": {"klCoefficient": 0.1}, "actor__optimizer": {"learningRate": 1e-2}}
    actor = make_actor(**changes)
    actor.load_batch(records)
    batch = actor.engine.prepared.batch
    start = actor.compute_log_probs(batch)
    train(actor, records)
    parameters = list(actor.manager.model.parameters())
    before, kept = checksum(parameters), [p.clone() for p in parameters]
    assert torch.equal(actor.compute_ref_log_probs(batch), start)
    assert checksum(parameters) == before and all(torch.equal(a, b) for a, b in zip(kept, parameters, strict=True))
    assert not torch.equal(actor.compute_log_probs(batch), start)
    actor.save_checkpoint(str(tmp_path), 1)
    resumed = make_actor(**changes)
    resumed.load_checkpoint(str(tmp_path))
    assert torch.equal(resumed.compute_ref_log_probs(batch), start)


def test_the_reference_is_swapped_back_when_the_pass_fails(make_actor, records):
    actor = make_actor(algorithm__loss={"klCoefficient": 0.1})
    train(actor, records)
    parameters = list(actor.manager.model.parameters())
    before = checksum(parameters)
    with pytest.raises(ZeroDivisionError), actor.manager.reference():
        raise ZeroDivisionError
    assert checksum(parameters) == before


def test_no_reference_is_kept_without_a_kl_term(make_actor, records):
    actor = make_actor()
    actor.load_batch(records)
    with pytest.raises(RuntimeError, match="klCoefficient"):
        actor.compute_ref_log_probs(actor.engine.prepared.batch)


def test_functions_of_the_user_train_as_the_built_in_ones_they_call(make_actor, records, tmp_path, monkeypatch):
    """The loss gets the clip it has a parameter for, and nothing else."""
    (tmp_path / "own_code.py").write_text(
        "from rl_core.algorithms import compute_advantages, compute_policy_loss\n"
        "def advantage(inputs):\n    return compute_advantages('rloo', inputs)\n"
        "def loss(inputs, *, clip_high):\n    return compute_policy_loss('ppo_clip', inputs, clip_low=0.1, clip_high=clip_high)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    bounds = {"clipLow": 0.1, "clipHigh": 0.3}
    changes = {"algorithm__optimizerStepsPerBatch": 2, "actor__optimizer": {"learningRate": 1e-2}}
    built_in = train(make_actor(**changes, algorithm__name="rloo", algorithm__loss=bounds), records)
    loss = bounds | {"name": "own_code:loss", "clipLow": 0.9}
    own = train(make_actor(**changes, algorithm__name="own_code:advantage", algorithm__loss=loss), records)
    by_the_clip = "mismatch/share_clipped"  # which the job writes in another way
    assert sums(own) == sums(built_in) | {by_the_clip: own[by_the_clip]}


def test_the_kl_in_the_rewards_is_taken_off_token_by_token_before_the_one_whitening(make_actor, records):
    actor = make_actor(
        algorithm__name="reinforce_plus_plus",
        algorithm__rewardKlCoefficient=0.5,
        algorithm__recomputeLogProbs=True,
        actor__optimizer={"learningRate": 1e-2},
    )
    train(actor, records)  # else policy and reference are the same
    actor.load_batch(records)
    actor.compute_log_probs()
    actor.compute_advantages_and_returns()
    prepared = actor.engine.prepared
    mask, difference = prepared.batch.loss_mask, (prepared.old_log_probs - prepared.ref_log_probs).double()
    assert difference[mask].abs().max() > 1e-3
    expected = torch.zeros(mask.shape, dtype=torch.float64)
    for row, reward in enumerate(prepared.batch.rewards.tolist()):
        for token in mask[row].nonzero().flatten().tolist():
            later = mask[row, token:]
            expected[row, token] = reward - 0.5 * difference[row, token:][later].sum()
    values = expected[mask]
    expected[mask] = (values - values.mean()) / values.std(correction=0)
    torch.testing.assert_close(prepared.advantages.double(), expected, atol=1e-4, rtol=1e-4)
    assert float(prepared.metrics["kl"]) == pytest.approx(difference[mask].mean().item(), abs=1e-6)


def test_several_optimizer_steps_use_the_same_old_log_probabilities(make_actor, records):
    metrics = train(
        make_actor(algorithm__optimizerStepsPerBatch=2, algorithm__updateEpochs=2, algorithm__recomputeLogProbs=True),
        records,
    )
    assert metrics["actor/ratio_max"] > 1.0001 > 0.9999 > metrics["actor/ratio_min"]


def test_a_ratio_above_its_bound_ends_the_step(make_actor, records):
    shape = {"algorithm__optimizerStepsPerBatch": 4, "algorithm__updateEpochs": 2}
    actor = make_actor(**shape, algorithm__maxPolicyKl=1e-12)
    metrics = train(actor, records)
    assert metrics["actor/early_stopped"] == 1 and actor.manager.counts.attempted < 8
    actor = make_actor(**shape, algorithm__maxPolicyRatio=1e6)
    assert train(actor, records)["actor/early_stopped"] == 0 and actor.manager.counts.attempted == 8


def test_a_step_without_trainable_tokens_changes_nothing_and_is_counted(make_actor, records):
    for record in records:
        for completion in record.completions:
            completion.reward, completion.finish_reason = math.nan, "error"
    actor = make_actor()
    before = checksum(list(actor.manager.model.parameters()))
    metrics = train(actor, records)
    assert (metrics["actor/empty_steps"], actor.manager.counts.empty, actor.manager.counts.attempted) == (1, 1, 0)
    assert checksum(list(actor.manager.model.parameters())) == before
    assert actor.global_step == 1


def test_a_failed_row_trains_as_if_it_were_absent(make_actor):
    whole = [actor_samples.make_record(group) for group in (3, 10)]
    assert any(math.isnan(c.reward) for record in whole for c in record.completions)
    ours = gradients(make_actor(), whole)
    for record in whole:
        record.completions = [c for c in record.completions if not math.isnan(c.reward)]
    theirs = gradients(make_actor(), whole)
    for name, gradient in ours[1].items():
        assert torch.allclose(gradient, theirs[1][name], atol=1e-7), name


def test_overlong_and_scaled_rewards_reach_the_advantages(make_actor, records):
    records[0].completions[0].truncated = True
    actor = make_actor(algorithm__overlong={"filter": True}, algorithm__rewardScale={"sourceMin": 0, "sourceMax": 2})
    actor.load_batch(records)
    actor.compute_advantages_and_returns()
    batch = actor.engine.prepared.batch
    assert not batch.loss_mask[0].any() and not batch.valid[0]
    assert batch.rewards[batch.valid].max() == 1.0 and batch.raw_rewards[batch.valid].max() == 2.0


def test_advantage_metrics_are_of_what_trains_and_a_second_call_changes_nothing(make_actor, records):
    actor = make_actor(
        algorithm__advantageClip=0.5,
        algorithm__whiten=True,
        algorithm__rewardScale={"sourceMin": 0, "sourceMax": 1, "targetMin": 0.5, "targetMax": 3},
    )
    actor.load_batch(records)
    metrics = actor.compute_advantages_and_returns()
    advantages = actor.engine.prepared.advantages
    trained = advantages[actor.engine.prepared.batch.loss_mask]
    found = [metrics[f"advantages/{kind}"] for kind in ("mean", "max", "min")]
    assert found == pytest.approx([trained.mean().item(), trained.max().item(), trained.min().item()], abs=1e-6)
    assert actor.compute_advantages_and_returns() == metrics
    assert torch.equal(actor.engine.prepared.advantages, advantages)


def test_a_second_call_penalises_the_rows_that_the_first_one_masked(make_actor, records):
    for record in records:
        record.completions[0].truncated = True
    actor = make_actor(
        algorithm__overlong={"buffer": 4, "filter": True, "keepInBaseline": True},
        rollout__sampling={"maxNewTokens": 6},
    )
    actor.load_batch(records)
    actor.compute_advantages_and_returns()
    rewards, advantages = actor.engine.prepared.batch.rewards, actor.engine.prepared.advantages
    assert (rewards < actor.engine.prepared.batch.raw_rewards).any()
    actor.compute_advantages_and_returns()
    torch.testing.assert_close(actor.engine.prepared.batch.rewards, rewards, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(actor.engine.prepared.advantages, advantages)


def test_the_rows_of_a_group_that_differ_most_train_and_are_what_it_is_compared_with(make_actor, records):
    for record in records:
        for completion, reward in zip(record.completions, (0.0, 3.0, 1.0, 1.5), strict=True):
            completion.reward = reward
    actor = make_actor(algorithm__keepPerGroup=2)
    actor.load_batch(records)
    actor.compute_advantages_and_returns()
    prepared = actor.engine.prepared
    trains = prepared.batch.loss_mask.any(dim=1)
    lone = torch.tensor([record.completions[0].finish_reason == "error" for record in records])
    for group in prepared.batch.group_ids.unique().tolist():
        rows = prepared.batch.group_ids == group
        expected = [False, True, True, False] if lone[group] else [True, True, False, False]
        assert trains[rows].tolist() == expected
    first = prepared.advantages[prepared.batch.group_ids == prepared.batch.group_ids[0]]
    signs = [row[row != 0].unique().tolist() for row in first]
    half = 0.5**0.5
    assert signs[0] == pytest.approx([-half], abs=1e-5) and signs[1] == pytest.approx([half], abs=1e-5)
    assert actor.run_training()["actor/grad_norm"] > 0


def test_mismatched_rows_are_dropped_and_others_weighed(make_actor, records):
    actor = make_actor(
        algorithm__recomputeLogProbs=True,
        algorithm__importance={"mode": "tis", "high": 1.5},
        algorithm__sequenceErrorThreshold=1e6,
    )
    metrics = train(actor, records)
    assert 0 < metrics["actor/is_weight"] <= 1.5
    strict = make_actor(algorithm__recomputeLogProbs=True, algorithm__sequenceErrorThreshold=1.0001)
    assert train(strict, records)["actor/empty_steps"] == 1


def test_verbs_out_of_order_say_what_is_missing(make_actor, records):
    actor = make_actor()
    with pytest.raises(RuntimeError, match="run_training needs the step's groups"):
        actor.run_training(1)
    train(actor, records)
    with pytest.raises(RuntimeError, match="needs the step's groups"):
        actor.run_training(2)


def test_training_computes_advantages_that_nobody_asked_for(make_actor, records):
    asked, alone = make_actor(), make_actor()
    expected = train(asked, records)
    alone.load_batch(records)
    metrics = alone.run_training(1)
    same = [name for name in expected if not name.startswith(("perf/", "time/"))]
    assert "actor/loss" in same and [metrics[name] for name in same] == [expected[name] for name in same]


def test_a_row_over_the_limit_is_named(make_actor):
    record = actor_samples.make_record(0)
    long = dict(record.completions[1].message_log[-1])
    long["token_ids"], long["generation_logprobs"] = torch.zeros(40, dtype=torch.int64), torch.zeros(40)
    record.completions[1] = Completion(message_log=[*record.prompt, long], reward=1.0)
    with pytest.raises(DataError, match="0-0_g1"):
        make_actor().load_batch([record])


def test_a_row_over_the_micro_batch_is_named_with_the_setting_to_raise(make_spec):
    spec = make_spec(rollout__maxSequenceLength=None, actor__microBatchTokens=8)
    actor = FSDPActor(spec)
    actor.init_worker()
    with pytest.raises(DataError, match=r"actor\.microBatchTokens must hold the longest row, got 8 and \d+ .* 0-1_g"):
        actor.load_batch([actor_samples.make_record(1)])


def test_a_fixed_sequence_is_scored_at_the_sampling_temperature(make_actor):
    actor = make_actor(rollout__sampling={"temperature": 0.5, "maxNewTokens": 12})
    ids = [1, 2, 3, 4, 5, 6]
    logits = actor.manager.model(torch.tensor([ids])).logits[0] / 0.5
    expected = logits.log_softmax(-1)[2:-1].gather(-1, torch.tensor(ids[3:])[:, None])[:, 0].tolist()
    assert actor.score(ids, 3) == pytest.approx(expected, abs=1e-5)


def test_only_the_role_actor_is_known(make_spec):
    with pytest.raises(ConfigError, match="critic"):
        FSDPActor(make_spec(), role="critic")


@pytest.fixture
def actor(make_spec):
    made = FSDPActor(make_spec())
    made.init_worker()
    return made


@pytest.fixture
def channel():
    return Channel.create("trajectories", local=True)


KEY = rank_key(5, 0)


async def put(channel, *records, key=KEY):
    for record in records:
        await channel.put_async(record, key=key)


async def test_a_rank_holds_the_groups_that_the_runner_moved_to_its_key_of_the_step(actor, channel):
    records = [actor_samples.make_record(group) for group in range(4)]
    records[0].rollout_metrics = {"turns/mean": 2.0, "turns/max": 3, "name": "x", "turns/histogram": [1]}
    records[2].rollout_metrics = {"turns/mean": 4.0, "turns/max": 2, "total_turns": 3}
    records[3].rollout_metrics = {"total_turns": 2, "total_reward/mean": 0.0, "total_reward/histogram": []}
    await put(channel, records[1], key=rank_key(4, 0))
    await put(channel, records[3], records[0], records[2])
    metrics = await actor.recv_batch(channel, 3, 5)
    assert sorted(actor.engine.prepared.batch.group_texts) == ["0-0", "0-2", "0-3"]
    assert metrics == {"rollout/turns/mean": 3.0, "rollout/turns/max": 3.0, "rollout/total_turns": 5.0}


async def test_outside_a_job_groups_come_under_the_default_key(actor, channel):
    for group in range(3):
        await channel.put_async(actor_samples.make_record(group))
    await actor.recv_batch(channel, 2)
    assert actor.engine.prepared.batch.group_texts == ["0-0", "0-1"]


async def test_a_step_that_is_cut_leaves_what_is_held(actor, channel):
    await put(channel, actor_samples.make_record(0))
    channel.close_key(KEY).result()
    await actor.recv_batch(channel, 3, 5)
    assert actor.engine.prepared.batch.group_texts == ["0-0"]


async def test_a_rank_left_without_groups_still_trains_along(actor, channel):
    channel.close_key(KEY).result()
    await actor.recv_batch(channel, 3, 5)
    metrics = await asyncio.to_thread(lambda: (actor.compute_advantages_and_returns(), actor.run_training(5))[1])
    assert metrics["actor/empty_steps"] == 1


async def test_missing_groups_are_counted_in_the_error(actor, channel):
    await put(channel, actor_samples.make_record(0))
    with pytest.raises(DeadlineExceeded, match=r"must get 3 groups within deadlines\.rollout .* got 1"):
        await actor.recv_batch(channel, 3, 5, 0.05)
