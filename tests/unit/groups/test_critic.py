"""The critic in a group of its own trains as the one that the actor holds, and as its loss written out; both are at the same step."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl_core.actors.critic import decoder_and_head
from rl_core.actors.fsdp.actor import FSDPActor
from rl_core.api.errors import ConfigError, DataError, InfrastructureError
from rl_core.api.job import RLJob
from rl_core.groups.critic import Critic
from rl_core.messages.critic import CriticRow
from rl_core.transports import frames
from rl_core.workers.context import WorkerContext, stand_alone_identity
from tests import actor_samples

GROUP = {"name": "critic", "worker": "rl_core.groups.critic:Critic", "lifecycle": "gang", "callers": ["actor"]}
CRITIC = {"gamma": 0.9, "lam": 0.8, "valueClip": 0.05, "coefficient": 0.7}
CHANGES = {
    "algorithm__name": "gae",
    "algorithm__recomputeLogProbs": True,
    "algorithm__updateEpochs": 2,
    "algorithm__optimizerStepsPerBatch": 2,
    "actor__gradClip": 0.01,
    "actor__optimizer": {"learningRate": 1e-3, "valueLearningRate": 4e-3, "schedule": {"warmupSteps": 2}},
}
SEPARATE = {**CHANGES, "algorithm__critic": {**CRITIC, "separate": True}}
IN_GROUP = {**CHANGES, "algorithm__critic": {**CRITIC, "group": "critic"}, "groups": [GROUP]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return actor_samples.make_model(tmp_path_factory.mktemp("model"))


def spec_of(model, changes):
    return actor_samples.make_spec(model, **copy.deepcopy(changes))


def with_values(model):
    """Give a value head other weights than 0, so that values differ from token to token."""
    head = decoder_and_head(model)[1].weight
    with torch.no_grad():
        head.copy_(torch.linspace(-0.2, 0.3, head.numel()).view_as(head))


def make_critic(model, changes=IN_GROUP):
    spec = spec_of(model, changes)
    context = WorkerContext(replace(stand_alone_identity(), group="critic"))
    context.job = RLJob.model_validate(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "ppo"}, "spec": spec}
    )
    critic = Critic.create_in_context(context, {})
    critic.init_worker()
    with_values(critic.manager.model)
    return critic


class Actor(FSDPActor):
    """An actor whose calls to the group reach `critic`, as messages."""

    critic = None

    def waiting(self, what, on, cause=None):
        return nullcontext()

    def members(self, group=None):
        return [SimpleNamespace(name="critic:0", rank=0, address="c", state=SimpleNamespace(constructed=True))]

    def peer(self, address, service=None):
        async def call(method, *args, timeout):
            assert method in Critic.peer_methods["actor"]
            return frames.decode(
                frames.encode(getattr(self.critic, method)(*frames.decode(frames.encode(args), copy=True))), copy=True
            )

        return SimpleNamespace(call=call)


def make_actor(model, changes, critic=None):
    actor = Actor(spec_of(model, changes))
    actor.critic = critic
    actor.init_worker()
    return actor


def records_of(step):
    return [actor_samples.make_record(group) for group in range(4 * step, 4 * step + 4)]


def prepare(actor, records):
    actor.load_batch(records)
    actor.compute_log_probs()
    actor.compute_advantages_and_returns()
    return actor.engine.prepared


def test_policy_and_critic_train_as_where_the_actor_holds_both(model):
    critic = make_critic(model)
    beside, alone = make_actor(model, IN_GROUP, critic), make_actor(model, SEPARATE)
    with_values(alone.manager.model)
    assert not any("critic" in name or "value_head" in name for name, _ in beside.manager.model.named_parameters())
    for step in (1, 2, 3):
        ours, theirs = prepare(beside, records_of(step)), prepare(alone, records_of(step))
        assert ours.values.any()
        for name in ("values", "returns", "advantages"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=1e-6, rtol=1e-6)
        metrics, expected = beside.run_training(step), alone.run_training(step)
        metrics |= critic.run_training(step, 1)
        for name in ("value_loss", "values", "returns", "value_clip_ratio"):
            assert metrics[f"train/{name}"] == pytest.approx(expected[f"actor/{name}"], rel=1e-5), name
        assert metrics["actor/explained_variance"] == pytest.approx(expected["actor/explained_variance"], rel=1e-5)
        assert metrics["train/critic_lr"] == pytest.approx(4 * expected["actor/lr"])
    parts = dict(alone.manager.model.named_parameters())
    for name, parameter in beside.manager.model.named_parameters():
        torch.testing.assert_close(parameter, parts[name], atol=1e-6, rtol=1e-5)
    found = dict(critic.manager.model.named_parameters())
    for name, parameter in parts.items():
        if name.startswith("critic."):
            # Four times the bound of the policy, as the learning rate is.
            torch.testing.assert_close(found[name.removeprefix("critic.")], parameter, atol=4e-6, rtol=1e-5)
    start = dict(make_critic(model).manager.model.named_parameters())
    assert all(not torch.equal(parameter, start[name]) for name, parameter in found.items())


def rows_of_a_step(seed=0):
    draw = np.random.default_rng(seed)
    rows = []
    for index in range(6):
        length = int(draw.integers(3, 20))
        mask = draw.random(length) < 0.6
        mask[0] = False
        ids = draw.integers(0, actor_samples.VOCAB, length)
        values, returns = draw.normal(size=(2, length)).astype(np.float32)
        rows.append(
            CriticRow(group_id=f"0-{index}", input_ids=ids, loss_mask=mask, values=0.1 * values, returns=returns)
        )
    return rows


def test_values_and_gradient_are_those_written_out_in_float64(model):
    critic = make_critic(model, {**IN_GROUP, "algorithm__updateEpochs": 1, "algorithm__optimizerStepsPerBatch": 1})
    rows, clip, coefficient = rows_of_a_step(), CRITIC["valueClip"], CRITIC["coefficient"]
    reference, losses = copy.deepcopy(critic.manager.model).double(), []
    answers = critic.values([row.input_ids for row in rows], 0)
    for row, answer in zip(rows, answers, strict=True):
        hidden = reference.model(input_ids=torch.from_numpy(row.input_ids)[None]).last_hidden_state[0]
        values = torch.cat([torch.zeros(1).double(), (hidden[:-1] @ reference.value_head.weight.T)[:, 0]])
        torch.testing.assert_close(torch.from_numpy(answer).double(), values, atol=1e-5, rtol=1e-5)
        mask, old, target = (torch.from_numpy(part) for part in (row.loss_mask, row.values, row.returns))
        clipped = old + (values - old).clamp(-clip, clip)
        losses.append((torch.maximum((target - values) ** 2, (target - clipped) ** 2) / 2)[mask])
    (coefficient * torch.cat(losses).mean()).backward()
    taken = {}

    def optimizer_step():
        taken.update({name: p.grad.clone() for name, p in critic.manager.model.named_parameters()})
        return 0.0, [0.0]

    critic.manager.optimizer_step = optimizer_step
    critic.add_rows(0, 0, rows)
    critic.run_training(1, 1)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(taken[name].double(), parameter.grad, atol=1e-6, rtol=1e-4)


def test_what_it_learns_does_not_depend_on_which_data_rank_sent_a_row(model):
    rows, found = rows_of_a_step(), []
    for shares in ([rows], [rows[1::2], rows[::2]]):
        critic = make_critic(model)
        for rank, share in enumerate(shares):
            critic.add_rows(0, rank, [rows[0]])  # of a step that was cancelled
            critic.add_rows(0, rank, share)
        critic.run_training(1, len(shares))
        found.append(dict(critic.manager.model.named_parameters()))
    for name, parameter in found[0].items():
        assert torch.equal(parameter, found[1][name]), name


async def test_a_checkpoint_holds_it_and_training_goes_on_as_if_it_had_not_ended(model, tmp_path):
    critic = make_critic(model)
    critic.add_rows(0, 0, rows_of_a_step(0))
    critic.run_training(1, 1)
    digests = await critic.save_checkpoint(str(tmp_path), 1)
    assert digests and all(name.startswith("critic/") and (tmp_path / name).is_file() for name in digests)
    in_background = await critic.save_checkpoint(str(tmp_path / "again"), 1, in_background=True)
    assert {name: digest for name, digest in in_background.items() if "rng" not in name} == {
        name: digest for name, digest in digests.items() if "rng" not in name
    }
    resumed = make_critic(model)
    resumed.load_checkpoint(str(tmp_path))
    for one in (critic, resumed):
        one.add_rows(1, 0, rows_of_a_step(1))
        one.run_training(2, 1)
    for name, parameter in critic.manager.model.named_parameters():
        assert torch.equal(parameter, dict(resumed.manager.model.named_parameters())[name]), name


def test_a_critic_at_another_step_refuses_and_none_trains_without_all_rows(model):
    critic = make_critic(model)
    with pytest.raises(InfrastructureError, match="must be at step 3 as the actors are, got 0"):
        critic.values([np.array([1, 2])], 3)
    with pytest.raises(InfrastructureError, match="must be at step 1"):
        critic.add_rows(1, 0, [])
    critic.add_rows(0, 1, rows_of_a_step())
    with pytest.raises(DataError, match=r"rows of 2 data ranks, got none of \[0\]"):
        critic.run_training(1, 2)
    with pytest.raises(ConfigError, match="config"):
        Critic.create_in_context(critic._context, {"replicas": 2})
