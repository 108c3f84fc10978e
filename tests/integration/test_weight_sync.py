"""Weight sync between real processes: whatever dies, whoever serves serves exactly the published bytes.

Two receivers live through the session, one that writes in place and one whose engine copies; each test is an epoch of its
own, as after a restart of the actor. Tests that kill receivers start their own. Every transport passes the same suite.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace

import pytest
import torch

from rl_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError
from rl_core.api.identity import Identity
from rl_core.transports import tokens
from rl_core.transports.curve import KeyRing
from rl_core.transports.rpc import RpcClient
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.device_buffer import DeviceBuffer
from rl_core.weights.publisher import WeightPublisher
from tests import ROOT
from tests.curve_keys import generate_keys
from tests.integration.weight_world import (
    HASTY,
    PATIENT,
    SHAPES,
    SPEC,
    Receiver,
    about,
    epochs,
    model,
    publisher,
    serves,
    source_of,
    started,
    tensors,
)
from tests.weight_samples import StateSource


@pytest.fixture(params=["shared", "stream", "gloo", "ipc"])
def transport(request):
    return request.param


def test_every_receiver_serves_exactly_what_was_published(receivers, transport):
    with publisher(transport) as source:
        for version in (0, 1, 5):
            weights = tensors(version)
            report = source.publish(version, source_of(weights), about(receivers), 2)
            assert report.acked == ("rollout:0", "rollout:1") and report.failed == {}
            assert report.bytes == sum(tensor.nbytes for tensor in weights.values())
            assert report.transport == transport
            assert all(serves(receiver, version, weights) for receiver in receivers)
            assert [receiver.call("probe")["current"] for receiver in receivers] == [[version, report.digest]] * 2


def test_tensors_of_another_type_are_cast_to_that_of_the_receiver(receivers, transport):
    with publisher(transport) as source:
        weights = tensors(3, torch.float64)
        source.publish(1, source_of(weights), about(receivers), 2)
        assert all(
            serves(receiver, 1, {name: tensor.float() for name, tensor in weights.items()}) for receiver in receivers
        )


def test_a_repeated_offer_is_acknowledged_without_data(receivers, transport):
    with publisher(transport) as source:
        first = source.publish(1, model(1), about(receivers), 2)
        loads = [receiver.call("probe")["loads"] for receiver in receivers]
        again = source.publish(1, model(1), about(receivers), 2)
        assert again.digest == first.digest and again.acked == first.acked and again.transport == "none"
        assert [receiver.call("probe")["loads"] for receiver in receivers] == loads


def test_an_older_epoch_and_an_older_version_are_refused(receivers):
    old = next(epochs)
    with publisher() as source:
        source.publish(4, model(4), about(receivers), 2)
        with pytest.raises(ValueError, match="4 is committed, got 3"):
            source.publish(3, model(3), about(receivers), 2)
        with pytest.raises(ValueError, match="raise the version"):
            source.publish(4, model(3), about(receivers), 2)
    with publisher(epoch=old) as late, pytest.raises(DeadlineExceeded, match="refused: older_epoch"):
        late.publish(9, model(9), about(receivers), 1)
    assert all(serves(receiver, 4, tensors(4)) for receiver in receivers)


def test_a_restart_from_an_older_checkpoint_lowers_the_version(receivers):
    with publisher() as source:
        source.publish(7, model(7), about(receivers), 2)
    with publisher() as restarted:
        restarted.publish(2, model(2), about(receivers), 2)
    assert all(serves(receiver, 2, tensors(2)) for receiver in receivers)


def test_a_new_epoch_ends_service_until_its_first_version(receivers):
    with publisher() as source:
        source.publish(1, model(1), about(receivers), 2)
    receivers[0].call("set_epoch", next(epochs))
    probe = receivers[0].call("probe")
    assert (probe["state"], probe["current"]) == ("unversioned", [-1, ""])


@pytest.mark.parametrize("name", list(SHAPES))
def test_one_flipped_bit_in_the_segment_fails_the_sync_and_names_the_tensor(receivers, name, monkeypatch):
    with publisher() as source:
        source.publish(1, model(1), about(receivers), 2)
        write = source._copies.write

        def write_badly(*args, **kwargs):
            copy = write(*args, **kwargs)
            entry = [entry.name for entry in copy.manifest.entries].index(name)
            copy.memory.data[copy.layout.starts[entry] + 5] ^= 1
            return copy

        with monkeypatch.context() as patch:
            patch.setattr(source._copies, "write", write_badly)
            with pytest.raises(DeadlineExceeded, match=f"verification failed: {name}: 1 tensors"):
                source.publish(2, model(2), about(receivers), 1)
        assert source.current() == (-1, "")  # late joiners get nothing: the older copy was given up
        for receiver in receivers:
            probe = receiver.call("probe")
            assert (probe["serving"], probe["state"], probe["current"]) == (False, "dirty", [-1, ""])
        source.publish(3, model(3), about(receivers), 2)
        assert all(serves(receiver, 3, tensors(3)) for receiver in receivers)


def test_an_engine_that_fails_is_out_and_the_other_serves(receivers, transport):
    with publisher(transport) as source:
        receivers[1].call("set_trap", "fail")
        try:
            report = source.publish(1, model(1), about(receivers), 1)
        finally:
            receivers[1].call("set_trap", "")
        assert report.acked == ("rollout:0",)
        assert "KeyError" in report.failed["rollout:1"]
        assert serves(receivers[0], 1, tensors(1)) and not receivers[1].call("probe")["serving"]


def test_a_receiver_on_another_device_is_refused_where_the_job_says_ipc(receivers):
    elsewhere = [replace(one, host_token="elsewhere") for one in about(receivers)]
    with (
        publisher("ipc") as source,
        pytest.raises(ConfigError, match="ipc needs a receiver on devices of the trainer .* on cpu; use auto"),
    ):
        source.publish(1, model(1), elsewhere, 2)


def test_a_receiver_that_cannot_map_the_device_gets_the_version_through_the_host(receivers, monkeypatch):
    monkeypatch.setattr(DeviceBuffer, "handle", lambda memory: (b"", b"/nothing-there", 3))
    with publisher("ipc") as source:
        with pytest.raises(ConfigError, match="rollout:. cannot map the device's memory: .*; use auto"):
            source.publish(1, model(1), about(receivers), 2)
        source._transport._wanted = "auto"
        for version in (2, 3):
            report = source.publish(version, model(version), about(receivers), 2)
            assert report.transport == "shared" and all(serves(one, version, tensors(version)) for one in receivers)


@pytest.mark.parametrize("opened", [True, False], ids=["each handle is opened", "one engine of two opens none"])
def test_the_memory_of_a_version_is_freed_whoever_opens_it(receivers, monkeypatch, opened):
    """Shared memory is kept until its last handle was opened and given up, as CUDA keeps that of a device."""
    given, handle = [], DeviceBuffer.handle

    def note(memory):
        manager, name, nbytes = handle(memory)
        given.append(name)
        return manager, name if opened or len(given) % 2 else b"/nothing-there", nbytes

    monkeypatch.setattr(DeviceBuffer, "handle", note)
    with publisher("ipc") as source:
        source._transport._wanted = "auto"
        assert len(source.publish(1, model(1), about(receivers), 2).acked) == 2
        assert len(given) == 2 and not any(os.path.exists(f"/dev/shm{name.decode()}") for name in given)


def test_a_version_that_finds_no_room_on_the_device_is_sent_from_the_host(receivers, monkeypatch, caplog):
    def full(*size, **options):
        raise torch.OutOfMemoryError("as CUDA says it")

    monkeypatch.setattr("rl_core.weights.device_buffer.torch.empty", full)
    with publisher("ipc") as source:
        with pytest.raises(torch.OutOfMemoryError):
            source.publish(1, model(1), about(receivers), 2)
        source._device_buffer._optional, source._transport._wanted = True, "auto"
        report = source.publish(2, model(2), about(receivers), 2)
        assert report.transport == "shared" and all(serves(one, 2, tensors(2)) for one in receivers)
    assert "cpu has no memory for" in caplog.text


def test_a_group_of_devices_gets_the_version_from_the_publishers_device(receivers, monkeypatch):
    buffer = DeviceBuffer(optional=True)
    with publisher("gloo") as source:
        source._device_buffer = source._transport._device_buffer = buffer
        monkeypatch.setattr(source._transport._sender("gloo"), "_device_buffer", buffer)
        write = source._copies.write

        def write_and_spoil(*args, **kwargs):
            copy = write(*args, **kwargs)
            copy.memory.data[: copy.nbytes] ^= 1
            return copy

        monkeypatch.setattr(source._copies, "write", write_and_spoil)
        report = source.publish(1, model(1), about(receivers), 2)
        assert report.transport == "gloo" and all(serves(one, 1, tensors(1)) for one in receivers)
        assert not buffer.is_allocated


def test_a_model_of_another_shape_is_refused_before_any_data_moves(receivers):
    with publisher() as source:
        source.publish(1, model(1), about(receivers), 2)
    wrong = {**tensors(2), "b": torch.zeros(4), "x": torch.zeros(1)}
    with publisher() as other, pytest.raises(DeadlineExceeded, match=r"b must be float32 \[3\], got float32 \[4\]"):
        other.publish(2, source_of(wrong), about(receivers), 1)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["shared", "stream"])
def test_a_late_joiner_pulls_the_committed_version(receivers, elsewhere):
    with publisher() as source:
        with pytest.raises(InfrastructureError, match="no version is committed"):
            receivers[1].call("pull", source.address)
        report = source.publish(1, model(1), about(receivers[:1]), 1)
        for version in (2, 3):
            report = source.publish(version, model(version), about(receivers[:1]), 1)
            assert receivers[1].call("pull", source.address, elsewhere=elsewhere) == [version, report.digest]
            assert serves(receivers[1], version, tensors(version))


def test_a_removed_segment_is_told_joiners_get_a_stream_and_the_next_version_a_segment(receivers, caplog):
    with publisher() as source:
        source.publish(1, model(1), about(receivers[1:]), 1)
        removed = source._pull_server.committed.memory.segment
        (tokens.DIRECTORY / removed).unlink()
        assert receivers[0].call("pull", source.address)[0] == 1 and serves(receivers[0], 1, tensors(1))
        assert caplog.text.count(f"segment {removed} with version 1 of the weights was removed by somebody") == 1
        source.publish(2, model(2), about(receivers), 2)
        written = source._pull_server.committed.memory
        assert written.segment != removed and written.exists()
        assert all(serves(receiver, 2, tensors(2)) for receiver in receivers)


class SlowSource(StateSource):
    """Waits for `go` before its first bucket."""

    def __init__(self, weights):
        super().__init__(weights, dtype="float32", bucket_bytes=1 << 20)
        self.began, self.go = threading.Event(), threading.Event()

    def buckets(self, device):
        self.began.set()
        assert self.go.wait(120)
        yield from super().buckets(device)


def test_a_pull_during_a_publish_gets_the_version_being_published(receivers):
    with publisher() as source:
        source.publish(1, model(1), about(receivers[:1]), 1)
        slow, pulled, reports = SlowSource(tensors(2)), [], []
        publishing = threading.Thread(target=lambda: reports.append(source.publish(2, slow, about(receivers[:1]), 1)))
        publishing.start()
        assert slow.began.wait(120) and source.current() == (-1, "")
        joiner = threading.Thread(target=lambda: pulled.append(receivers[1].call("pull", source.address)))
        joiner.start()
        slow.go.set()
        publishing.join(120)
        joiner.join(120)
        assert pulled == [[2, reports[0].digest]] and serves(receivers[1], 2, tensors(2))


def test_a_source_that_fails_leaves_nothing_under_way_and_the_next_version_is_published(receivers):
    class Broken(StateSource):
        def buckets(self, device):
            yield next(super().buckets(device))
            raise OSError("the device is gone")

    with publisher() as source:
        source.publish(1, model(1), about(receivers), 2)
        with pytest.raises(OSError, match="the device is gone"):
            source.publish(2, Broken(tensors(2), bucket_bytes=1 << 20), about(receivers), 2)
        with pytest.raises(InfrastructureError, match="no version is committed"):
            receivers[1].call("pull", source.address)
        assert all(serves(receiver, 1, tensors(1)) for receiver in receivers)  # nobody was told
        source.publish(2, model(2), about(receivers), 2)
        assert all(serves(receiver, 2, tensors(2)) for receiver in receivers)


def test_training_goes_on_over_a_held_copy_and_the_segment_comes_back(receivers):
    with publisher() as source:
        source.publish(1, model(1), about(receivers), 2)
        store, held = source._copies._store, source._pull_server.committed
        lent = store.stats()["lent"]  # with those of publishers that other files keep
        source._copies.hold(held, "a slow joiner")
        before = held.memory.data.copy()
        for version in range(2, 6):
            source.publish(version, model(version), about(receivers), 2)
        assert (held.memory.data == before).all()
        created = store.stats()["created"]
        source._copies.drop(held, "a slow joiner")
        for version in range(6, 9):
            source.publish(version, model(version), about(receivers), 2)
        assert store.stats()["created"] == created and store.stats()["lent"] == lent
        assert all(serves(receiver, 8, tensors(8)) for receiver in receivers)


def test_a_receiver_killed_in_a_transfer_is_named_and_the_others_serve(receivers, transport):
    doomed = Receiver("rollout:9")
    with started(doomed), publisher(transport) as source:
        everybody = [*about(receivers), doomed.about]
        assert len(source.publish(1, model(1), everybody, 3).acked) == 3
        doomed.call("set_trap", "die")
        report = source.publish(2, model(2), everybody, 2)
        assert report.acked == ("rollout:0", "rollout:1")
        state = "offered with its data, not applied" if transport == "shared" else "ready, not applied"
        assert state in report.failed["rollout:9"] and "WorkerLost" in report.failed["rollout:9"]
        assert all(serves(receiver, 2, tensors(2)) for receiver in receivers)


def test_too_few_acknowledgements_name_each_missing_receiver_with_its_state(receivers):
    missing = replace(receivers[1].about, name="rollout:9", address="tcp://127.0.0.1:9")
    brief = Deadlines(sync_seconds=10, straggler_seconds=0.2)
    with publisher(deadlines=brief) as source:
        with pytest.raises(DeadlineExceeded) as caught:
            source.publish(3, model(3), [receivers[0].about, missing], 2)
        assert "must be acknowledged by 2 rollouts, got 0 of 2" in str(caught.value)
        assert "rollout:0 applied, not committed for" in str(caught.value)
        assert "rollout:9 failed for" in str(caught.value) and "not answered within " in str(caught.value)
        assert source.current() == (-1, "") and not receivers[0].call("probe")["serving"]
        loads = receivers[0].call("probe")["loads"]
        source.publish(3, model(3), about(receivers), 2)  # offered again: what was applied is not sent twice
        assert receivers[0].call("probe")["loads"] == loads
        assert all(serves(receiver, 3, tensors(3)) for receiver in receivers)


def test_a_receiver_that_never_answers_keeps_neither_the_others_from_serving_nor_the_trainer(receivers):
    missing = replace(receivers[1].about, name="rollout:9", address="tcp://127.0.0.1:9")
    with publisher(deadlines=HASTY) as source:
        report = source.publish(1, model(1), [*about(receivers), missing], 2)
        assert all(serves(receiver, 1, tensors(1)) for receiver in receivers)
        assert (report.late, report.failed, source.current()[0]) == (("rollout:9",), {}, 1)
        source.lost("rollout:9", "the hub declared it dead")
        late = asyncio.run(source.late_receivers())
        assert late.acked == () and "the hub declared it dead" in late.failed["rollout:9"]


def test_a_publisher_killed_before_commit_leaves_receivers_not_serving_until_the_next_epoch(receivers):
    command = [sys.executable, "-m", "tests.integration.weight_publisher_child", str(next(epochs))]
    child = subprocess.run(
        [*command, json.dumps([asdict(one) for one in about(receivers)]), json.dumps(SHAPES)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    assert child.returncode == -signal.SIGKILL
    for receiver in receivers:
        probe = receiver.call("probe")
        assert (probe["serving"], probe["current"]) == (False, [-1, ""])
    with publisher() as restarted:
        restarted.publish(1, model(5), about(receivers), 2)
    assert all(serves(receiver, 1, tensors(5)) for receiver in receivers)


def test_syncs_with_keys_over_an_authentic_and_an_encrypted_stream(tmp_path):
    for name, text in generate_keys(["actor", "rollout"]).items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    with started(*(Receiver(f"rollout:{i}", keys=str(tmp_path)) for i in range(2))) as (receiver, other):
        for version, encrypt in ((1, False), (3, True)):
            identity = Identity(
                job="j", namespace="n", uid="u", epoch=0, role="actor", pod="p", pod_index=0, group="actor", rank=0,
                world_size=1,
            )  # fmt: skip
            keys = KeyRing(tmp_path, "actor")
            weights = {"bucketBytes": 1 << 20, "encrypt": encrypt, "fanout": 1}
            source = WeightPublisher(
                {**SPEC, "weights": weights},
                0,
                identity=identity,
                keys=keys,
                deadlines=PATIENT,
                host_token="elsewhere",
            )
            client = RpcClient(receiver.about.address, keys, identity, service="rollout")
            try:
                report = source.publish(version, model(version), about([receiver, other]), 2)
                assert report.transport == "stream" and report.acked == ("rollout:0", "rollout:1")
                assert len(report.relayed) == 1  # with the key of the rollout that passed it on
                source.publish(version + 1, model(version + 1), [], 0)
                assert client.call_sync("pull", source.address, elsewhere=True)[0] == version + 1
            finally:
                client.close()
                source.close()
