"""Pipelines of one's own beside Ray: channels, calls, messages by name, process groups, in one run. Prints JSON,
and each case to standard error as it ends.

    OMP_NUM_THREADS=1 python benchmarks/pipeline.py [--runs 3] [--only calls] [--no-ray] [--no-gloo]

Every figure is the median over runs in which ours, Ray and the limits take turns, so that a busy machine slows them alike. Beside it stands
the processor time per item or call, of all processes together. Items are made before the first run. A run has 1,000 items of 1 KB, 100 of
1 MB or 32 of 64 MB, for ours and Ray alike. Of Ray's two ways to put an item on a queue, by value and as an object reference, the faster one
counts. The limits are raw pyzmq between two processes and memcpy in one.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import zmq

from rl_core import Channel, Cluster, Worker
from rl_core.plan.placement import NodePlacementStrategy

KIB, MIB = 2**10, 2**20
SIZES = {"1 KB": (KIB, 1000), "1 MB": (MIB, 100), "64 MB": (64 * MIB, 32)}
"""Name of a size -> bytes of an item and items of one run."""
CALLS = 500
SENDS = 10
PAIR = 2
"""Processes of each of the two groups of the pipeline."""
GLOO_MEMBERS = 8

SHORTEST = """\
from rl_core import Channel, Cluster, Worker
class Source(Worker):
    def fill(self, channel):
        channel.put(self.rank, timeout=60)
class Sink(Worker):
    def take(self, channel):
        return channel.get(timeout=60)
if __name__ == "__main__":
    with Cluster.local(processes=2) as cluster:
        source, sink = (kind.create_group().launch(cluster, name=kind.__name__.lower()) for kind in (Source, Sink))
        source.fill(Channel.create("numbers"))
        print(sink.take(Channel.connect("numbers")).wait(timeout=60))
