"""What benchmarks of weight sync share: receivers and raw pyzmq as processes of their own, and a publisher with its receivers.

python benchmarks/_weight_world.py --serve receiver|raw|echo --options JSON     # one such process
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import zmq

CHUNK, WINDOW = 2**20, 16
KEY = bytes(32)


def shapes_of(nbytes):
    """Return a model of `nbytes`: 50 tensors like a small transformer's, float32."""
    words = nbytes // 4
    embedding = words // 4
    layer = (words - embedding) // 49
    return {"embed": [embedding], **{f"layer{index}": [layer] for index in range(49)}}


# --- receivers, each a process ----------------------------------------------------------------------------------------


def serve_receiver(options):
    """A WeightReceiver over a dict of tensors, written in place or copied by the engine."""
    import torch

    from rl_core.transports import tokens
    from rl_core.transports.rpc import RpcServer
    from rl_core.weights import assembly, checksums
    from rl_core.weights.manifest import checksum
    from rl_core.weights.receiver import WeightReceiver

    torch.set_num_threads(1)
    if not options["checksums"]:
        trust_all(assembly, checksums)

    class Engine:
        def __init__(self):
            dtype = getattr(torch, options["dtype"])
            self.weights = {name: torch.zeros(shape, dtype=dtype) for name, shape in options["shapes"].items()}
            if options["in_place"]:
                self.destinations = lambda: self.weights

        async def prepare(self, deadline):
            pass

        def names_and_shapes(self):
            return {name: (tuple(tensor.shape), options["dtype"]) for name, tensor in self.weights.items()}

        def load(self, tensors, version):
            for name, tensor in tensors:
                self.weights[name].copy_(tensor)

        async def resume(self, version, digest):
            pass

    engine = Engine()
    receiver = WeightReceiver(None, None, 0, engine)

    async def sums():
        return {name: [hex(part) for part in checksum(tensor)] for name, tensor in engine.weights.items()}

    server = RpcServer("tcp://127.0.0.1:0", {"sums": sums, **receiver.handlers()}).start()
    print(json.dumps({"address": server.address, "host_token": tokens.host_token()}), flush=True)
    sys.stdin.read()


def trust_all(assembly, checksums):
    """Take the checksums out: what the copy alone costs."""
    always = (0, 0)
    checksums.sum_bytes = lambda source, offset=0: always
    checksums.copy_bytes = lambda destination, source, offset=0: (np.copyto(destination, source), always)[1]
    checksums.add = lambda first, second: always


