"""The receiver's states: only COMMIT of a proven version serves; whatever ends a sync before that does not.

The publisher is played by hand, message by message, over a segment of this process.
"""

import asyncio
import threading
from dataclasses import replace

import pytest
import torch

from rl_core.api.errors import DeadlineExceeded
from rl_core.messages.weights import (
    ReceiverAck,
    ReceiverApplied,
    ReceiverFailure,
    ReceiverReady,
    ReceiverRefusal,
    SharedSource,
    WeightOffer,
    WeightTransfer,
)
from rl_core.transports.shared_memory import SegmentStore
from rl_core.weights import checksums
from rl_core.weights.compatibility import incompatibility
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.host_copy import HostCopies
from rl_core.weights.receiver import WeightReceiver
from rl_core.weights.receiver_state import ReceiverState
from tests.weight_samples import StateSource, build_manifest


class FakeEngine:
    """A WeightTarget that records what it is told; `stopped` holds a pause until it is set, `slow` fails it."""

    def __init__(self):
        self.weights = {"a": torch.zeros(300), "b": torch.zeros(2, 2)}
        self.calls = []
        self.slow = False
        self.stopped = None
        self.leave = 0

    async def prepare(self, deadline):
        self.calls.append("prepare")
        if self.slow:
            raise DeadlineExceeded("rows 3 and 4 still run")
        if self.stopped is not None:
            await self.stopped.wait()

    def names_and_shapes(self):
        return {name: (tuple(tensor.shape), "float32") for name, tensor in self.weights.items()}

    def load(self, tensors, version):
        self.calls.append(f"load {version}")
        for left, (name, tensor) in enumerate(tensors, start=-1):
            self.weights[name].copy_(tensor)
            if self.leave and left >= -self.leave:
                return

    async def resume(self, version, digest):
        self.calls.append(f"resume {version}")


class Wire:
    """What a publisher would send for one version."""

    def __init__(self, copies, version, *, epoch=1, value=None, deadline=30.0):
        fill = float(version) if value is None else value
        self.weights = {"a": torch.full((300,), fill), "b": torch.full((2, 2), fill)}
        self.copy = copies.write(StateSource(self.weights), version=version, epoch=epoch)
        manifest = self.copy.manifest
        self.offer = WeightOffer(
            digest=manifest.digest,
            manifest=manifest.packed,
            bucket_bytes=self.copy.layout.bucket_bytes,
            deadline=deadline,
        )
        source = SharedSource(segment=self.copy.memory.segment, nbytes=self.copy.layout.nbytes)
        self.transfer = WeightTransfer(digest=manifest.digest, source=source)
        self.full_offer = replace(self.offer, source=source)
        self.commit = (version, manifest.digest)


@pytest.fixture
def copies():
    store = SegmentStore("unit")
    yield HostCopies(store)
    store.close()


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
async def receiver(engine):
    made = WeightReceiver(None, None, 1, engine, deadlines=Deadlines(sync_seconds=50))
    yield made
    await made.close()


async def sync(receiver, wire):
    answers = [await receiver.offer(wire.offer)]
    if isinstance(answers[-1], ReceiverReady):
        answers.append(await receiver.transfer(wire.transfer))
    if isinstance(answers[-1], ReceiverApplied):
        answers.append(await receiver.commit(*wire.commit))
    return [type(answer) for answer in answers]


async def test_a_version_is_served_after_commit_and_not_before(receiver, engine, copies):
    assert receiver.current() == (-1, "")
    first, second = Wire(copies, 3), Wire(copies, 4)
    assert await sync(receiver, first) == [ReceiverReady, ReceiverApplied, ReceiverAck]
    assert receiver.current() == first.commit and torch.equal(engine.weights["a"], first.weights["a"])
    assert engine.calls == ["prepare", "load 3", "resume 3"]
    assert (await receiver.offer(second.offer)).have == first.commit
    assert receiver.state is ReceiverState.READY and engine.calls[-1] == "prepare"
    await receiver.transfer(second.transfer)
    assert receiver.state is ReceiverState.APPLIED and receiver.current() == (-1, "")
    assert (await receiver.commit(*second.commit)).pause_seconds > 0
    assert receiver.state is ReceiverState.SERVING and receiver.current() == second.commit