"""
"""The shortest script of two groups and a channel. It is run."""


@functools.cache
def ones(size):
    """Return an item of `size` bytes, made once per process: memory that the kernel clears anew costs more than a copy."""
    return np.ones(size, np.uint8)


class Source(Worker):
    """Makes items, and calls others."""

    def produce(self, channel: Channel, size: int, count: int) -> None:
        item = ones(size)
        for _ in range(count):
            channel.put(item, timeout=60)

    def send_to(self, group: str, size: int, count: int) -> None:
        item = ones(size)
        for _ in range(count):
            self.send(item, group, 0, timeout=60)

    def spread(self, group: str, size: int, count: int) -> None:
        item = ones(size)
        for _ in range(count):
            self.broadcast(item, groups=[group], src=("source", 0), timeout=60)

    async def call_all(self, group: str, size: int, count: int) -> None:
        """Call each of the `size` members of `group` `count` times, with all calls under way at once."""
        while len(members := self.members(group)) < size:
            await self.view_changed()
        clients = [self.peer(member.address) for member in members]
        await asyncio.gather(*(client.call("ping", timeout=60) for _ in range(count) for client in clients))


class Sink(Worker):
    """Takes items, and answers calls."""

    def ping(self) -> int:
        return self.rank

    def consume(self, channel: Channel, count: int) -> int:
        return sum(int(channel.get(timeout=60)[-1]) for _ in range(count))

    def receive(self, count: int) -> int:
        return sum(int(self.recv("source", 0, timeout=60)[-1]) for _ in range(count))

    def join(self, count: int) -> int:
        return sum(
            int(self.broadcast(groups=[self.group_name], src=("source", 0), timeout=60)[-1]) for _ in range(count)
        )


class Member(Worker):
    """A member of a gloo group."""

    def open_store(self) -> int:
        from rl_core.collective.group import GroupStore

        self.store = GroupStore("127.0.0.1")
        return self.store.port

    def form(self, ranks: list[int], port: int, generation: int) -> float:
        """Form the group of `ranks`, broadcast a number in it, and return the seconds that both took."""
        import torch

        from rl_core.collective.group import TensorGroup
        from rl_core.messages.weights import GroupPlan

        began = time.perf_counter()
        plan = GroupPlan(
            name="bench",
            generation=generation,
            epoch=0,
            backend="gloo",
            host="127.0.0.1",
            port=port,
            members=tuple(f"member:{rank}" for rank in ranks),
        )
        group = TensorGroup.form(plan, ranks.index(self.rank), timeout=60)
        number = torch.full((1,), float(self.rank))
        group.broadcast(number, timeout=60)
        assert number.item() == ranks[0]
        self.group = group
        return time.perf_counter() - began

    def end(self) -> None:
        os._exit(1)


def seconds(operation):
    """Return the seconds that `operation` takes, and the processor time meanwhile of this process and all that it started."""
    before, began = processor_times(), time.perf_counter()
    operation()
    took = time.perf_counter() - began
    return took, sum(after - before.get(thread, 0) for thread, after in processor_times().items())


def processor_times():
    """Return the seconds of processor time by thread, of this process and its descendants."""
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                children[parent].append(entry.name)
    todo, times = [str(os.getpid())], {}
    while todo:
        process = todo.pop()
        todo += children[process]
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{process}/task").iterdir():
                times[thread.name] = int((thread / "schedstat").read_text().split()[0]) / 1e9
    return times


# --- ours -------------------------------------------------------------------------------------------------------------


def our_cases(cluster):
    """Return the operations of ours by figure, each with what it counts for."""

    @functools.cache
    def group(kind, count, name):
        """Start the group at its first use, which is in the run that warms up."""
        return kind.create_group().launch(cluster, NodePlacementStrategy([0] * count), name=name)

    source, sources = functools.partial(group, Source, 1, "source"), functools.partial(group, Source, PAIR, "sources")
    sinks, four = functools.partial(group, Sink, PAIR, "sinks"), functools.partial(group, Sink, 4, "four")
    callers, channel, cases = functools.partial(group, Source, 4, "callers"), Channel.create("items", maxsize=8), {}
    for name, (size, count) in SIZES.items():

        def pipeline(size=size, each=count // PAIR):
            taken = sinks().consume(channel, each)
            sources().produce(channel, size, each).wait(timeout=120)
            assert taken.wait(timeout=120) == [each] * PAIR

        cases[f"pipeline {name}, items/s"] = pipeline, count

    def synchronous():
        one = sinks().execute_on(0)
        for _ in range(CALLS):
            one.ping().wait(timeout=60)

    def asynchronous():
        one = sinks().execute_on(0)
        for call in [one.ping() for _ in range(CALLS)]:
            call.wait(timeout=60)

    def send():
        taken = sinks().execute_on(0).receive(SENDS)
        source().send_to("sinks", 64 * MIB, SENDS)
        assert taken.wait(timeout=120) == [SENDS]

    def broadcast():
        taken = four().join(SENDS)
        source().spread("four", 64 * MIB, SENDS)
        assert taken.wait(timeout=120) == [SENDS] * 4

    def four_to_four():
        four()
        callers().call_all("four", 4, CALLS // 4).wait(timeout=60)

    return cases | {
        "calls synchronous, calls/s": (synchronous, CALLS),
        "calls asynchronous, calls/s": (asynchronous, CALLS),
        "calls 4 to 4, calls/s": (four_to_four, 4 * CALLS),
        "send 64 MB, GB/s": (send, SENDS * 64 * MIB / 1e9),
        "broadcast 64 MB to 4, GB/s": (broadcast, SENDS * 64 * MIB / 1e9),
    }


# --- Ray --------------------------------------------------------------------------------------------------------------


def ray_cases():
    import ray
    from ray.util.queue import Queue

    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=2048 * MIB, logging_level="ERROR", log_to_driver=False
    )

    class RaySource:
        def __init__(self):
            self.ones = functools.cache(lambda size: np.ones(size, np.uint8))

        def produce(self, queue, size, count, by_reference):
            item = self.ones(size)
            for _ in range(count):
                queue.put([ray.put(item)] if by_reference else item)

        def call_all(self, actors, count):
            ray.get([actor.ping.remote() for _ in range(count) for actor in actors])

        def send_to(self, actors, size, count):
            item = self.ones(size)
            for _ in range(count):
                reference = ray.put(item)
                ray.get([actor.take.remote(reference) for actor in actors])

    class RaySink:
        def ping(self):
            return 0

        def take(self, item):
            return int(item[-1])

        def consume(self, queue, count):
            total = 0
            for _ in range(count):
                item = queue.get()
                total += int((ray.get(item[0]) if isinstance(item, list) else item)[-1])
            return total

    source_class, sink_class = (ray.remote(num_cpus=0)(kind) for kind in (RaySource, RaySink))
    sources, sinks = [source_class.remote() for _ in range(PAIR)], [sink_class.remote() for _ in range(PAIR)]
    callers, four = [source_class.remote() for _ in range(4)], [sink_class.remote() for _ in range(4)]
    queue, cases = Queue(8, actor_options={"num_cpus": 0}), {}
    for name, (size, count) in SIZES.items():
        for way in (False, True):

            def pipeline(size=size, each=count // PAIR, way=way):
                taken = [sink.consume.remote(queue, each) for sink in sinks]
                ray.get([source.produce.remote(queue, size, each, way) for source in sources])
                assert ray.get(taken) == [each] * PAIR

            cases[f"pipeline {name}, items/s", f"ray by {'reference' if way else 'value'}"] = pipeline, count

    def synchronous():
        for _ in range(CALLS):
            ray.get(sinks[0].ping.remote())

    return cases | {
        ("calls synchronous, calls/s", "ray"): (synchronous, CALLS),
        ("calls asynchronous, calls/s", "ray"): (
            lambda: ray.get([sinks[0].ping.remote() for _ in range(CALLS)]),
            CALLS,
        ),
        ("calls 4 to 4, calls/s", "ray"): (
            lambda: ray.get([caller.call_all.remote(four, CALLS // 4) for caller in callers]),
            4 * CALLS,
        ),
        ("send 64 MB, GB/s", "ray"): (
            lambda: ray.get(sources[0].send_to.remote(sinks[:1], 64 * MIB, SENDS)),
            SENDS * 64 * MIB / 1e9,
        ),
        ("broadcast 64 MB to 4, GB/s", "ray"): (
            lambda: ray.get(sources[0].send_to.remote(four, 64 * MIB, SENDS)),
            SENDS * 64 * MIB / 1e9,
        ),
    }


# --- limits -----------------------------------------------------------------------------------------------------------


def push(address):
    """Push the items that each line of input asks for, `bytes count`, by raw pyzmq."""
    socket = zmq.Context().socket(zmq.PUSH)
    socket.set_hwm(8)
    socket.connect(address)
    for line in sys.stdin:
        size, count = map(int, line.split())
        item = np.ones(size, np.uint8)
        for _ in range(count):
            socket.send(item, copy=False)


def echo(address):
    """Send each request back, by raw pyzmq."""
    socket = zmq.Context().socket(zmq.REP)
    socket.connect(address)
    while True:
        socket.send(socket.recv())


def limit_cases():
    pull = zmq.Context().socket(zmq.PULL)
    pull.set_hwm(8)
    address = f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}"
    pusher = subprocess.Popen([sys.executable, __file__, "--push", address], stdin=subprocess.PIPE, text=True)
    cases = {}
    for name, (size, count) in SIZES.items():

        def raw(size=size, count=count):
            print(size, count, file=pusher.stdin, flush=True)
            for _ in range(count):
                pull.recv(copy=False)

        cases[f"pipeline {name}, items/s", "raw pyzmq"] = raw, count
    requests = zmq.Context().socket(zmq.REQ)
    echo = f"tcp://127.0.0.1:{requests.bind_to_random_port('tcp://127.0.0.1')}"
    echoes = subprocess.Popen([sys.executable, __file__, "--echo", echo])

    def request():
        for _ in range(CALLS):
            requests.send(bytes(100))
            requests.recv()

    cases["calls synchronous, calls/s", "raw pyzmq"] = request, CALLS
    item, target = ones(64 * MIB), np.zeros(64 * MIB, np.uint8)

    def memcpy():
        for _ in range(SENDS):
            np.copyto(target, item)

    cases["send 64 MB, GB/s", "memcpy"] = memcpy, SENDS * 64 * MIB / 1e9
    return cases, [pusher, echoes]


# --- figures ----------------------------------------------------------------------------------------------------------


def measure(runs, only, with_ray):
    """Return the median speed, and microseconds of processor time per unit, by figure and who."""
    speeds, costs = defaultdict(list), defaultdict(list)
    limits, helpers = limit_cases()
    try:
        with Cluster.local(processes=4) as cluster:
            cases = {(figure, "ours"): case for figure, case in our_cases(cluster).items()}
            cases |= limits | (ray_cases() if with_ray else {})
            cases = {key: case for key, case in sorted(cases.items()) if only in key[0]}
            for run in range(runs + 1):
                for key, (operation, amount) in cases.items():
                    print(f"run {run}, {', '.join(key)}:", end=" ", file=sys.stderr, flush=True)
                    took, processor = seconds(operation)
                    print(round(amount / took, 2), file=sys.stderr, flush=True)
                    if run:  # the first one warms up
                        speeds[key].append(amount / took)
                        costs[key].append(processor / amount * 1e6)
    finally:
        for helper in helpers:
            helper.kill()
            helper.wait()
    return {key: (statistics.median(speeds[key]), statistics.median(costs[key])) for key in speeds}


def report(figures):
    table = {}
    for (figure, who), (speed, cost) in sorted(figures.items()):
        table.setdefault(figure, {})[who] = round(speed, 2)
        unit = figure.rpartition(", ")[2].partition("/")[0].removesuffix("s")
        table[figure].setdefault(f"us of processor per {unit}", {})[who] = round(cost, 1)
    for entry in table.values():
        if rays := [value for who, value in entry.items() if who.startswith("ray")]:
            entry["ours / ray"] = round(entry["ours"] / max(rays), 2)
        for limit in ("raw pyzmq", "memcpy"):
            if limit in entry:
                entry[f"ours / {limit}"] = round(entry["ours"] / entry[limit], 2)
    send, broadcast = (table.get(f"{name}, GB/s") for name in ("send 64 MB", "broadcast 64 MB to 4"))
    if send and broadcast:
        broadcast["time of a broadcast / of a send"] = round(send["ours"] / broadcast["ours"], 2)
    return table


def gloo_seconds():
    """Return the seconds that a gloo group takes to form, and to form again without a member that was lost."""
    with Cluster.local(processes=GLOO_MEMBERS) as cluster:
        group = Member.create_group().launch(cluster, name="member")
        port = group.execute_on(0).open_store().wait(timeout=120)[0]
        every = list(range(GLOO_MEMBERS))
        group.form(every, port, 0).wait(timeout=120)  # imports torch
        first = max(group.form(every, port, 1).wait(timeout=120))
        group.execute_on(GLOO_MEMBERS - 1).end()
        left = every[:-1]
        again = max(group.execute_on(*left).form(left, port, 2).wait(timeout=120))
        return {f"gloo group of {GLOO_MEMBERS}, s": round(first, 3), "again after a loss, s": round(again, 3)}


def shortest_lines(folder):
    """Run the shortest script and return its number of lines."""
    script = Path(folder) / "shortest.py"
    script.write_text(SHORTEST)
    answer = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, timeout=120)
    assert answer.stdout.strip() in ("[0, 1]", "[1, 0]"), answer.stdout
    return len(SHORTEST.splitlines())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="part of the name of the figures to measure")
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--no-gloo", action="store_true")
    parser.add_argument("--push", help=argparse.SUPPRESS)
    parser.add_argument("--echo", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.push or options.echo:
        push(options.push) if options.push else echo(options.echo)
        return
    result = {"cores": os.cpu_count(), "load_before": round(os.getloadavg()[0], 1), "runs": options.runs}
    result["figures"] = report(measure(options.runs, options.only, not options.no_ray))
    if not options.no_gloo:
        result |= gloo_seconds()
        with tempfile.TemporaryDirectory() as folder:
            result["lines of two groups and a channel"] = shortest_lines(folder)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
