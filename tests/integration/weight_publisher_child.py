"""A publisher that dies (SIGKILL) when it is about to commit: argv = epoch, receivers as JSON, shapes as JSON."""

import json
import os
import signal
import sys

import torch

from rl_core.messages.weights import ReceiverAddress
from rl_core.weights.handshake import Handshake
from rl_core.weights.publisher import WeightPublisher
from tests.weight_samples import StateSource

SPEC = {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"promptsPerStep": 1, "steps": 1}}


async def die(self, version, digest, timeout):
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Handshake.commit = die
    publisher = WeightPublisher(SPEC, int(sys.argv[1]))
    receivers = [ReceiverAddress(**one) for one in json.loads(sys.argv[2])]
    shapes = json.loads(sys.argv[3])
    weights = {name: torch.ones(shape) for name, shape in shapes.items()}
    publisher.publish(1, StateSource(weights), receivers, 1)
