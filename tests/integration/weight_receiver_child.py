"""A rollout in miniature, run as a process: an RPC server, a WeightReceiver, an engine that is a dict of tensors."""

import asyncio
import hashlib
import json
import os
import signal
import threading

import torch

from rl_core.api.identity import Identity
from rl_core.transports import tokens
from rl_core.transports.curve import KeyRing
from rl_core.transports.rpc import RpcServer
from rl_core.weights import device_buffer
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.receiver import WeightReceiver


def hash_of(tensor):
    """Return a hash of the bytes that has nothing of the syncer's checksums."""
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy(), digest_size=16).hexdigest()


class Engine:
    """Holds parameters by name.

    `trap` makes it die, freeze or fail in a load, die of a COMMIT, or stop before it is answered; "busy": its rows end when that is cleared.
    """

    def __init__(self, options):
        dtype = getattr(torch, options.get("dtype", "float32"))
        self.weights = {name: torch.zeros(shape, dtype=dtype) for name, shape in options["shapes"].items()}
        self.serving = False
        self.loads = 0
        self.trap = ""

    async def prepare(self, deadline):
        while self.trap == "busy":
            await asyncio.sleep(0.01)
        self.serving = False

    def names_and_shapes(self):
        return {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in self.weights.items()}

    def load(self, tensors, version):
        self.loads += 1
        if self.trap == "die":
            next(tensors, None)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.trap == "freeze":
            signal.pthread_kill(
                threading.get_ident(), signal.SIGSTOP
            )  # this thread goes no further; os.kill stops any first
        if self.trap == "fail":
            raise KeyError("the engine is broken")
        for name, tensor in tensors:
            self.weights[name].copy_(tensor)

    async def resume(self, version, digest):
        if self.trap == "die_of_commit":
            os.kill(os.getpid(), signal.SIGKILL)
        self.serving = True
        if self.trap == "mute_commit":
            self.trap = ""
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            await asyncio.sleep(0.3)  # what came meanwhile, as that the publisher gave the COMMIT up, is heard first


class InPlaceEngine(Engine):
    def destinations(self):
        return self.weights


def own_identity(options):
    if "keys" not in options:
        return None, None
    identity = Identity(
        job="j", namespace="n", uid="u", epoch=options.get("epoch", 0), role="rollout", pod="p", pod_index=0,
        group="rollout", rank=0, world_size=1,
    )  # fmt: skip
    return identity, KeyRing(options["keys"], "rollout")


def run(options, launcher):
    """Send the address over the connection `launcher`, then serve until its other end is closed. `probe` returns what the engine holds."""
    torch.set_num_threads(1)
    asyncio.run(_serve(options, launcher))


async def _serve(options, launcher):
    engine = InPlaceEngine(options) if options.get("in_place") else Engine(options)
    identity, keys = own_identity(options)
    states, mapped_from, mapped = [], [], device_buffer.mapped

    def noted(handle, device):
        mapped_from.append(int(handle[1].split(b"_")[1]))  # the name is /torch_PROCESS_...
        return mapped(handle, device)

    device_buffer.mapped = noted
    receiver = WeightReceiver(
        None,
        identity,
        options.get("epoch", 0),
        engine,
        keys=keys,
        device_uuids=options.get("devices", ()),
        deadlines=Deadlines(silence_seconds=options.get("silence", 15.0)),
        on_state=lambda state, version, digest: states.append(state.value),
    )

    async def probe():
        return {
            "current": list(receiver.current()),
            "state": receiver.state.value,
            "states": states[-10:],
            "serving": engine.serving,
            "bits": {name: hash_of(tensor) for name, tensor in engine.weights.items()},
            "loads": engine.loads,
            "mapped_from": mapped_from,
        }

    async def set_trap(trap):
        engine.trap = trap

    async def pull(address, elsewhere=False):
        if elsewhere:
            tokens.host_token = lambda: "elsewhere"
        return list(await receiver.pull(address, timeout=60))

    async def set_epoch(epoch):
        receiver.set_epoch(epoch)

    async def forget():
        receiver.forget()

    async def flip(name, row=-1, byte=-1):
        engine.weights[name].view(torch.uint8)[row, byte] ^= 1

    own = {"probe": probe, "pull": pull, "set_trap": set_trap, "set_epoch": set_epoch, "forget": forget, "flip": flip}
    handlers = {**own, **receiver.handlers()}
    server = RpcServer("tcp://127.0.0.1:0", handlers, keys, identity).start()
    launcher.send_bytes(json.dumps({"address": server.address, "host_token": tokens.host_token()}).encode())
    await asyncio.to_thread(launcher.poll, None)
    await receiver.close()
