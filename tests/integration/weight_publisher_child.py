"""A publisher that dies (SIGKILL) when it is about to commit: argv = epoch, receivers as JSON, shapes as JSON."""

import json
import os
import signal
import sys

import torch

from rl_core.weights.delivery import Delivery
from rl_core.weights.publisher import WeightPublisher

SPEC = {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"promptsPerStep": 1, "steps": 1}}


async def die(self, version, digest, timeout):
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Delivery.commit = die
    publisher = WeightPublisher(SPEC, int(sys.argv[1]))
    receivers, shapes = json.loads(sys.argv[2]), json.loads(sys.argv[3])
    publisher.publish(1, {name: torch.ones(shape) for name, shape in shapes.items()}, receivers, 1)
