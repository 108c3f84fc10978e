"""The processes of an SGLang engine read a version where the publisher has it: shared memory, memory by handle, a process group.

An engine of two tensor-parallel processes. Truth is what transformers computes with the published weights.
"""

import os
import signal

import pytest
import torch

from rl_core.api.errors import DeadlineExceeded
from rl_core.messages.weights import ReceiverAddress
from rl_core.rollouts.engine import PROVEN
from rl_core.rollouts.sglang import SGLangWorker, setup
from rl_core.transports import tokens
from rl_core.weights.host_copy import HostCopy
from tests.integration.conftest import ARGUMENTS
from tests.integration.rollout_world import World, random_state, trainer_logprobs, transformers_model
from tests.integration.weight_world import Receiver, publisher, started
from tests.weight_samples import StateSource

BUCKET_BYTES = 1 << 14
"""The version has several buckets."""
PROMPT = list(range(2, 34))
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def world():
    options = setup.options
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        patch.setenv(
            "SGLANG_NCCL_SO_PATH", "none"
        )  # else SGLang makes a communicator of GPUs as soon as the library is there
        patch.setattr(setup, "options", lambda *arguments: options(*arguments) | {"tp_size": 2})
        made = World(SGLangWorker, max_seq_len=64, engine="sglang", engineArgs=ARGUMENTS)
        made.start()
    yield made
    made.close()


def engine_of(world):
    return ReceiverAddress(name="rollout:0", address=world.server.address, host_token=tokens.host_token())


def publish(world, source, version, *others, seed=None):
    state = StateSource(random_state(version if seed is None else seed), bucket_bytes=BUCKET_BYTES)
    return source.publish(version, state, [engine_of(world), *(other.about for other in others)], 1)


def serves(world, version, seed=None):
    """Return whether the engine serves the weights of `version`: it says so, they are proven, and it computes with them."""
    status = world.worker.status()
    assert (status["version"], status["weights_proof"]) == (version, PROVEN)
    answer = world.on_loop(world.worker.probe(PROMPT, 8))
    model = transformers_model(random_state(version if seed is None else seed))
    return (torch.tensor(answer.logprobs) - trainer_logprobs(model, PROMPT, answer.ids)).abs().max() < 1e-4


def at_bucket(monkeypatch, number, act):
    """Call `act` before the publisher sends the bucket `number`, once."""
    buckets, waiting = HostCopy.buckets, [act]

    def with_fault(copy, device):
        for index, bucket in enumerate(buckets(copy, device)):
            if index == number and waiting:
                waiting.pop()()
            yield bucket

    monkeypatch.setattr(HostCopy, "buckets", with_fault)


@pytest.mark.parametrize("transport", ["shared", "gloo", "ipc"])
def test_versions_reach_both_processes_and_pass_no_other(world, transport):
    with publisher(transport, bucketBytes=BUCKET_BYTES) as source:
        for version in range(1, 4):
            report = publish(world, source, version, seed=10 * version)
            assert report.transport == transport and report.bytes > 3 * BUCKET_BYTES
            assert serves(world, version, seed=10 * version)
    buffer = world.engine.weight_target._buffer.bytes
    assert not buffer.any(), "the memory through which the worker passes tensors was never written"


def test_a_wrong_tensor_is_named_and_the_next_version_is_whole(world, monkeypatch):
    with publisher("gloo", bucketBytes=BUCKET_BYTES) as source:
        write = source._copies.write

        def write_wrongly(*args, **kwargs):
            copy = write(*args, **kwargs)
            names = [entry.name for entry in copy.manifest.entries]
            copy.memory.data[copy.layout.starts[names.index(DOWN)]] ^= 1
            return copy

        with monkeypatch.context() as patch, pytest.raises(DeadlineExceeded, match=DOWN):
            patch.setattr(source._copies, "write", write_wrongly)
            publish(world, source, 1)
        assert world.worker.status()["version"] == -1
        assert publish(world, source, 2).transport == "gloo" and serves(world, 2)


def test_a_receiver_that_dies_in_a_broadcast_is_named_and_the_group_is_formed_without_it(world, monkeypatch):
    shapes = {name: list(tensor.shape) for name, tensor in random_state(0).items()}
    with (
        started(Receiver("rollout:1", shapes=shapes)) as (other,),
        publisher("gloo", bucketBytes=BUCKET_BYTES) as source,
    ):
        assert publish(world, source, 1, other).acked == ("rollout:0", "rollout:1")
        at_bucket(monkeypatch, 2, other.process.kill)
        report = publish(world, source, 2, other)
        assert report.acked == ("rollout:0",) and report.transport == "gloo" and list(report.failed) == ["rollout:1"]
        assert serves(world, 2)


def test_an_engine_that_dies_in_a_broadcast_is_named_and_the_others_serve(world, monkeypatch):
    shapes = {name: list(tensor.shape) for name, tensor in random_state(0).items()}
    with (
        started(Receiver("rollout:1", shapes=shapes)) as (other,),
        publisher("gloo", bucketBytes=BUCKET_BYTES) as source,
    ):
        publish(world, source, 1, other)
        pids = world.engine.engine.pids
        at_bucket(monkeypatch, 2, lambda: os.kill(pids[2], signal.SIGKILL))
        report = publish(world, source, 2, other)
        assert report.acked == ("rollout:1",) and list(report.failed) == ["rollout:0"]
        assert world.engine.weight_target.group == "", "its successor will be in no group"