async def test_an_offer_that_says_where_the_data_are_is_applied_after_the_pause_and_served_after_commit(
    receiver, engine, copies
):
    first, second = Wire(copies, 3), Wire(copies, 4)
    answer = await receiver.offer(first.full_offer)
    assert answer == ReceiverApplied(version=3, digest=first.commit[1], loaded=True)
    assert engine.calls == ["prepare", "load 3"] and receiver.current() == (-1, "")
    assert isinstance(await receiver.commit(*first.commit), ReceiverAck) and receiver.current() == first.commit
    assert isinstance(await receiver.offer(first.full_offer), ReceiverAck)
    await receiver.offer(second.full_offer)
    again = await receiver.offer(second.full_offer)
    assert isinstance(again, ReceiverApplied) and not again.loaded  # proven: the data need not move twice
    assert engine.calls.count("load 4") == 1


@pytest.mark.parametrize("in_place", [False, True], ids=["engine copies", "in place"])
async def test_a_wrong_checksum_in_an_offer_with_its_data_names_the_tensor(receiver, engine, copies, in_place):
    if in_place:
        engine.destinations = lambda: engine.weights
    wire = Wire(copies, 4)
    wire.copy.memory.data[wire.copy.layout.starts[1]] ^= 1
    answer = await receiver.offer(wire.full_offer)
    assert isinstance(answer, ReceiverFailure) and answer.names == ("b",)
    assert receiver.state is ReceiverState.DIRTY and receiver.current() == (-1, "")
    assert isinstance(await receiver.commit(*wire.commit), ReceiverRefusal)


async def test_an_engine_that_cannot_pause_is_not_written(receiver, engine, copies):
    engine.slow = True
    answer = await receiver.offer(Wire(copies, 4).full_offer)
    assert isinstance(answer, ReceiverRefusal) and engine.calls == ["prepare"]
    assert not engine.weights["a"].any()


@pytest.mark.parametrize("newer", ["offer", "epoch"])
async def test_an_offer_replaced_while_the_engine_stops_is_not_loaded(receiver, engine, copies, newer):
    engine.destinations = lambda: engine.weights
    engine.stopped = asyncio.Event()
    old, new = Wire(copies, 3), Wire(copies, 4)
    offering = asyncio.ensure_future(receiver.offer(old.full_offer))
    await until(lambda: engine.calls == ["prepare"])
    if newer == "offer":
        replacing = asyncio.ensure_future(receiver.offer(new.offer))
        await asyncio.sleep(0)
    else:
        receiver.set_epoch(2)
    engine.stopped.set()
    answer = await offering
    assert isinstance(answer, ReceiverFailure) and "replaced by a newer offer" in answer.reason
    assert not engine.weights["a"].any()
    if newer == "offer":
        assert isinstance(await replacing, ReceiverReady)
        assert isinstance(await receiver.transfer(new.transfer), ReceiverApplied)
    else:
        assert receiver.state is ReceiverState.UNVERSIONED


async def test_an_epoch_that_changes_while_bytes_move_leaves_nothing_of_either_version(receiver, engine, copies):
    began, go = threading.Event(), threading.Event()

    def load(tensors, version):
        name, tensor = next(tensors)
        engine.weights[name].copy_(tensor)
        began.set()
        assert go.wait(60)
        list(tensors)

    engine.load, usual = load, engine.load
    old, new = Wire(copies, 3), Wire(copies, 1, epoch=2)
    offering = asyncio.ensure_future(receiver.offer(old.full_offer))
    await asyncio.to_thread(began.wait, 60)
    receiver.set_epoch(2)
    go.set()
    answer = await offering
    assert isinstance(answer, ReceiverFailure) and "replaced by a newer offer" in answer.reason
    assert receiver.current() == (-1, "") and receiver.state is not ReceiverState.SERVING
    assert isinstance(await receiver.commit(*old.commit), ReceiverRefusal)
    engine.load = usual
    assert await sync(receiver, new) == [ReceiverReady, ReceiverApplied, ReceiverAck]
    assert all((tensor == 1.0).all() for tensor in engine.weights.values())


