"""Weight sync beside memcpy and raw pyzmq: a model to receivers in processes of their own. Prints JSON.

    OMP_NUM_THREADS=1 python benchmarks/weight_sync.py [--megabytes 200] [--receivers 2] [--runs 9]

"publish" is the whole call (copy to host memory, handshake, transfer, verification, last ACK); "sync" is OFFER to last ACK,
as trainers.md 13 defines it; "pause" is how long the slowest receiver served nothing. GB/s count the model's bytes once,
however many receivers. The peers, in turns with ours so that a busy machine slows them alike: memcpy of the same bytes in
one thread, and in as many processes at once as there are receivers (what their memory allows); raw pyzmq with 1 MiB
messages, 16 in flight per receiver, to the same number of processes, which drop them ("plain"), or hash and copy them as
we must ("tagged"). Medians. The small model (77,000 parameters in 21 tensors, one receiver, syncs 30 ms apart as between
training steps) stands beside as many raw pyzmq round trips of a manifest's size as the protocol has: OFFER and COMMIT.
"patch" has the same model in bfloat16, 0.1, 1 and 3 % of its elements changed at random in all tensors, beside full weights in turns:
times over those of full weights, bytes, and whether the receivers hold the same bits. `--only patch` prints this part alone.
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
TINY_BYTES = 4_000_000
SMALL_LAYER = {
    **{f"attention.{name}": [64, 64] for name in "qkvo"},
    "gate": [96, 64],
    "up": [96, 64],
    "down": [64, 96],
    "norm1": [64],
    "norm2": [64],
}
SMALL_SHAPES = {
    "embed": [50, 64],
    **{f"layer{index}.{name}": shape for index in range(2) for name, shape in SMALL_LAYER.items()},
    "norm": [64],
    "head": [50, 64],
}
PATCH_SHARES = (0.001, 0.01, 0.03)
ROUND_TRIPS = 2
MANIFEST_BYTES = 900
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
    from rl_core.weights import assembly, words
    from rl_core.weights.manifest import checksum
    from rl_core.weights.receiver import WeightReceiver

    torch.set_num_threads(1)
    if not options["checksums"]:
        trust_all(assembly, words)

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


def trust_all(assembly, words):
    """Take the checksums out: what the copy alone costs."""
    always = (0, 0)
    words.sum_bytes = lambda source, offset=0: always
    words.copy_bytes = lambda destination, source, offset=0: (np.copyto(destination, source), always)[1]
    words.add = lambda first, second: always


def serve_raw(options):
    """Raw pyzmq: take messages until the whole model arrived, then say so; "tagged": hash and copy each. Or "memcpy"."""
    from blake3 import blake3

    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(options["address"])
    target, source = np.zeros(options["nbytes"], np.uint8), np.ones(options["nbytes"], np.uint8)
    print("{}", flush=True)
    for line in sys.stdin:
        if line.strip() == "memcpy":
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


# --- measuring --------------------------------------------------------------------------------------------------------


class Case:
    """A publisher and its receivers."""

    def __init__(
        self, shapes, receivers, *, host_token=None, in_place=True, checksums=True, dtype="float32", weights=None
    ):
        import torch

        from rl_core.messages.weights import ReceiverAddress
        from rl_core.weights.publisher import WeightPublisher

        self.shapes = shapes
        self.others = [
            Other("receiver", shapes=self.shapes, in_place=in_place, checksums=checksums, dtype=dtype)
            for _ in range(receivers)
        ]
        self.receivers = [ReceiverAddress(name=f"rollout:{i}", **other.about) for i, other in enumerate(self.others)]
        spec = {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"promptsPerStep": 1, "steps": 1}}
        self.publisher = WeightPublisher({**spec, "weights": weights or {}}, 0, host_token=host_token)
        self.state = {name: torch.randn(shape).to(getattr(torch, dtype)) for name, shape in self.shapes.items()}
        self.version = 0
        self.reports = []

    def run(self):
        from rl_core.weights.version_source import StateSource

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


def measure(nbytes, receivers, runs):
    from rl_core.weights import words

    own = (words.sum_bytes, words.copy_bytes, words.add)
    shapes = shapes_of(nbytes)
    cases = {
        "shared memory": Case(shapes, receivers),
        "shared memory, engine copies": Case(shapes, receivers, in_place=False),
        "stream": Case(shapes, receivers, host_token="another host"),
        "shared memory, no checksums": Case(shapes, receivers, checksums=False),
    }
    data = np.random.default_rng(0).integers(0, 255, nbytes, dtype=np.uint8)
    target, raw = np.zeros_like(data), RawStar(data, receivers)
    peers = defaultdict(list)
    warm = 2
    for _ in range(runs + warm):
        for name, case in cases.items():
            if name.endswith("no checksums"):
                trust_all(None, words)
            case.run()
            words.sum_bytes, words.copy_bytes, words.add = own
        began = time.perf_counter()
        np.copyto(target, data)
        peers["memcpy"].append(time.perf_counter() - began)
        peers["memcpy in all receivers at once"].append(raw.memcpy())
        for mode in ("plain", "tagged"):
            peers[f"raw pyzmq, {mode}"].append(raw.push(mode))
    result = {name: summary(case.reports, warm) for name, case in cases.items()}
    speeds = {name: nbytes / statistics.median(seconds[warm:]) / 1e9 for name, seconds in peers.items()}
    result |= {f"{name}, GBps": speed for name, speed in speeds.items()}
    result["ratios"] = {
        "shared memory apply / memcpy in all receivers at once": nbytes
        / result["shared memory"]["apply_ms"]
        / 1e6
        / speeds["memcpy in all receivers at once"],
        "shared memory publish / memcpy": result["shared memory"]["publish_GBps"] / speeds["memcpy"],
        "shared memory sync / memcpy": result["shared memory"]["sync_GBps"] / speeds["memcpy"],
        "shared memory sync without checksums / memcpy": result["shared memory, no checksums"]["sync_GBps"]
        / speeds["memcpy"],
        "stream sync / raw pyzmq, plain": result["stream"]["sync_GBps"] / speeds["raw pyzmq, plain"],
        "stream sync / raw pyzmq, tagged": result["stream"]["sync_GBps"] / speeds["raw pyzmq, tagged"],
    }
    for closing in (*cases.values(), *raw.others):
        closing.close()
    return result


def measure_tiny(receivers, runs):
    """The latency that a step of half a second feels: 4 MB, 1 million parameters."""
    result = {}
    for name, token in (("shared memory", None), ("stream", "another host")):
        case = Case(shapes_of(TINY_BYTES), receivers, host_token=token, in_place=False)
        for _ in range(runs + 5):
            case.run()
        result[name] = summary(case.reports, 5)
        case.close()
    return result


def measure_small(runs):
    """What a sync costs where messages are all of it, and what its messages would cost in raw pyzmq."""
    case, router = Case(SMALL_SHAPES, 1), zmq.Context().socket(zmq.DEALER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    echo = Other("echo", address=f"tcp://127.0.0.1:{port}")
    raw, warm = [], 5
    for _ in range(runs + warm):
        time.sleep(0.03)
        case.run()
        time.sleep(0.03)
        began = time.perf_counter()
        for _ in range(ROUND_TRIPS):
            router.send(bytes(MANIFEST_BYTES))
            router.recv()
        raw.append(time.perf_counter() - began)
    trips = {f"raw pyzmq, {ROUND_TRIPS} round trips, ms": 1e3 * statistics.median(raw[warm:])}
    parameters = {"parameters": sum(tensor.numel() for tensor in case.state.values())}
    for closing in (case, echo):
        closing.close()
    return parameters | summary(case.reports, warm) | trips


def measure_patch(nbytes, runs):
    """What a patch costs over full weights, by the share of the elements that changed; one receiver, each way in turns."""
    shapes = {name: [2 * size for size in shape] for name, shape in shapes_of(nbytes).items()}
    result, warm = {}, 2
    for way, token in (("shared memory", None), ("stream", "another host")):
        options = {"host_token": token, "dtype": "bfloat16"}
        full = Case(shapes, 1, **options)
        patch = Case(shapes, 1, weights={"syncer": "patch"}, **options)
        for share in PATCH_SHARES:
            before = len(full.reports)
            for _ in range(runs + warm):
                for case in (full, patch):
                    case.change(share)
                    case.run()
            reports = {"full": full.reports[before + warm :], "patch": patch.reports[before + warm :]}
            middle = {
                (name, key): statistics.median(getattr(one, key) for one in reports[name])
                for name in reports
                for key in ("seconds", "copy_seconds", "sync_seconds", "apply_seconds", "pause_seconds", "bytes")
            }
            result[f"{way}, {100 * share:g} % changed"] = (
                {
                    f"{name} {key.removesuffix('_seconds')}": value * (1 if key == "bytes" else 1e3)
                    for (name, key), value in middle.items()
                }
                | {
                    f"patch over full, {key}": middle["patch", key] / middle["full", key]
                    for key in ("seconds", "sync_seconds", "bytes")
                }
                | {"bit-equal": patch.equal(), "patched": all(one.patched for one in reports["patch"])}
            )
        for case in (full, patch):
            case.close()
    return result


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--only", choices=["patch"], help="print one part alone")
    parser.add_argument("--serve")
    parser.add_argument("--options", default="{}")
    arguments = parser.parse_args()
    if arguments.serve:
        {"receiver": serve_receiver, "raw": serve_raw, "echo": serve_echo}[arguments.serve](
            json.loads(arguments.options)
        )
        return
    import platform

    import torch

    torch.set_num_threads(1)
    result = {
        "machine": {"cores": os.cpu_count(), "load": os.getloadavg(), "python": platform.python_version()},
        "versions": {"torch": torch.__version__, "pyzmq": zmq.pyzmq_version(), "libzmq": zmq.zmq_version()},
        "receivers": arguments.receivers,
        "runs": arguments.runs,
        f"patch, {arguments.megabytes} MB, 1 receiver, ms": measure_patch(arguments.megabytes * 10**6, arguments.runs),
    }
    if arguments.only is None:
        result |= {
            f"{arguments.megabytes} MB": measure(arguments.megabytes * 10**6, arguments.receivers, arguments.runs),
            f"{arguments.megabytes} MB, 1 receiver": measure(arguments.megabytes * 10**6, 1, arguments.runs),
            "4 MB": measure_tiny(arguments.receivers, 40),
            "77k parameters, 1 receiver": measure_small(100),
        }
    result["machine"]["load_at_end"] = os.getloadavg()
    print(json.dumps(rounded(result), indent=2))


if __name__ == "__main__":
    main()
