"""A reference policy that is renewed every N steps: it is the policy of that step exactly, in a resumed run too."""

import asyncio

import pytest
import torch

from rl_core.actors.guards import unsupported_settings
from tests.unit.actors.actor_steps import train

EVERY_TWO = {"algorithm__loss": {"klCoefficient": 0.1}, "algorithm__referenceUpdateSteps": 2}


def weights(actor):
    return {name: parameter.detach().clone() for name, parameter in actor.manager.model.named_parameters()}


def scores(actor, records):
    """Return the log-probabilities of policy and reference of `records`."""
    actor.load_batch(records)
    batch = actor.engine.prepared.collated
    return actor.compute_log_probs(batch), actor.compute_ref_log_probs(batch)


@pytest.mark.parametrize("backend", ["fsdp1", "fsdp2"])
def test_the_reference_is_the_policy_of_the_last_step_that_renewed_it(make_actor, records, backend):
    actor = make_actor(actor__backend=backend, **EVERY_TWO)
    policies = [scores(actor, records)[0]]
    for step, renewed in ((1, 0), (2, 2), (3, 2), (4, 4), (5, 4)):
        train(actor, records, step)
        policy, reference = scores(actor, records)
        policies.append(policy)
        assert torch.equal(reference, policies[renewed])
        assert torch.equal(reference, policy) is (renewed == step)


def test_without_the_setting_the_reference_stays_the_initial_model(make_actor, records):
    actor = make_actor(algorithm__loss={"klCoefficient": 0.1})
    initial, _ = scores(actor, records)
    for step in (1, 2, 3):
        train(actor, records, step)
    assert torch.equal(scores(actor, records)[1], initial)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("saved_after", [1, 3])
def test_a_resumed_run_equals_the_uninterrupted_one(make_actor, records, tmp_path, saved_after, in_background):
    whole = make_actor(**EVERY_TWO)
    for step in range(1, 6):
        train(whole, records, step)
        if step == saved_after:
            written = whole.save_checkpoint(str(tmp_path), step, in_background)
    if in_background:
        asyncio.run(finished(written))
    # The initial model is not saved a second time.
    assert (tmp_path / "reference").exists() == (saved_after == 3)
    resumed = make_actor(**EVERY_TWO)
    resumed.load_checkpoint(str(tmp_path))
    for step in range(saved_after + 1, 6):
        train(resumed, records, step)
    for name, value in weights(whole).items():
        assert torch.equal(weights(resumed)[name], value), name
    assert torch.equal(scores(resumed, records)[1], scores(whole, records)[1])


async def finished(written):
    await written


def test_a_checkpoint_resumed_without_the_setting_keeps_its_reference(make_actor, records, tmp_path):
    renewing, constant = make_actor(**EVERY_TWO), make_actor(algorithm__loss={"klCoefficient": 0.1})
    for step in (1, 2):
        train(renewing, records, step)
    renewing.save_checkpoint(str(tmp_path / "first"), 2)
    constant.load_checkpoint(str(tmp_path / "first"))
    train(constant, records, 3)
    assert torch.equal(scores(constant, records)[1], scores(renewing, records)[1])
    constant.save_checkpoint(str(tmp_path / "second"), 3)
    assert (tmp_path / "second/reference").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm__loss": {}}, ["loss.klCoefficient", "got 2 without"]),
        ({"model__lora": {"rank": 2}}, ["must be null with model.lora", "got 2"]),
    ],
)
def test_a_reference_that_cannot_be_renewed_is_refused(make_spec, changes, words):
    (line,) = unsupported_settings(make_spec(**EVERY_TWO | changes), {})
    assert line.startswith("algorithm.referenceUpdateSteps") and all(word in line for word in words)
