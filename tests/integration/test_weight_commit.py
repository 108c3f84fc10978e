"""The end of a sync between real processes: a receiver, the answer to COMMIT, or COMMIT itself is lost. Nothing unproven is served."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from rl_core.api.errors import DeadlineExceeded
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.handshake import Handshake
from tests.integration.weight_world import Receiver, about, model, publisher, serves, started, tensors


def test_a_receiver_that_dies_of_commit_is_named_the_others_serve_and_its_successor_joins(receivers, caplog):
    doomed, successor = Receiver("rollout:9"), Receiver("rollout:9")
    with started(doomed, successor), publisher("gloo") as source:
        source.publish(1, model(1), [*about(receivers), doomed.about], 3)
        doomed.call("set_trap", "die_of_commit")
        report = source.publish(2, model(2), [*about(receivers), doomed.about], 2)
        doomed.process.join(60)
        assert doomed.process.exitcode == -signal.SIGKILL
        assert report.acked == ("rollout:0", "rollout:1") and list(report.failed) == ["rollout:9"]
        assert "committed, not acknowledged: WorkerLost" in report.failed["rollout:9"]
        assert all(serves(receiver, 2, tensors(2)) for receiver in receivers)
        assert successor.call("pull", source.address) == [2, report.digest] and serves(successor, 2, tensors(2))
        everybody = [*receivers, successor]
        caplog.clear()
        assert source.publish(3, model(3), about(everybody), 3).transport == "gloo"
        assert all(serves(receiver, 3, tensors(3)) for receiver in everybody)
        # Nobody waits for the dead one in a group under the name of its successor.
        assert "is aborted" not in caplog.text


def test_a_receiver_whose_answer_to_commit_is_lost_counts_as_failed_and_proves_later_what_it_serves(receivers):
    mute = Receiver("rollout:9")
    with started(mute), publisher() as source, ThreadPoolExecutor(1) as pool:
        everybody = [*receivers, mute]
        source._deadlines = Deadlines(sync_seconds=30, straggler_seconds=6)
        mute.call("set_trap", "mute_commit")
        report = source.publish(1, model(1), about(everybody), 2)  # its deadline ends it: 6 s for COMMIT
        assert report.acked == ("rollout:0", "rollout:1")
        assert "committed, not acknowledged: DeadlineExceeded" in report.failed["rollout:9"]
        assert all(serves(receiver, 1, tensors(1)) for receiver in receivers)
        os.kill(mute.process.pid, signal.SIGCONT)
        settled(mute, state="serving", version=1)
        assert serves(mute, 1, tensors(1))
        again = source.publish(1, model(1), about(everybody), 3)
        assert len(again.acked) == 3 and again.transport == "none" and mute.call("probe")["loads"] == 1

        mute.call("set_trap", "mute_commit")
        said = pool.submit(source.publish, 2, model(2), about(everybody), 3)
        stopped(mute)
        source.lost("rollout:9", "the hub declared it dead")
        with pytest.raises(
            DeadlineExceeded, match="rollout:9 .*committed, not acknowledged: WorkerLost.*declared it dead"
        ):
            said.result(120)
        assert source.publish(2, model(2), about(receivers), 2).transport == "none"  # those left have it
        assert source.publish(3, model(3), about(everybody), 2).late == ("rollout:9",)
        source.lost("rollout:9", "the hub declared it dead")
        assert list(asyncio.run(source.late_receivers()).failed) == ["rollout:9"]
        # It drops the offer of 3, whose sender has left, or loads it. Nobody commits it.
        os.kill(mute.process.pid, signal.SIGCONT)
        assert mute.call("probe")["current"][0] in (-1, 2)
        assert mute.call("pull", source.address)[0] == 3 and serves(mute, 3, tensors(3))
        source.publish(4, model(4), about(everybody), 3)
        assert all(serves(receiver, 4, tensors(4)) for receiver in everybody)


def test_without_commit_nothing_is_served_and_a_late_one_is_refused_until_the_version_is_offered_again(
    receivers, monkeypatch
):
    plain, go_on = Handshake.commit, threading.Event()

    async def late(handshake, *arguments):
        await asyncio.to_thread(go_on.wait)
        await plain(handshake, *arguments)

    with publisher() as source, ThreadPoolExecutor(1) as pool:
        source.publish(1, model(1), about(receivers), 2)
        source._deadlines = Deadlines(sync_seconds=10)
        with monkeypatch.context() as patch:
            patch.setattr(Handshake, "commit", late)
            said = pool.submit(source.publish, 2, model(2), about(receivers), 2)
            for receiver in receivers:
                settled(receiver, state="dirty")
            go_on.set()
            with pytest.raises(DeadlineExceeded, match="commit refused: version 2 is not applied here, .* dirty"):
                said.result(120)
        probes = [receiver.call("probe") for receiver in receivers]
        assert [(one["serving"], one["current"]) for one in probes] == [(False, [-1, ""])] * 2
        source.publish(2, model(2), about(receivers), 2)
        assert all(serves(receiver, 2, tensors(2)) for receiver in receivers)
        assert [receiver.call("probe")["loads"] for receiver in receivers] == [one["loads"] for one in probes]
        source.publish(3, model(3), about(receivers), 2)
        assert all(serves(receiver, 3, tensors(3)) for receiver in receivers)


def settled(receiver, **wanted):
    """Return what the receiver holds once it is as `wanted`."""
    for _ in range(2000):
        probe = receiver.call("probe")
        if wanted.items() <= (probe | {"version": probe["current"][0]}).items():
            return probe
        time.sleep(0.02)
    raise AssertionError(probe)


def stopped(receiver):
    """Return once the process stands still."""
    for _ in range(2000):
        if psutil.Process(receiver.process.pid).status() == psutil.STATUS_STOPPED:
            return
        time.sleep(0.02)
    raise AssertionError("the trap did not stop it")
