"""The methods of EmbodiedFSDPActor in one process: what they take, what they return, and what they refuse."""

import asyncio
import json
from dataclasses import replace

import pytest
import torch

from rl_core.actors.device import check_memory
from rl_core.actors.embodied import EmbodiedFSDPActor
from rl_core.api.errors import ConfigError, DataError, DeadlineExceeded
from rl_core.api.job import RLJobSpec
from rl_core.batching.trajectories import PER_DECISION, PER_OBSERVATION, TIME_FIRST, merge_trajectories
from rl_core.channel import Channel
from rl_core.messages.embodied import CollectionRequest
from rl_core.workers.context import WorkerContext, stand_alone_identity
from tests.trajectory_samples import SIMULATORS, STEPS, make_embodied_spec, make_policy, make_trajectory

ROUND = CollectionRequest(number=7, step=1, envs=(0,), rollouts=(0, 1))


def make(spec):
    return EmbodiedFSDPActor.create_in_context(WorkerContext(stand_alone_identity()), spec)


@pytest.fixture
def spec(tmp_path):
    return make_embodied_spec(make_policy(tmp_path / "policy"), backend="fsdp2")


@pytest.fixture
def actor(spec):
    made = make(spec)
    made.init_worker()
    yield made
    made.close()


def received(actor, trajectories, seconds=5.0, request=ROUND):
    async def main():
        channel = Channel.create("trajectories", local=True)
        for one in trajectories:
            await channel.put_async(one, key=request.trajectory_key(0))
        await actor.recv_rollout_trajectories(channel, request, seconds)

    asyncio.run(main())


def parts():
    first, second = make_trajectory([0, 1], 1), make_trajectory([2, 3], 1)
    return replace(first, sender=0), replace(second, sender=1)


def test_the_memory_of_a_policy_is_not_estimated(spec):
    """An actor with an accelerator would not start otherwise: the model's config.json has none of the sizes of a language model."""
    check_memory(RLJobSpec.model_validate({**spec, "actor": {**spec["actor"], "gpus": 1}}), 2**30)


def test_a_step_is_cancelled_by_a_request_that_comes_before_its_rows_are_ready(actor):
    """They are prepared when the step is trained, or in the background before."""
    weights = {name: tensor.clone() for name, tensor in actor.manager.model.state_dict().items()}
    actor.load_trajectories([make_trajectory([0, 1, 2, 3], 1)])
    asyncio.run(actor.cancel_training())
    assert actor.run_training(1) is None and actor.global_step == 0
    actor.load_trajectories([make_trajectory([0, 1, 2, 3], 1)])
    assert actor.run_training(1) is not None
    assert any(not torch.equal(tensor, weights[name]) for name, tensor in actor.manager.model.state_dict().items())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_trajectories_are_in_the_order_of_their_senders_whichever_comes_first(actor, order):
    both = parts()
    received(actor, [both[place] for place in order])
    got = actor.compute_advantages_and_returns()
    actor.load_trajectories([make_trajectory([0, 1, 2, 3], 1)])
    expected = actor.compute_advantages_and_returns()
    assert got.keys() == expected.keys() >= {"advantages", "returns", "explained_variance"}
    assert all(torch.equal(got[name], expected[name]) for name in got)
    assert got["advantages"].shape == got["returns"].shape == (SIMULATORS, STEPS)
    assert all(tensor.dim() == 0 for name, tensor in got.items() if name not in ("advantages", "returns"))
    assert actor.run_training()["actor/grad_norm"] > 0


def test_training_computes_the_advantages_itself_and_returns_no_tensors(actor):
    """The runner calls nothing else before. It would load torch to receive tensors."""
    actor.load_trajectories([make_trajectory([0, 1, 2, 3], 1)])
    metrics = actor.run_training()
    assert metrics["actor/grad_norm"] > 0 and {type(value) for value in metrics.values()} == {float}


def test_senders_that_are_late_are_named(actor):
    with pytest.raises(DeadlineExceeded, match=r"2 trajectories of collection 7 .* got 1; senders \[1\] are missing"):
        received(actor, parts()[:1], seconds=0.2)


