"""What tests of weight sync share: receiver processes and the way to talk to them, publishers, and models to publish."""

import contextlib
import functools
import hashlib
import itertools
import json

import torch

from rl_core.api.job import RLJobSpec
from rl_core.messages.weights import ReceiverAddress
from rl_core.transports.rpc import RpcClient
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.publisher import WeightPublisher
from tests.integration import weight_receiver_child
from tests.integration.forks import FORKS
from tests.weight_samples import StateSource

SHAPES = {"a": [500, 700], "b": [3], "c": [11], "d": [300, 999]}
SPEC = {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"promptsPerStep": 1, "steps": 1}}
PATIENT = Deadlines(sync_seconds=600, straggler_seconds=60)
"""On a busy machine a receiver that is only slow is not late."""
HASTY = Deadlines(sync_seconds=600, straggler_seconds=0.2)
epochs = itertools.count(1)


class Receiver:
    """A receiver process and the way to talk to it."""

    def __init__(self, name, **options):
        self._connection, theirs = FORKS.Pipe()
        self.process = FORKS.Process(
            target=weight_receiver_child.run, args=({"shapes": SHAPES, **options}, theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        self.name = name

    def wait(self):
        self.about = ReceiverAddress(name=self.name, **json.loads(self._connection.recv_bytes()))
        return self

    @functools.cached_property
    def client(self):
        return RpcClient(self.about.address)

    def call(self, method, *args, **kwargs):
        return self.client.call_sync(method, *args, timeout=120, **kwargs)

    def stop(self):
        self._connection.close()
        self.process.join(5)
        self.process.kill()  # a zombie of an aborted gloo group may hold the exit
        self.process.join()


@contextlib.contextmanager
def started(*receivers):
    try:
        yield [receiver.wait() for receiver in receivers]
    finally:
        for receiver in receivers:
            receiver.stop()


@contextlib.contextmanager
def publisher(transport="shared", epoch=None, *, deadlines=PATIENT, placement=None, **weights):
    weights = {"bucketBytes": 1 << 20, **weights}
    if transport in ("gloo", "zmq"):
        weights["transport"] = transport
    host_token = "elsewhere" if transport == "stream" else None
    epoch = next(epochs) if epoch is None else epoch
    cfg = RLJobSpec.model_validate({**SPEC, "weights": weights, "placement": placement or {}})
    if transport == "ipc":  # no job may ask for it on a CPU, where shared memory stands in for the device's
        cfg = cfg.model_copy(update={"weights": cfg.weights.model_copy(update={"transport": "ipc"})})
    made = WeightPublisher(cfg, epoch, deadlines=deadlines, host_token=host_token)
    try:
        yield made
    finally:
        made.close()


def tensors(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def model(seed, dtype=torch.float32):
    return source_of(tensors(seed, dtype))


def source_of(weights):
    return StateSource(weights, dtype="float32", bucket_bytes=1 << 20)


def hash_of(tensor):
    """Return a hash of the bytes that has nothing of the syncer's checksums."""
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy(), digest_size=16).hexdigest()


def serves(receiver, version, weights):
    probe = receiver.call("probe")
    bits = {name: hash_of(tensor) for name, tensor in weights.items()}
    return probe["serving"] and probe["current"][0] == version and probe["bits"] == bits


def about(receivers):
    return [receiver.about for receiver in receivers]
