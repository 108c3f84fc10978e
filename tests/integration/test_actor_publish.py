"""Weight sync from the trainer's side: what a receiver gets and proves is what was trained, tied names once, sharded or not."""

import asyncio
import signal
import threading
import time

import psutil
import pytest
import torch

from rl_core.actors.fsdp.actor import FSDPActor
from rl_core.weights.publisher import WeightPublisher
from rl_core.weights.receiver import WeightReceiver
from tests.actor_samples import make_model, make_record, make_spec
from tests.integration.weight_world import Receiver, started


class Engine:
    """Holds the tensors it is given."""

    def __init__(self, shapes):
        self.shapes, self.weights, self.serves = shapes, {}, None

    async def prepare(self, deadline):
        self.serves = None

    def names_and_shapes(self):
        return self.shapes

    def load(self, tensors, version):
        self.weights = {name: tensor.clone() for name, tensor in tensors}

    async def resume(self, version, digest):
        self.serves = (version, digest)


@pytest.fixture(params=["float32", "bfloat16"])
def actor(request, tmp_path):
    actor = FSDPActor(make_spec(make_model(tmp_path / "model"), model__dtype=request.param))
    actor.init_worker()
    actor.publisher = WeightPublisher(actor.cfg, 0)
    yield actor
    actor.close()


def train(actor, step):
    actor.load_batch([make_record(group) for group in range(4)])
    actor.compute_advantages_and_returns()
    actor.run_training(step)


async def test_a_late_joiner_holds_the_trained_weights(actor):
    assert actor.manager.strategy.is_sharded == (actor.manager.dtype == torch.bfloat16)
    await asyncio.to_thread(train, actor, 1)
    report = await asyncio.to_thread(actor.sync_model_to_rollout, 1, [], 0)
    own = dict(actor.manager.model.named_parameters())
    assert report.bytes == sum(p.numel() for p in own.values()) * actor.manager.dtype.itemsize
    state = await asyncio.to_thread(actor.manager.get_model_state_dict, True, True)
    engine = Engine({name: (tuple(t.shape), actor.cfg.model.dtype) for name, t in state.items()})
    receiver = WeightReceiver(actor.cfg, None, 0, engine)
    await receiver.pull(actor.publisher_address())
    assert engine.serves == (1, report.digest) == receiver.current()
    for name, tensor in engine.weights.items():
        assert torch.equal(tensor, state[name].to(actor.manager.dtype)), name
    assert set(state) - set(engine.weights) <= {"lm_head.weight"}


def test_publishing_brings_offloaded_weights_in_and_takes_them_away_again(actor):
    before = actor.sync_model_to_rollout(1, [], 0).digest
    actor.manager.offload_param_and_grad()
    assert all(
        actor.manager.strategy.local(p).untyped_storage().nbytes() == 0 for p in actor.manager.model.parameters()
    )
    assert actor.sync_model_to_rollout(1, [], 0).digest == before
    assert actor.manager.residency.weights_offloaded


def test_the_version_is_the_global_step_unless_given(actor):
    train(actor, 6)
    assert actor.sync_model_to_rollout().version == 6


@pytest.fixture
def receivers(actor):
    state = actor.manager.get_model_state_dict(True, True)
    shapes = {name: list(tensor.shape) for name, tensor in state.items() if name != "lm_head.weight"}
    made = (Receiver(f"rollout:{rank}", shapes=shapes, dtype=actor.cfg.model.dtype) for rank in range(2))
    with started(*made) as both:
        yield both


@pytest.mark.parametrize("end", [None, signal.SIGKILL], ids=["frozen", "killed"])
def test_a_receiver_lost_in_the_middle_of_a_sync_is_left_behind_and_the_others_serve(actor, receivers, end):
    """A frozen process keeps its sockets: without the hub's word it would be late until its deadline."""
    frozen, healthy = receivers
    frozen.call("set_trap", "freeze")
    reports = []

    def sync():
        reports.append(actor.sync_model_to_rollout(1, [receiver.about for receiver in receivers], 1))

    syncing = threading.Thread(target=sync)
    syncing.start()
    process = psutil.Process(frozen.process.pid)
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)  # the test's timeout bounds this loop
    if end is not None:
        process.send_signal(end)
    asyncio.run(actor.receiver_lost("rollout:0", "the hub declared it dead"))
    syncing.join(120)
    (report,) = reports
    failed = report.failed or asyncio.run(actor.late_receivers()).failed
    assert report.acked == ("rollout:1",) and list(failed) == ["rollout:0"]
    assert "the hub declared it dead" in failed["rollout:0"] or end is not None
    assert healthy.call("probe")["current"] == [1, report.digest]
    assert actor.sync_model_to_rollout(2, [healthy.about], 1).acked == ("rollout:1",)
    frozen.process.kill()
