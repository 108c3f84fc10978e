"""With `actor.offload` the trainer's device holds only what a phase needs, and every result is the same in every bit."""

import pytest
import torch

from tests.unit.actors.actor_steps import sums, train

EVERYTHING = {"params": True, "grads": True, "optimizer": True}


def resident(actor):
    """Return the bytes of (weights, moments, gradients) in the storages of what the model and its optimizer hold."""
    moments = [state[name] for state in actor.manager.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    gradients = [parameter.grad for parameter in actor.manager.model.parameters() if parameter.grad is not None]
    found = []
    for tensors in ([*actor.manager.model.parameters(), *actor.manager.model.buffers()], moments, gradients):
        local = [actor.manager.strategy.local(tensor).untyped_storage() for tensor in tensors]
        found.append(sum({storage._cdata: storage.nbytes() for storage in local}.values()))
    return found


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_with_everything_away_between_phases_have_the_bits_of_those_without(make_actor, records, kind, dtype):
    changes = {
        "actor__backend": kind,
        "model__dtype": dtype,
        "algorithm__loss": {"klCoefficient": 0.1},
        "algorithm__optimizerStepsPerBatch": 2,
    }
    plain, saving = make_actor(**changes), make_actor(actor__offload=EVERYTHING, **changes)
    assert resident(saving) == [0, 0, 0]
    for step in (1, 2):
        expected = sums(train(plain, records, step))
        saving.occupy(["gradients", "weights"])
        weights, moments, _ = resident(saving)
        assert weights > 0 and moments == 0, "moments come with the optimizer step"
        assert sums(train(saving, records, step)) == expected
        saving.occupy([])
        assert resident(saving) == [0, 0, 0]
    ours, theirs = (actor.score([1, 2, 3, 4], 2) for actor in (saving, plain))
    assert ours == theirs and resident(saving) == [0, 0, 0]
    with saving.manager.residency.loaded():
        state = saving.manager.get_model_state_dict(True, True)
    assert all(
        torch.equal(state[name], tensor) for name, tensor in plain.manager.get_model_state_dict(True, True).items()
    )


def test_occupying_says_what_moved_since_the_last_time_and_moves_nothing_twice(make_actor, records):
    actor = make_actor(actor__offload={"optimizer": True})
    weights, parameters = (
        resident(actor)[0],
        sum(4 * parameter.numel() for parameter in actor.manager.model.parameters()),
    )
    actor.occupy(["weights", "gradients"])
    train(actor, records, 1)
    moved = actor.occupy(["weights"])
    assert moved["onload/bytes"] == moved["offload/bytes"] == 2 * parameters and moved["offload/seconds"] > 0
    assert actor.occupy(["weights"]) == {}
    assert actor.occupy([])["offload/bytes"] == weights


def test_moments_are_there_for_the_optimizer_step_and_leave_when_it_fails(make_actor):
    actor = make_actor(actor__offload={"optimizer": True}, actor__maxConsecutiveSkips=0)
    for parameter in actor.manager.model.parameters():
        parameter.grad = torch.full_like(parameter, float("inf"))
    with pytest.raises(Exception, match="maxConsecutiveSkips"):
        actor.manager.optimizer_step()
    assert actor.manager.residency.optimizer_offloaded
