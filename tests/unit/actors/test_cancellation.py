"""A step that is given up leaves no trace: done again it comes out, to the bit, like one that was never disturbed."""

import asyncio

import pytest
import torch

from tests.unit.actors.actor_steps import train

SMALL = {"actor__microBatchTokens": 32}
"""Several micro-batches per mini-batch."""


def cancel_before(actor, micro_batch):
    """Have the step cancelled while micro-batch number `micro_batch`, counted over the step, runs."""
    began = []
    plain = actor.manager.before_micro_batch

    def before(model, is_last):
        began.append(is_last)
        if len(began) == micro_batch + 1:
            asyncio.run(actor.cancel_training())
        return plain(model, is_last)

    actor.manager.before_micro_batch = before
    return began


def weights(actor):
    return [parameter.detach().clone() for parameter in actor.manager.model.parameters()]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture
def num_micro_batches(make_actor, records):
    actor = make_actor(**SMALL)
    began = cancel_before(actor, -1)
    train(actor, records)
    assert len(began) >= 4
    return len(began)


@pytest.mark.parametrize("at", [0, 2], ids=["first", "third"])
def test_a_cancelled_step_changes_nothing_and_done_again_is_as_if_it_had_not_been_there(make_actor, records, at):
    calm, actor = make_actor(**SMALL), make_actor(**SMALL)
    before, random = weights(actor), torch.get_rng_state()
    began = cancel_before(actor, at)
    assert train(actor, records) is None
    assert len(began) == at + 2, "one more, empty, takes out what a wrapper holds back"
    assert same(weights(actor), before) and all(p.grad is None for p in actor.manager.model.parameters())
    assert actor.manager.counts == make_actor(**SMALL).manager.counts and actor.global_step == 0
    assert torch.equal(torch.get_rng_state(), random)
    del actor.manager.before_micro_batch
    ours, theirs = train(actor, records), train(calm, records)
    assert ours["actor/loss"] == theirs["actor/loss"] and ours["actor/grad_norm"] == theirs["actor/grad_norm"]
    assert same(weights(actor), weights(calm)) and actor.manager.counts == calm.manager.counts


def test_cancelled_in_its_last_micro_batch_a_step_is_finished(make_actor, records, num_micro_batches):
    actor = make_actor(**SMALL)
    cancel_before(actor, num_micro_batches - 1)
    assert train(actor, records)["actor/update_success"] == 1 and actor.global_step == 1


@pytest.mark.parametrize(
    "shape",
    [{"algorithm__optimizerStepsPerBatch": 2}, {"algorithm__updateEpochs": 2}],
    ids=["optimizer steps", "epochs"],
)
def test_once_an_optimizer_step_is_applied_the_batch_is_finished(make_actor, records, shape):
    calm, actor = make_actor(**SMALL, **shape), make_actor(**SMALL, **shape)
    plain = actor.manager.optimizer_step

    def optimizer_step():
        asyncio.run(actor.cancel_training())
        return plain()

    actor.manager.optimizer_step = optimizer_step
    assert train(actor, records) is not None and train(calm, records) is not None
    assert actor.manager.counts.applied == 2 and same(weights(actor), weights(calm))


def test_log_probabilities_are_left_too_and_the_groups_with_them(make_actor, records):
    actor = make_actor(**SMALL, algorithm__recomputeLogProbs=True, algorithm__loss={"klCoefficient": 0.1})
    before = weights(actor)
    actor.load_batch(records)
    asyncio.run(actor.cancel_training())
    assert actor.compute_log_probs() is None and actor.engine.prepared is None
    with pytest.raises(RuntimeError, match="needs the step's groups"):
        actor.run_training(1)
    assert same(weights(actor), before)
    assert train(actor, records) is not None


def test_what_is_requested_before_a_step_begins_does_not_concern_it(make_actor, records):
    actor = make_actor(**SMALL)
    asyncio.run(actor.cancel_training())
    assert train(actor, records) is not None


def test_reference_log_probabilities_are_left_with_the_trained_weights_in_place(make_actor, records):
    actor = make_actor(**SMALL, algorithm__loss={"klCoefficient": 0.1}, actor__optimizer={"learningRate": 1e-2})
    train(actor, records)
    before = weights(actor)
    actor.load_batch(records)
    asyncio.run(actor.cancel_training())
    assert actor.compute_log_probs() is None and same(weights(actor), before)
