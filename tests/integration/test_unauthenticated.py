"""A server under connections that prove no key: their number is bounded, who holds a key keeps its connection, others get in."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from rl_core.transports import curve, sockets
from rl_core.transports.rpc import RpcClient, RpcServer
from rl_core.transports.unauthenticated import MAX_UNAUTHENTICATED
from tests.curve_keys import generate_keys
from tests.integration.rpc_samples import Service, identity

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
PIECE = b"\x06" + (4 << 20).to_bytes(8, "big") + bytes(1 << 16)
"""The start of a frame that is just small enough to be taken."""


@pytest.fixture
def keys(tmp_path):
    for name, text in generate_keys(["runner", "rollout", "env"]).items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o400)
    return lambda role: curve.KeyRing(tmp_path, role)


def test_strangers_are_bounded_and_key_holders_are_left_alone(keys):
    service = Service()
    server = RpcServer("tcp://127.0.0.1:0", service, keys("runner"), identity("runner")).start()
    earlier = RpcClient(server.address, keys("rollout"), identity("rollout"), service="hub")
    assert earlier.call_sync("add", 1, 2) == 3
    lost = threading.Event()
    blocked = earlier.call_future("block", timeout=600)
    blocked.add_done_callback(lambda _: lost.set())
    before = {(c.laddr, c.raddr) for c in established(server)}
    address = sockets.split_address(server.address)
    with ThreadPoolExecutor(8) as pool:
        strangers = list(pool.map(lambda kind: attack(address, kind), [b"", GREETING, GREETING + PIECE, b"\0"] * 50))
    later = RpcClient(server.address, keys("env"), identity("env"), service="hub")
    assert later.call_sync("add", 1, 2, timeout=60) == 3
    assert not lost.is_set() and before <= {(c.laddr, c.raddr) for c in established(server)}
    assert len(established(server)) <= MAX_UNAUTHENTICATED + 4 < len(strangers)
    service.release.set()
    for stranger in strangers:
        stranger.close()
    earlier.close()
    later.close()
    server.close()


def attack(address, sent):
    stranger = socket.create_connection(address, timeout=60)
    try:
        stranger.sendall(sent)
    except ConnectionError:
        return stranger
    return stranger


def established(server):
    port = sockets.split_address(server.address)[1]
    found = psutil.Process().net_connections("tcp")
    return [c for c in found if c.laddr.port == port and c.status == psutil.CONN_ESTABLISHED]
