"""Speed of RPC, channels, tensors and bulk streams beside Ray, raw pyzmq and memcpy, in one run. Prints JSON.

    OMP_NUM_THREADS=1 python benchmarks/transports.py [--runs 5] [--no-ray]

Every figure is the median over runs in which ours and the peers take turns, so that a busy machine slows them alike. All
servers are processes of their own. Units: calls or items per second (put then get, one after the other), GB/s. RPC and
channel carry torch tensors, as the product's do; `numpy` rows say the same of arrays, which Ray does not pickle.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import zmq
from blake3 import blake3

KIB, MIB = 2**10, 2**20
SIZES = {"1KB": KIB, "1MB": MIB, "64MB": 64 * MIB}
KINDS = {"": lambda size: torch.ones(size, dtype=torch.uint8), " numpy": lambda size: np.ones(size, np.uint8)}
"""Suffix of a figure's name -> what travels."""
SECONDS = 0.6
STREAM_ITEMS = 200
LIMIT = "limit (2 raw round trips, 1 memcpy)"


# --- processes at the other end ---------------------------------------------------------------------------------------


def serve_rpc():
    from rl_core.transports.rpc import RpcServer

    return RpcServer("tcp://127.0.0.1:0", {"nbytes": lambda array: array.nbytes}).start().address


def serve_channel():
    from rl_core.channel.server import ChannelServer

    return ChannelServer("tcp://127.0.0.1:0").start().address


