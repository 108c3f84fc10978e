"""The I/O thread and the addresses: order, timers, errors that do not stop it, ports in use, loopback without keys."""

import socket as network
import threading

import pytest
import zmq

from rl_core.api.errors import ConfigError
from rl_core.transports import sockets
from rl_core.transports.rpc import RpcClient, RpcServer
from rl_core.transports.sockets import IoThread


def test_callbacks_run_in_order_on_one_thread():
    io, seen = IoThread.shared(), []
    for number in range(100):
        io.call_soon(seen.append, (number, threading.get_ident()))
    assert io.run(lambda: [number for number, _ in seen]) == list(range(100))
    assert IoThread.shared() is io and not io.is_current() and io.run(io.is_current)


def test_an_error_in_a_callback_is_logged_and_the_thread_goes_on(caplog):
    io = IoThread.shared()
    io.call_soon(lambda: 1 / 0)
    assert io.run(lambda: 5) == 5
    assert "ZeroDivisionError" in caplog.text


def test_run_brings_the_error_back():
    with pytest.raises(ZeroDivisionError):
        IoThread.shared().run(lambda: 1 / 0)


def test_timers_run_in_the_order_of_their_times_unless_cancelled():
    io, seen, done = IoThread.shared(), [], threading.Event()

    def arrange():
        now = io.clock()
        io.call_at(now + 0.03, done.set)
        io.call_at(now + 0.02, lambda: seen.append("late"))
        io.call_at(now + 0.01, lambda: seen.append("early"))
        io.call_at(now + 0.015, lambda: seen.append("never")).cancel()

    io.run(arrange)  # on its thread: none of them can run before all are set
    assert done.wait(60)
    assert seen == ["early", "late"]


def test_a_timer_beyond_what_epoll_takes_does_not_end_the_thread():
    io, done = sockets.IoThread(), threading.Event()
    io.call_at(io.clock() + 1e10, done.clear)
    io.run(lambda: None)  # the timer is known; the thread's next sleep is for it
    io.call_soon(done.set)
    assert done.wait(60)
    io.stop()


@pytest.mark.parametrize(
    "address", ["localhost:1", "tcp://", "tcp://h", "tcp://h:x", "ipc://a:1", "tcp://:5", "tcp://h:65536"]
)
def test_malformed_addresses_are_refused(address):
    with pytest.raises(ConfigError, match="must be tcp://host:port"):
        sockets.split_address(address)


def test_addresses_are_split():
    assert sockets.split_address("tcp://10.0.0.1:77") == ("10.0.0.1", 77)
    assert sockets.split_address("tcp://127.0.0.1:*") == ("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("x.svc", False),
    ],
)
def test_without_keys_only_loopback_may_be_used(host, loopback):
    assert sockets.is_loopback(host) is loopback
    if not loopback:
        with pytest.raises(ConfigError, match="without CURVE keys only loopback"):
            RpcServer(f"tcp://{host}:0", {})
        with pytest.raises(ConfigError, match="without CURVE keys only loopback"):
            RpcClient(f"tcp://{host}:7700")


def test_a_port_in_use_is_named_with_the_way_out():
    with network.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot bind tcp://127.0.0.1:{port}.*choose another port"):
            RpcServer(f"tcp://127.0.0.1:{port}", {}).start()


def test_all_sockets_have_heartbeats_bounded_linger_and_mandatory_routing():
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    sockets.configure(socket)
    assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 5000 and socket.getsockopt(zmq.HEARTBEAT_TIMEOUT) == 15000
    assert 0 < socket.getsockopt(zmq.LINGER) <= 5000
    assert socket.getsockopt(zmq.RECONNECT_IVL) == 200 and socket.getsockopt(zmq.RECONNECT_IVL_MAX) == 5000
    with pytest.raises(zmq.ZMQError) as caught:
        socket.send_multipart([b"nobody", b"x"])
    assert caught.value.errno == zmq.EHOSTUNREACH
    socket.close(0)
    context.term()