async def test_repeated_messages_change_nothing(receiver, engine, copies):
    wire = Wire(copies, 3)
    await sync(receiver, wire)
    calls = list(engine.calls)
    assert await sync(receiver, wire) == [ReceiverAck]
    assert isinstance(await receiver.commit(*wire.commit), ReceiverAck)
    assert engine.calls == calls


async def test_a_transfer_repeated_after_a_lost_answer_moves_no_data(receiver, engine, copies):
    wire = Wire(copies, 3)
    await receiver.offer(wire.offer)
    await receiver.transfer(wire.transfer)
    assert isinstance(await receiver.transfer(wire.transfer), ReceiverApplied)
    assert await sync(receiver, wire) == [ReceiverApplied, ReceiverAck]
    assert engine.calls.count("load 3") == 1


async def test_versions_may_be_skipped_but_never_go_back_inside_an_epoch(receiver, copies):
    await sync(receiver, Wire(copies, 3))
    assert await sync(receiver, Wire(copies, 9)) == [ReceiverReady, ReceiverApplied, ReceiverAck]
    refusal = await receiver.offer(Wire(copies, 8).offer)
    assert isinstance(refusal, ReceiverRefusal) and "this receiver is at 9" in refusal.reason
    assert receiver.state is ReceiverState.SERVING
    other = await receiver.offer(Wire(copies, 9, value=1.0).offer)
    assert isinstance(other, ReceiverRefusal) and "raise the version" in other.reason


async def test_the_first_offer_of_a_newer_epoch_is_accepted_whatever_its_version(receiver, copies):
    await sync(receiver, Wire(copies, 9))
    assert await sync(receiver, Wire(copies, 2, epoch=5)) == [ReceiverReady, ReceiverApplied, ReceiverAck]
    assert receiver.epoch == 5 and receiver.current()[0] == 2
    refusal = await receiver.offer(Wire(copies, 30, epoch=4).offer)
    assert refusal == ReceiverRefusal(reason="older_epoch: offered 4, this receiver is at 5")


async def test_a_commit_of_what_was_not_applied_is_refused(receiver, copies):
    wire = Wire(copies, 3)
    assert isinstance(await receiver.commit(*wire.commit), ReceiverRefusal)
    await receiver.offer(wire.offer)
    assert isinstance(await receiver.commit(*wire.commit), ReceiverRefusal)
    await receiver.transfer(wire.transfer)
    assert isinstance(await receiver.commit(3, "another digest"), ReceiverRefusal)
    assert receiver.current() == (-1, "")


async def test_a_transfer_that_was_not_offered_fails(receiver, copies):
    answer = await receiver.transfer(Wire(copies, 3).transfer)
    assert isinstance(answer, ReceiverFailure) and "offer it first" in answer.reason


async def test_a_newer_offer_replaces_an_uncommitted_one(receiver, copies):
    old, new = Wire(copies, 3), Wire(copies, 4)
    await receiver.offer(old.offer)
    await receiver.transfer(old.transfer)
    assert await sync(receiver, new) == [ReceiverReady, ReceiverApplied, ReceiverAck]
    assert isinstance(await receiver.commit(*old.commit), ReceiverRefusal)
    assert receiver.current() == new.commit


async def test_a_silent_publisher_before_the_data_leaves_the_old_version_intact_but_not_served(
    receiver, engine, copies
):
    old, new = Wire(copies, 3), Wire(copies, 4, deadline=0.01)
    await sync(receiver, old)
    await receiver.offer(new.offer)
    await until(lambda: receiver.state is ReceiverState.PAUSED)
    assert receiver.current() == old.commit and engine.calls[-1] == "prepare"
    assert await sync(receiver, old) == [
        ReceiverApplied,
        ReceiverAck,
    ]  # proven still: no data is needed to serve it again


async def test_a_silent_publisher_before_commit_leaves_the_receiver_without_a_version(receiver, engine, copies):
    await sync(receiver, Wire(copies, 3))
    new = Wire(copies, 4, deadline=1.0)  # the transfer must have ended before
    await receiver.offer(new.offer)
    await receiver.transfer(new.transfer)
    await until(lambda: receiver.state is ReceiverState.DIRTY)
    assert receiver.current() == (-1, "") and "resume 4" not in engine.calls
    assert isinstance(await receiver.commit(*new.commit), ReceiverRefusal)
    assert await sync(receiver, Wire(copies, 1, epoch=2)) == [ReceiverReady, ReceiverApplied, ReceiverAck]


