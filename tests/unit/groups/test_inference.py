"""Workers that hold the policy score with exactly the version that was published, and its weights do not change while they are used."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError
from rl_core.api.job import RLJob
from rl_core.data.tokenizer import read_files
from rl_core.groups.inference import Inference
from rl_core.messages.members import MemberState
from rl_core.messages.weights import ReceiverAck, ReceiverRefusal, SharedSource, WeightOffer
from rl_core.plan.groups import ACTOR
from rl_core.rollouts.weight_methods import WeightMethods
from rl_core.transports.shared_memory import SegmentStore
from rl_core.weights.host_copy import HostCopies
from rl_core.workers.context import WorkerContext
from tests.small_models import save_policy
from tests.weight_samples import StateSource

HEADER = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob"}
ROWS = [np.array([3, 9, 4, 20, 7]), np.array([5]), np.arange(2, 32), np.array([8, 8, 1])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def policy(folder, version):
    """Return the policy of `version` in transformers: that of the folder, moved away from it a little more with each version."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


class World:
    """An inference worker, and the publisher's side of it played by hand over a segment of this process."""

    def __init__(self, folder, config=None):
        spec = {"model": {"path": str(folder)}, "data": {"train": "t"}, "runtime": {"deadlines": {"weightSync": 0.5}}}
        context = WorkerContext(files=read_files(folder))
        context.job = RLJob.model_validate({**HEADER, "metadata": {"name": "sums"}, "spec": spec})
        self.context, self.folder = context, folder
        self.worker = Inference.create_in_context(context, config or {})
        self.worker.init_worker()
        self.store = SegmentStore("unit")
        self.copies = HostCopies(self.store)

    async def publish(self, version):
        model = policy(self.folder, version)
        copy = self.copies.write(StateSource(model.state_dict()), version=version, epoch=0)
        offer = WeightOffer(
            digest=copy.manifest.digest,
            manifest=copy.manifest.packed,
            bucket_bytes=copy.layout.bucket_bytes,
            deadline=30.0,
            source=SharedSource(segment=copy.memory.segment, nbytes=copy.layout.nbytes),
        )
        answer = await self.worker.weights_offer(offer)
        if isinstance(answer, ReceiverRefusal):
            return answer
        return await self.worker.weights_commit(version, copy.manifest.digest)


@pytest.fixture
async def world(folder):
    made = World(folder)
    yield made
    await made.worker.close()
    made.store.close()


def expected(model, temperature):
    for row in ROWS:
        ids = torch.from_numpy(row)[None]
        with torch.no_grad():
            scores = (model(ids).logits[0, :-1] / temperature).log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        yield np.concatenate([[0.0], scores.numpy()])


async def test_it_scores_with_the_published_version_as_transformers_does(world):
    for version in (0, 1):
        assert isinstance(await world.publish(version), ReceiverAck)
        found = await world.worker.log_probs(ROWS, 0.7, version, 5.0)
        for row, scores in zip(found, expected(policy(world.folder, version), 0.7), strict=True):
            assert row.dtype == np.float32
            np.testing.assert_allclose(row, scores, atol=1e-5)
    assert world.worker.status()["version"] == 1 and world.context.state is MemberState.SERVING


async def test_a_call_waits_for_its_version_and_gets_no_other_one(world):
    early = asyncio.create_task(world.worker.log_probs(ROWS, 1.0, 2, 30.0))
    await world.publish(1)
    await asyncio.sleep(0)
    assert not early.done()
    await world.publish(2)
    np.testing.assert_allclose((await early)[0], next(expected(policy(world.folder, 2), 1.0)), atol=1e-5)
    with pytest.raises(InfrastructureError, match="must serve version 1 of the weights, got 2"):
        await world.worker.log_probs(ROWS, 1.0, 1, 5.0)
    with pytest.raises(DeadlineExceeded, match="must serve version 3 of the weights within 0.01 s, it is at 2"):
        await world.worker.log_probs(ROWS, 1.0, 3, 0.01)


async def test_weights_that_are_in_use_do_not_change(world):
    await world.publish(1)
    async with world.worker.policy(seconds=5.0) as model:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        publishing = asyncio.create_task(world.publish(2))
        await asyncio.sleep(0.05)
        assert not publishing.done()
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert isinstance(await publishing, ReceiverAck)
    assert world.worker.status()["version"] == 2


async def test_a_new_epoch_leaves_no_version(world):
    await world.publish(1)
    await world.worker.on_new_epoch(1)
    assert world.worker.status()["version"] == -1 and world.context.state is MemberState.UPDATING
    with pytest.raises(DeadlineExceeded, match="must serve weights within 0.01 s"):
        async with world.worker.policy(seconds=0.01):
            pass


def test_options_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="batchTokns"):
        Inference({"batchTokns": 3})


def test_actors_may_call_what_sends_weights_and_what_scores():
    assert Inference.peer_methods == {ACTOR: WeightMethods.peer_methods[ACTOR] | {"log_probs"}}