def test_senders_are_missing_only_if_they_have_a_part_for_this_rank(actor):
    """Of the parts of three senders for two data ranks, rank 0 has both of sender 0 and one of sender 1."""
    request = replace(ROUND, rollouts=(0, 1, 2), actors=2)
    for sent, missing in (([], "0, 1"), ([(0, 1)], "0, 1"), ([(0, 0), (0, 1)], "1"), ([(0, 0), (1, 0)], "0")):
        every = [replace(make_trajectory([0], 1), sender=sender, part=part) for sender, part in sent]
        with pytest.raises(DeadlineExceeded, match=rf"3 trajectories .* got {len(sent)}; senders \[{missing}\]"):
            received(actor, every, seconds=0.05, request=request)


@pytest.mark.parametrize("field", [*TIME_FIRST, "versions", "env_ids", "forward_inputs.states"])
def test_trajectories_of_other_shapes_are_refused_with_field_and_sender(field):
    first, second = parts()
    name, _, inner = field.partition(".")
    held = getattr(second, name)
    tensor = held[inner] if inner else held
    named = "rewards" if field == "env_ids" else field  # the other tensors do not have its number of simulators then
    for dim in range(tensor.dim()):
        longer = torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim=dim)
        wrong = replace(second, **{name: held | {inner: longer} if inner else longer})
        with pytest.raises(DataError, match=f"^{named} of the trajectory of sender 1 must have the shape .*, got "):
            merge_trajectories([wrong, first])


def test_other_inputs_of_the_policy_are_refused_with_their_sender():
    first, second = parts()
    with pytest.raises(DataError, match="forward_inputs of the trajectory of sender 1 must be .*, got .*'pixels'"):
        merge_trajectories([first, replace(second, forward_inputs={"pixels": second.actions})])


def test_trajectories_of_another_length_than_a_step_are_refused(actor):
    whole = make_trajectory([0, 1, 2, 3], 1)
    fewer = {name: getattr(whole, name)[:-1] for name in PER_OBSERVATION}
    with pytest.raises(
        DataError, match=f"dones .* must have {STEPS + 1} rows for {STEPS} .* got {STEPS}; correct sender 0"
    ):
        actor.load_trajectories([replace(whole, **fewer)])
        actor.compute_advantages_and_returns()
    fewer |= {name: getattr(whole, name)[:-1] for name in (*PER_DECISION, "versions")}
    inputs = {name: tensor[:-1] for name, tensor in whole.forward_inputs.items()}
    with pytest.raises(DataError, match=f"must have the {STEPS} decisions .* got {STEPS - 1}"):
        actor.load_trajectories([replace(whole, **fewer, forward_inputs=inputs)])


def test_trajectories_that_one_sender_sends_twice_are_refused(actor):
    first, second = parts()
    for again in (first, replace(second, sender=0)):
        with pytest.raises(DataError, match=r"got \(0, 0, 0\) twice; sender 0 must send each part once"):
            received(actor, [first, again])


def test_a_step_without_trajectories_is_refused(actor):
    with pytest.raises(RuntimeError, match="needs trajectories, got none"):
        actor.compute_advantages_and_returns()
    with pytest.raises(RuntimeError, match="run_training"):
        actor.run_training()


def test_the_global_step_only_rises(actor):
    actor.set_global_step(4)
    for step in (-1, 3):
        with pytest.raises(ValueError, match=f"must be 4 or more, got {step}"):
            actor.set_global_step(step)
    assert actor.global_step == 4


def test_decisions_that_cannot_be_divided_are_refused(spec):
    spec["algorithm"]["optimizerStepsPerBatch"] = 16
    with pytest.raises(
        ConfigError, match="the 24 decisions of a step must be divisible by .* = 16; change env.options.horizon"
    ):
        make(spec)


class Silent(torch.nn.Linear):
    """A policy that cannot be trained."""

    def predict(self, obs, mode="train"):
        raise NotImplementedError


def test_a_policy_without_forward_train_is_refused(tmp_path, spec):
    text = {"policy": f"{__name__}:Silent", "arguments": {"in_features": 1, "out_features": 1}}
    (tmp_path / "policy" / "config.json").write_text(json.dumps(text))
    with pytest.raises(ConfigError, match="must define forward_train"):
        make(spec).model_provider_func()