async def test_a_wrong_checksum_names_the_tensor_and_leaves_no_version(receiver, copies):
    await sync(receiver, Wire(copies, 3))
    wire = Wire(copies, 4)
    wire.copy.memory.data[wire.copy.layout.starts[1]] ^= 1
    await receiver.offer(wire.offer)
    answer = await receiver.transfer(wire.transfer)
    assert isinstance(answer, ReceiverFailure) and answer.names == ("b",)
    assert receiver.state is ReceiverState.DIRTY and receiver.current() == (-1, "")
    assert await sync(receiver, Wire(copies, 5)) == [ReceiverReady, ReceiverApplied, ReceiverAck]


async def test_an_engine_that_does_not_take_every_tensor_fails(receiver, engine, copies):
    engine.leave = 1
    wire = Wire(copies, 4)
    await receiver.offer(wire.offer)
    answer = await receiver.transfer(wire.transfer)
    assert isinstance(answer, ReceiverFailure) and "must take every tensor, it left 'b'" in answer.reason


async def test_an_engine_that_cannot_pause_refuses(receiver, engine, copies):
    engine.slow = True
    answer = await receiver.offer(Wire(copies, 4).offer)
    assert isinstance(answer, ReceiverRefusal) and "rows 3 and 4 still run" in answer.reason
    engine.slow = False
    assert await sync(receiver, Wire(copies, 5)) == [ReceiverReady, ReceiverApplied, ReceiverAck]


async def test_a_vanished_segment_is_a_failure_that_says_so(receiver, copies):
    wire = Wire(copies, 4)
    gone = replace(wire.transfer.source, segment=wire.copy.memory.segment + "0")
    await receiver.offer(wire.offer)
    answer = await receiver.transfer(replace(wire.transfer, source=gone))
    assert isinstance(answer, ReceiverFailure) and "cannot be opened" in answer.reason
    assert receiver.state is ReceiverState.UNVERSIONED  # nothing was touched


async def test_an_unknown_source_is_refused(receiver, copies):
    wire = Wire(copies, 4)
    await receiver.offer(wire.offer)
    answer = await receiver.transfer(replace(wire.transfer, source="pigeon"))
    assert (
        isinstance(answer, ReceiverFailure) and "must be shared, stream, group, ipc or patch, got str" in answer.reason
    )


async def test_states_are_told_in_order(engine, copies):
    told = []
    receiver = WeightReceiver(
        None, None, 1, engine, on_state=lambda state, version, digest: told.append((state.value, version))
    )
    await sync(receiver, Wire(copies, 3))
    receiver.set_epoch(2)
    assert told == [("ready", -1), ("applied", -1), ("serving", 3), ("unversioned", -1)]
    await receiver.close()


def test_misfit_names_what_is_missing_unknown_and_mis_shaped():
    tied = torch.zeros(4, 2)
    manifest = build_manifest({"a": torch.zeros(3), "e": tied, "h": tied, "x": torch.zeros(1)}, version=0, epoch=0)
    fits = {"a": ((3,), "float32"), "e": (4, 2), "x": (1,)}
    assert incompatibility(manifest, fits) == ""
    assert (
        incompatibility(manifest, {**{k: v for k, v in fits.items() if k != "e"}, "h": (4, 2)}) == ""
    )  # either tied name will do
    assert "missing q" in incompatibility(manifest, {**fits, "q": (1,)})
    assert "unknown x" in incompatibility(manifest, {k: v for k, v in fits.items() if k != "x"})
    assert "a must be bfloat16 [3], got float32 [3]" in incompatibility(manifest, {**fits, "a": ((3,), "bfloat16")})


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(("side", "loads"), [(8, 0), (512, 1)])
async def test_only_a_model_with_a_large_tensor_loads_the_compiled_checksum(monkeypatch, side, loads):
    loaded = []
    monkeypatch.setattr(checksums, "kernels", lambda: loaded.append(1))
    engine = FakeEngine()
    engine.weights["a"] = torch.zeros(side, side)
    receiver = WeightReceiver(None, None, 1, engine)
    receiver.warm_up()
    await receiver.close()
    assert len(loaded) == loads