def serve_echo():
    """Raw pyzmq ROUTER: takes multipart messages, answers with their size; its own thread is the main thread."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    print(f"tcp://127.0.0.1:{port}", flush=True)
    while True:
        peer, *frames = router.recv_multipart(copy=False)
        router.send_multipart([peer.bytes, str(sum(len(frame.buffer) for frame in frames)).encode()])


def serve_bulk():
    """On "bulk": offer 256 MiB. On "plain" and "tagged": push them by raw pyzmq, without and with a BLAKE3 tag each."""
    from rl_core.transports.bulk import WINDOW, BulkSender, chunks

    data = np.ones(256 * MIB, np.uint8)
    sender = BulkSender("tcp://127.0.0.1:0")
    push = zmq.Context().socket(zmq.PUSH)
    push.set_hwm(WINDOW)
    port = push.bind_to_random_port("tcp://127.0.0.1")
    print(f"tcp://127.0.0.1:{port}", flush=True)
    for line in sys.stdin:
        if line.strip() == "bulk":
            ticket = sender.offer([data])
            print(ticket.address, ticket.ticket.hex(), ticket.key.hex(), flush=True)
        else:
            for chunk in chunks([data]):
                if line.strip() == "tagged":
                    push.send(blake3(chunk, key=bytes(32)).digest(), zmq.SNDMORE)
                push.send(chunk, copy=False)
            push.send(b"")


class Other:
    """A process that serves `what`; its first line of output is `address`."""

    def __init__(self, what):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self.line()

    def line(self):
        return self.process.stdout.readline().strip()

    def tell(self, word):
        print(word, file=self.process.stdin, flush=True)

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


# --- measuring --------------------------------------------------------------------------------------------------------


def rate(operation, *, seconds=SECONDS, least=3):
    """Return operations per second over about `seconds`, after a short warm-up."""
    for _ in range(2):
        operation()
    count, began = 0, time.perf_counter()
    while count < least or time.perf_counter() - began < seconds:
        operation()
        count += 1
    return count / (time.perf_counter() - began)


def rpc_cases(stack):
    from rl_core.transports.rpc import RpcClient

    ours, raw = Other("rpc"), Other("echo")
    stack.callback(ours.close)
    stack.callback(raw.close)
    client = RpcClient(ours.address)
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.connect(raw.address)
    cases = {}
    for name in ("1KB", "1MB"):
        for suffix, make in KINDS.items():
            item, array = make(SIZES[name]), np.ones(SIZES[name], np.uint8)
            cases[f"rpc {name}{suffix}", "ours"] = lambda item=item: client.call_sync("nbytes", item)

            def echo(array=array):
                dealer.send(array, copy=False)
                dealer.recv()

            cases[f"rpc {name}{suffix}", "raw pyzmq"] = echo
    return cases


def channel_cases(stack):
    from rl_core.channel import Channel
    from rl_core.channel.client import ChannelClient

    server, raw = Other("channel"), Other("echo")
    stack.callback(server.close)
    stack.callback(raw.close)
    channel = Channel.create("bench", client=ChannelClient(server.address))
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.connect(raw.address)
    cases = {}
    for name, size in SIZES.items():
        array, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

        def limit(array=array, target=target):
            """What no put and get by ZeroMQ can do without: two round trips, and a copy that the producer no longer owns."""
            np.copyto(target, array)
            for _ in range(2):
                dealer.send(b"x")
                dealer.recv()

        for suffix, make in KINDS.items():

            def put_get(item=make(size)):  # noqa: B008 - one item for all calls
                channel.put(item)
                channel.get()

            cases[f"channel put-get {name}{suffix}", "ours"] = put_get
            cases[f"channel put-get {name}{suffix}", LIMIT] = limit
    return cases


def produce_on_demand(address):
    """Put as many items of 1 KB as each line of input says, one after the other."""
    from rl_core.channel import Channel
    from rl_core.channel.client import ChannelClient

    channel = Channel.connect("stream", client=ChannelClient(address))
    item = KINDS[""](KIB)
    for line in sys.stdin:
        for _ in range(int(line)):
            channel.put(item)


def stream_cases(stack):
    """One process puts, this one gets, both with the plain blocking calls."""
    from rl_core.channel import Channel
    from rl_core.channel.client import ChannelClient

    server = Other("channel")
    stack.callback(server.close)
    channel = Channel.create("stream", client=ChannelClient(server.address))
    producer = Other(f"producer={server.address}")
    stack.callback(producer.close)

    def stream():
        producer.tell(STREAM_ITEMS)
        for _ in range(STREAM_ITEMS):
            channel.get()

    return {(f"channel stream {KIB} B, items/s", "ours"): stream}


def tensor_cases(stack):
    """One 64 MB tensor to another process: GB/s. The raw peer sends one frame of the same size in the same mode."""
    from rl_core.transports.rpc import RpcClient

    ours, raw = Other("rpc"), Other("echo")
    for other in (ours, raw):
        stack.callback(other.close)
    array = np.ones(64 * MIB, np.uint8)
    client = RpcClient(ours.address)
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.connect(raw.address)

    def echo():
        dealer.send(array, copy=False)
        dealer.recv()

    return {
        ("64MB by socket, GB/s", "ours"): lambda: client.call_sync("nbytes", array),
        ("64MB by socket, GB/s", "raw pyzmq"): echo,
    }


def bulk_cases(stack):
    from rl_core.messages.weights import BulkTicket
    from rl_core.transports.bulk import WINDOW, BulkReceiver

    other = Other("bulk")
    stack.callback(other.close)
    pull = zmq.Context().socket(zmq.PULL)
    pull.set_hwm(WINDOW)
    pull.connect(other.address)

    def ours():
        other.tell("bulk")
        address, ticket, key = other.line().split()
        for chunk in BulkReceiver(BulkTicket(address=address, ticket=bytes.fromhex(ticket), key=bytes.fromhex(key))):
            del chunk

    def plain():
        other.tell("plain")
        while len(pull.recv(copy=False).buffer):
            pass

    def tagged():
        other.tell("tagged")
        while len(frames := pull.recv_multipart(copy=False)) == 2:
            if blake3(frames[1].buffer, key=bytes(32)).digest() != frames[0].bytes:
                raise AssertionError("a tag does not hold")

    return {
        ("256MB stream, GB/s", "ours"): ours,
        ("256MB stream, GB/s", "raw pyzmq with tags"): tagged,
        ("256MB stream, GB/s", "raw pyzmq without tags"): plain,
    }


def ray_cases(stack):
    import ray
    from ray.util.queue import Queue

    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=1024 * MIB, logging_level="ERROR", log_to_driver=False
    )
    stack.callback(ray.shutdown)

    @ray.remote(num_cpus=0)
    class Actor:
        def nbytes(self, array):
            return array.nbytes

    actor, queue = Actor.remote(), Queue(actor_options={"num_cpus": 0})
    cases = {}
    for name, size in SIZES.items():
        for suffix, make in KINDS.items():
            item = make(size)
            if name != "64MB":
                cases[f"rpc {name}{suffix}", "ray actor"] = lambda item=item: ray.get(actor.nbytes.remote(item))

            def put_get(item=item):
                queue.put(item)
                queue.get()

            cases[f"channel put-get {name}{suffix}", "ray.util.queue"] = put_get

    @ray.remote(num_cpus=0)
    def produce(queue, count):
        item = torch.ones(KIB, dtype=torch.uint8)
        for _ in range(count):
            queue.put(item)

    def stream():
        produced = produce.remote(queue, STREAM_ITEMS)
        for _ in range(STREAM_ITEMS):
            queue.get()
        ray.get(produced)

    cases[f"channel stream {KIB} B, items/s", "ray.util.queue"] = stream
    return cases


FACTORS = {"64MB by": 64 * MIB / 1e9, "256MB": 256 * MIB / 1e9, "channel stream": STREAM_ITEMS}
"""What one operation of a case counts for."""


def measure(runs, with_ray):
    samples = defaultdict(list)
    with contextlib.ExitStack() as stack:
        cases = {}
        for make in (rpc_cases, channel_cases, stream_cases, tensor_cases, bulk_cases):
            cases |= make(stack)
        if with_ray:
            cases |= ray_cases(stack)
        for _ in range(runs):
            for case, operation in sorted(cases.items()):
                factor = next((value for start, value in FACTORS.items() if case[0].startswith(start)), 1.0)
                samples[case].append(rate(operation) * factor)
    return {case: statistics.median(values) for case, values in samples.items()}


GOALS = {
    ("64MB by socket, GB/s", "raw pyzmq"): 0.9,
    ("256MB stream, GB/s", "raw pyzmq with tags"): 0.9,
}
"""(figure, peer) -> the ratio ours / peer to reach."""


def report(figures):
    table = {}
    for (figure, who), value in sorted(figures.items()):
        entry = table.setdefault(figure, {})
        entry[who] = round(value, 2)
        if who != "ours":
            entry[f"ours / {who}"] = round(figures[figure, "ours"] / value, 2)
            if (figure, who) in GOALS:
                entry["goal"] = GOALS[figure, who]
    return table


SERVICES = {
    "rpc": serve_rpc,
    "channel": serve_channel,
    "echo": serve_echo,
    "bulk": serve_bulk,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve and options.serve.startswith("producer="):
        print("ready", flush=True)
        produce_on_demand(options.serve.removeprefix("producer="))
        return
    if options.serve:
        address = SERVICES[options.serve]()
        print(address, flush=True)
        sys.stdin.read()
        return
    figures = measure(options.runs, not options.no_ray)
    load = os.getloadavg()[0]
    print(
        json.dumps(
            {"cores": os.cpu_count(), "load_after": round(load, 1), "runs": options.runs, "figures": report(figures)},
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
