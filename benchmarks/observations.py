"""Bytes copied per image on its way from 8 simulators to the trainer, and images per second, with the CNN of examples/embodied. Prints JSON.

Each simulator is a process; env worker, rollout, channel server and trainer are in this one, with the sockets and the shared memory that they
have between processes. What is counted are the bytes that simulators write into shared memory, that NumPy and torch stack and join, that the
channel copies, and four times those of messages: one copy into the message, one to join it, and two of the socket. Arrays and messages as large
as an image count as images, the others (rewards, actions, headers) apart. What simulators write is counted in a second run, where they are in
this process; the last image of an episode is one of them, and is not trained on.

    python benchmarks/observations.py [--side N] [--horizon N] [--collections N]
"""

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rl_core.api.job import RLJobSpec
from rl_core.batching import trajectories
from rl_core.channel import Channel, puts
from rl_core.channel.client import ChannelClient
from rl_core.channel.server import ChannelServer
from rl_core.envs.gymnasium import GymnasiumVectorEnv
from rl_core.envs.vector_worker import EnvWorker
from rl_core.messages.embodied import CollectionRequest
from rl_core.policies.folder import build_policy
from rl_core.rollouts.multi_step import MultiStepRolloutWorker
from rl_core.transports.arrays import ArrayCodec
from rl_core.workers.context import WorkerContext, stand_alone_identity

EXAMPLE = Path(__file__).parents[1] / "examples" / "embodied"
COPIES_OF_MESSAGE = 4
NUM_ENVS = 8


class Copies:
    """Counts bytes by where they are copied, while it is entered."""

    def __init__(self, image):
        self.bytes = Counter()
        self.others = Counter()
        self._image = image
        self._plain = []

    def _count(self, place, name, kind, size):
        plain = getattr(place, name)

        def counted(*arguments, **options):
            result = plain(*arguments, **options)
            count = size(result, arguments)
            (self.bytes if count >= self._image else self.others)[kind] += count
            return result

        self._plain.append((place, name, plain))
        setattr(place, name, counted)

    def __enter__(self):
        for place, name in ((np, "stack"), (np, "concatenate"), (torch, "stack"), (torch, "cat")):
            self._count(place, name, "stacked", lambda result, _: result.nbytes)
        self._count(ArrayCodec, "unpack", "messages", lambda _, arguments: len(arguments[1]))
        self._count(np, "copyto", "simulator", lambda _, arguments: arguments[0].nbytes)
        self._count(GymnasiumVectorEnv, "_moved", "between collections", lambda _, arguments: kept_bytes(*arguments))
        self._count(puts, "copy_into", "channel", lambda _, arguments: arguments[1].nbytes)
        return self

    def __exit__(self, *error):
        for place, name, plain in self._plain:
            setattr(place, name, plain)


def kept_bytes(env, index, obs, row):
    """Return the bytes of the observation with which a collection begins: it is copied out of one memory and into the next."""
    return 2 * sum(obs[name].nbytes for name in env._columns[index].keys() & obs.keys())


def job(side, horizon, vectorization):
    env = {"id": "_noise:Noise", "kwargs": {"side": side}, "numEnvs": NUM_ENVS, "horizon": horizon}
    env["vectorization"] = vectorization
    return RLJobSpec.model_validate(
        {
            "program": "embodied",
            "model": {"path": "none"},
            "data": {"train": "none"},
            "algorithm": {"name": "gae", "critic": {"gamma": 0.9, "lam": 0.95}},
            "env": {"type": "gymnasium", "options": env},
        }
    )


def measure(side, horizon, collections, vectorization):
    """Return the counted copies of the last collection, and the seconds of each but the first."""
    spec = job(side, horizon, vectorization)
    env, rollout = (
        kind.create_in_context(WorkerContext(replace(stand_alone_identity(), group=group)), spec)
        for kind, group in ((EnvWorker, "env"), (MultiStepRolloutWorker, "rollout"))
    )
    config = json.loads((EXAMPLE / "pixels" / "config.json").read_text())
    config["arguments"]["image"] = [side, side, 3]
    rollout.model = build_policy(json.dumps(config)).eval()
    server = ChannelServer("tcp://127.0.0.1:0").start()
    client = ChannelClient(server.address)
    near = [Channel.create(name, local=True) for name in ("observations", "actions")]
    sent = Channel.create("trajectories", client=client)
    copies, seconds = asyncio.run(collect(env, rollout, near, sent, collections, side * side * 3))
    env.close()
    asyncio.run(rollout.close())
    client.close()
    server.close()
    return copies, seconds[1:]


def per_image(counted, made):
    return {
        name: size * (COPIES_OF_MESSAGE if name == "messages" else 1) / made for name, size in sorted(counted.items())
    }


def report_of(side, horizon, collections):
    apart, seconds = measure(side, horizon, collections, "process")
    inside, _ = measure(side, horizon, 1, "sync")
    image, made = side * side * 3, NUM_ENVS * horizon
    written = inside.bytes["simulator"] - inside.bytes["channel"]  # the channel copies by np.copyto too
    images = per_image(apart.bytes | {"simulator": written}, made)
    others = per_image(apart.others, made)
    return {
        "image_bytes": image,
        "copies_per_image": {name: round(size / image, 3) for name, size in images.items()},
        "copies_per_image_in_all": round(sum(images.values()) / image, 3),
        "other_bytes_per_image": {name: round(size) for name, size in others.items()},
        "images_per_second": [round(made / one) for one in seconds],
    }


async def collect(env, rollout, near, sent, collections, image):
    """Return what the last collection copied, and the seconds of each; the first one learns the shapes of observations."""
    seconds, address = [], await env.direct_address()
    for number in range(1, collections + 2):
        request = CollectionRequest(number=number, step=number, envs=(0,), rollouts=(0,), direct=((0, 0, address),))
        with Copies(image) as copies:
            began = time.perf_counter()
            await asyncio.gather(env.interact(*near[::-1], request), rollout.generate(*near, sent, request))

            received = trajectories.merge_trajectories([await sent.get_async(key=request.trajectory_key(0))])
            seconds.append(time.perf_counter() - began)
        assert received.forward_inputs["pixels"].shape[:2] == (env.options.horizon, NUM_ENVS)
        del received
    return copies, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=84)
    parser.add_argument("--horizon", type=int, default=64)
    parser.add_argument("--collections", type=int, default=5)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    torch.set_num_threads(1)
    report = report_of(options.side, options.horizon, options.collections)
    print(
        json.dumps(report | {"target": {"copies_per_image_in_all": 2}, "load": round(os.getloadavg()[0], 1)}, indent=1)
    )


if __name__ == "__main__":
    main()