def serve_raw(options):
    """Raw pyzmq: take messages until the whole model arrived, then say so; "tagged": hash and copy each. Or "memcpy"."""
    from blake3 import blake3

    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(options["address"])
    target, source = np.zeros(options["nbytes"], np.uint8), None
    print("{}", flush=True)
    for line in sys.stdin:
        if line.strip() == "memcpy":
            source = np.ones_like(target) if source is None else source
            began = time.perf_counter()
            np.copyto(target, source)
            socket.send_multipart([b"done", int(1e9 * (time.perf_counter() - began)).to_bytes(8, "little")])
            continue
        tagged, taken = line.strip() == "tagged", 0
        socket.send_multipart([b"credit", WINDOW.to_bytes(4, "little")])
        while taken < target.size:
            *tag, frame = socket.recv_multipart(copy=False)
            data = np.frombuffer(frame.buffer, np.uint8)
            if tagged:
                assert blake3(data, key=KEY).digest() == tag[0].bytes
                np.copyto(target[taken : taken + data.size], data)
            taken += data.size
            if (taken // CHUNK) % 4 == 0:
                socket.send_multipart([b"credit", (4).to_bytes(4, "little")])
        socket.send_multipart([b"done", b""])


def serve_echo(options):
    """Raw pyzmq: answer each message with one of its size."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(options["address"])
    print("{}", flush=True)
    while True:
        socket.send(socket.recv())


class Other:
    """A process of this file; `about` is its first line of output."""

    def __init__(self, what, **options):
        command = [sys.executable, __file__, "--serve", what, "--options", json.dumps(options)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = json.loads(self.process.stdout.readline())

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class RawStar:
    """The peer's publisher: one ROUTER, credit per receiver, messages of 1 MiB without copies."""

    def __init__(self, data, receivers):
        self.data = data
        self.router = zmq.Context().socket(zmq.ROUTER)
        self.router.set_hwm(0)
        port = self.router.bind_to_random_port("tcp://127.0.0.1")
        options = {"address": f"tcp://127.0.0.1:{port}", "nbytes": data.size}
        self.others = [Other("raw", **options) for _ in range(receivers)]

    def memcpy(self):
        """Return the seconds of the slowest process when all copy the same number of bytes at once."""
        for other in self.others:
            print("memcpy", file=other.process.stdin, flush=True)
        return max(int.from_bytes(self.router.recv_multipart()[2], "little") for _ in self.others) / 1e9

    def push(self, mode):
        from blake3 import blake3

        for other in self.others:
            print(mode, file=other.process.stdin, flush=True)
        started, credit, sent, done, tags = None, {}, defaultdict(int), 0, {}
        while done < len(self.others):
            peer, kind, amount = self.router.recv_multipart()
            started = started or time.perf_counter()
            done += kind == b"done"
            credit[peer] = credit.get(peer, 0) + int.from_bytes(amount, "little")
            while credit[peer] > 0 and sent[peer] < self.data.size:
                chunk = self.data[sent[peer] : sent[peer] + CHUNK]
                parts = [chunk]
                if mode == "tagged":
                    if sent[peer] not in tags:
                        tags[sent[peer]] = blake3(chunk, key=KEY).digest()
                    parts = [tags[sent[peer]], chunk]
                self.router.send_multipart([peer, *parts], copy=False)
                sent[peer] += chunk.size
                credit[peer] -= 1
        return time.perf_counter() - started


class Case:
    """A publisher and its receivers."""

    def __init__(
        self,
        shapes,
        receivers,
        *,
        host_token=None,
        in_place=True,
        checksums=True,
        dtype="float32",
        weights=None,
        state=None,
        epoch=0,
        others=None,
    ):
        """`state`: the trained weights; None = random ones. `others`: receivers of an earlier case; None = new ones."""
        import torch

        from rl_core.messages.weights import ReceiverAddress
        from rl_core.weights.publisher import WeightPublisher

        self.shapes = shapes
        self.others = others or [
            Other("receiver", shapes=self.shapes, in_place=in_place, checksums=checksums, dtype=dtype)
            for _ in range(receivers)
        ]
        self.receivers = [ReceiverAddress(name=f"rollout:{i}", **other.about) for i, other in enumerate(self.others)]
        spec = {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"promptsPerStep": 1, "steps": 1}}
        self.publisher = WeightPublisher({**spec, "weights": weights or {}}, epoch, host_token=host_token)
        self.state = state or {
            name: torch.randn(shape).to(getattr(torch, dtype)) for name, shape in self.shapes.items()
        }
        self.version = 0
        self.reports = []

    def run(self):
        from tests.weight_samples import StateSource

        self.version += 1
        self.state["embed"][0] = self.version
        self.reports.append(
            self.publisher.publish(self.version, StateSource(self.state), self.receivers, len(self.receivers))
        )

    def change(self, share):
        """Change the lowest bit of a share of the elements of every tensor."""
        import torch

        for tensor in self.state.values():
            picked = torch.randint(tensor.numel(), (max(1, int(share * tensor.numel())),))
            tensor.view(torch.int16)[picked] ^= 1

    def equal(self):
        """Return whether every receiver holds the bits of the model."""
        from rl_core.transports.rpc import RpcClient
        from rl_core.weights.manifest import checksum

        own = {name: [hex(part) for part in checksum(tensor)] for name, tensor in self.state.items()}
        clients = [RpcClient(other.about["address"]) for other in self.others]
        try:
            return all(client.call_sync("sums", timeout=60) == own for client in clients)
        finally:
            for client in clients:
                client.close()

    def close(self):
        self.publisher.close()
        for other in self.others:
            other.close()


def summary(reports, warm):
    """Return medians of the reports after `warm` runs, milliseconds and GB/s."""
    kept = reports[warm:]
    nbytes = kept[0].bytes
    middle = {
        key: statistics.median(getattr(report, key) for report in kept)
        for key in ("seconds", "copy_seconds", "sync_seconds", "apply_seconds", "pause_seconds")
    }
    return {
        "publish_ms": 1e3 * middle["seconds"],
        "host_copy_ms": 1e3 * middle["copy_seconds"],
        "sync_ms": 1e3 * middle["sync_seconds"],
        "apply_ms": 1e3 * middle["apply_seconds"],
        "pause_ms": 1e3 * middle["pause_seconds"],
        "publish_GBps": nbytes / middle["seconds"] / 1e9,
        "sync_GBps": nbytes / middle["sync_seconds"] / 1e9,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", choices=["receiver", "raw", "echo"], required=True)
    parser.add_argument("--options", default="{}")
    arguments = parser.parse_args()
    serve = {"receiver": serve_receiver, "raw": serve_raw, "echo": serve_echo}[arguments.serve]
    serve(json.loads(arguments.options))


if __name__ == "__main__":
    main()
