"""Real processes around a channel server: kill -9 of consumers and producers, the server as a process, RPC servers that die."""

import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from rl_core.api.errors import WorkerLost
from rl_core.api.identity import Identity
from rl_core.channel import Channel
from rl_core.channel.client import ChannelClient
from rl_core.launch.ports import free_ports
from rl_core.transports import tokens
from rl_core.transports.rpc import RpcClient


@pytest.fixture
def spawn():
    """Start `python -c code` with arguments; its first line of output is returned with it."""
    started = []

    def start(code, *args, env=None):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )  # fmt: skip
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


SERVER = """
    import sys
    from rl_core.channel.server import ChannelServer
    print(ChannelServer("tcp://127.0.0.1:0").start().address, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def channel(spawn):
    _, address = spawn(SERVER)
    client = ChannelClient(address)
    yield Channel.create("c", client=client)
    client.close()


CONSUMER = """
    import sys
    from rl_core.channel import Channel
    from rl_core.channel.client import configure
    configure(sys.argv[1])
    channel = Channel.connect("c")
    held = channel.get_batch(1e9, async_op=True) if sys.argv[2] == "batch" else channel.get(async_op=True)
    channel.qsize()
    print("holds", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["batch", "get"])
@pytest.mark.parametrize("size", [10, 2_000_000], ids=["small", "large"])
def test_what_a_killed_consumer_held_comes_back_at_once_and_in_order(channel, spawn, kind, size):
    for number in range(3):
        channel.put(np.full(size, number, np.uint8), weight=1)
    process, word = spawn(CONSUMER, channel._backend._client.rpc.address, kind)
    assert word == "holds"
    process.send_signal(signal.SIGKILL)
    _until(lambda: channel.qsize() == 3)
    for number in range(3):
        item = channel.get(timeout=60)
        assert item[0] == number and item.nbytes == size
    assert channel.stats().redelivered == (0 if kind == "batch" else 1), "what a batch held was never delivered"


PRODUCER = """
    import asyncio
    import sys
    import numpy as np
    from rl_core.channel import Channel
    from rl_core.channel.client import configure
    configure(sys.argv[1])
    channel = Channel.connect("c")
    for number in range(5):
        channel.put(np.full(2_000_000, number, np.uint8))
    rpc = channel._backend._client.rpc
    asyncio.run(channel.allocate_async(2_000_000))  # memory that will never be put
    rpc.call_sync("reserve", "c", "default_queue", [2_000_000], 5.0, False, [True])  # room that will never be filled
    print("put", flush=True)
    sys.stdin.read()
"""


def test_a_killed_producer_loses_nothing_accepted_and_frees_room_and_memory(channel, spawn):
    process, word = spawn(PRODUCER, channel._backend._client.rpc.address)
    assert word == "put"
    process.send_signal(signal.SIGKILL)
    process.wait()
    for number in range(5):
        item = channel.get(timeout=60)
        assert item.nbytes == 2_000_000 and (item == number).all()
    del item
    runner = channel._backend._client.rpc

    def freed():
        stats = runner.call_sync("server_stats")
        return stats.memory["lent"] == 0 and stats.channels["c"].bytes == 0

    _until(freed)


def test_a_consumer_killed_while_it_reads_a_segment_frees_it(channel, spawn):
    code = """
        import sys
        from rl_core.channel import Channel
        from rl_core.channel.client import configure
        configure(sys.argv[1])
        item = Channel.connect("c").get()
        print(int(item[0]), flush=True)
        sys.stdin.read()
    """
    channel.put(np.full(20_000_000, 6, np.uint8))
    process, word = spawn(code, channel._backend._client.rpc.address)
    assert word == "6"
    rpc = channel._backend._client.rpc
    _until(lambda: rpc.call_sync("server_stats").channels["c"].bytes == 0)
    assert rpc.call_sync("server_stats").memory["lent"] == 1
    process.send_signal(signal.SIGKILL)
    _until(lambda: rpc.call_sync("server_stats").memory["lent"] == 0)


def test_segments_of_a_killed_process_are_removed_by_its_supervisor(spawn):
    uid = secrets.token_hex(4)  # another run of this test on the machine has another one
    code = """
        import sys
        from rl_core.transports.links import ProcessSharedMemory
        from rl_core.transports.sockets import IoThread
        print(ProcessSharedMemory.shared(sys.argv[1]).store.lend(1 << 20, "peer").name, flush=True)
        sys.stdin.read()
    """
    process, segment = spawn(code, uid)
    assert segment.startswith(f"rljob-{uid}-{process.pid}-")
    assert segment not in tokens.remove_orphans()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert segment in tokens.remove_orphans()
    assert not (tokens.DIRECTORY / segment).exists()


def test_a_killed_rpc_server_is_a_lost_worker_that_is_named(spawn):
    code = """
        import sys, time
        from rl_core.transports.rpc import RpcServer
        def work():
            print("at work", flush=True)
            time.sleep(600)
        print(RpcServer("tcp://127.0.0.1:0", {"work": work}).start().address, flush=True)
        sys.stdin.read()
    """
    process, address = spawn(code)
    client = RpcClient(address)
    future = client.call_future("work", timeout=200)
    assert process.stdout.readline() == "at work\n"
    process.send_signal(signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerLost, match=f"work at {address}.*whether it ran is unknown"):
        future.result()
    assert time.monotonic() - began < 100, "by the loss of the connection, not by the deadline"
    client.close()


def test_the_channel_server_runs_as_a_process_until_sigterm():
    port = free_ports().channel
    environ = {
        "RLJOB_NAME": "j", "RLJOB_UID": "u-1", "RLJOB_EPOCH": "4", "RLJOB_ROLE": "channel", "RLJOB_POD": "j-actor-0",
        "RLJOB_CHANNEL": f"tcp://127.0.0.1:{port}",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "rl_core.channel"], env={**os.environ, **environ}, stderr=subprocess.PIPE, text=True
    )
    identity = Identity(
        job="j",
        namespace="default",
        uid="u-1",
        epoch=4,
        role="actor",
        pod="p",
        pod_index=0,
        group="actor",
        rank=0,
        world_size=1,
    )
    client = ChannelClient(environ["RLJOB_CHANNEL"], None, identity)
    channel = Channel.create("c", client=client)
    channel.put(np.ones(1 << 20))
    assert channel.get().sum() == 1 << 20
    client.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    process.stderr.close()
    assert not list(tokens.DIRECTORY.glob(f"rljob-u1-{process.pid}-*"))


def test_a_channel_process_without_an_address_ends_with_the_code_of_a_bad_configuration():
    environ = {**os.environ, "RLJOB_NAME": "j", "RLJOB_UID": "u", "RLJOB_ROLE": "channel"}
    environ.pop("RLJOB_CHANNEL", None)
    ended = subprocess.run(
        [sys.executable, "-m", "rl_core.channel"], env=environ, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2 and "RLJOB_CHANNEL must be tcp://host:port" in ended.stderr


def test_the_transport_layer_does_not_import_torch():
    code = """
        import sys, numpy
        import rl_core.transports.rpc, rl_core.transports.bulk, rl_core.channel.server, rl_core.channel.client
        from rl_core.transports import frames
        frames.decode(frames.encode({"a": numpy.ones(2)}))
        print("torch" in sys.modules)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"


def _until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "did not happen within 60 s"
        time.sleep(0.02)
