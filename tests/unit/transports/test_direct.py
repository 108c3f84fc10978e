"""Direct connections: messages arrive whole and in order, a closed peer is noticed, and strangers are sent away."""

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest

from rl_core.api.errors import FrameError, InfrastructureError
from rl_core.transports import direct, tokens
from rl_core.transports.arrays import HEAD, MAX_BYTES, ArrayCodec
from rl_core.transports.direct import Connection, Listener, Mailbox

BIG = np.arange(2_000_000, dtype=np.float32).reshape(2, -1)


@pytest.fixture
def mailbox():
    box = Mailbox(Listener("test"), seconds=10)
    yield box
    box.close()


@pytest.fixture
def pair(mailbox):
    """Both ends: a mailbox that connects, with its connection, and a mailbox that listens, with its own."""
    other = Mailbox(seconds=10)
    connection = Connection.connect(mailbox._listener.address)
    other.add(connection)
    other.send(connection, "opens", {})
    yield other, connection, mailbox, taken(mailbox, "opens")[1]
    other.close()


def taken(mailbox, key):
    for _ in range(2000):
        if found := mailbox.take(key):
            return found
        mailbox.wait(0.05)
    raise AssertionError(f"no message {key} came")


def closed(mailbox, connection):
    for _ in range(200):
        if connection.closed:
            return True
        mailbox.wait(0.05)
    return False


def test_messages_arrive_whole_and_in_order_also_when_each_byte_comes_alone():
    near, far = socket.socketpair()
    receiver, codec = Connection(near), ArrayCodec()
    messages = [("a", {"x": np.arange(5)}), ("b", {}), ("a", {"x": np.ones((2, 3), bool), "y": np.float32(2)})]
    packed, got = b"".join(codec.pack(*message) for message in messages), []
    for at in range(len(packed)):
        far.sendall(packed[at : at + 1])
        got += receiver.receive()
    far.sendall(packed)  # several in one piece
    got += receiver.receive()
    assert receiver.receive() == []
    assert [key for key, _ in got] == ["a", "b", "a"] * 2
    for (_, sent), (_, found) in zip(messages * 2, got, strict=True):
        assert list(found) == list(sent)
        assert all(np.array_equal(found[name], array) for name, array in sent.items())
    far.close()
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.close()


def test_large_messages_pass_in_both_directions_at_once(pair):
    other, connection, mailbox, accepted = pair

    def send():
        for number in range(3):
            other.send(connection, f"there {number}", {"x": BIG + number})
        back.extend(taken(other, f"back {number}")[0]["x"] for number in range(3))

    back = []
    thread = threading.Thread(target=send)
    thread.start()
    for number in range(3):
        mailbox.send(accepted, f"back {number}", {"x": BIG - number})
    for number in range(3):
        assert np.array_equal(taken(mailbox, f"there {number}")[0]["x"], BIG + number)
    thread.join(10)
    assert not thread.is_alive()
    for number in range(3):
        assert np.array_equal(back[number], BIG - number)


def test_a_closed_peer_is_noticed_by_both_directions(pair):
    other, connection, mailbox, accepted = pair
    other.send(connection, "last", {"x": np.arange(3)})
    other.remove(connection)
    other.remove(connection)  # may be called again
    assert taken(mailbox, "last")[0]["x"].tolist() == [0, 1, 2]
    with pytest.raises(InfrastructureError):
        mailbox.send(accepted, "k", {"x": BIG})
    assert accepted.closed and not mailbox._connections


def test_a_peer_that_closes_in_the_middle_of_a_message_is_noticed_and_the_message_never_taken(pair):
    other, connection, mailbox, accepted = pair
    packed = connection.pack("half", {"x": np.arange(1000)})
    connection.socket.sendall(packed[: len(packed) // 2])
    other.remove(connection)
    assert closed(mailbox, accepted) and mailbox.take("half") is None


def test_a_peer_that_does_not_read_ends_the_connection():
    near, far = socket.socketpair()
    mailbox, connection = Mailbox(seconds=0), Connection(near)
    mailbox.add(connection)
    with pytest.raises(InfrastructureError, match="must be read within 0 s"):
        mailbox.send(connection, "k", {"x": BIG})
    assert connection.closed
    far.close()
    mailbox.close()


@pytest.mark.parametrize(
    "beginning",
    [
        HEAD.pack(MAX_BYTES + 1, 0, 0),
        HEAD.pack(2**64 - 1, 2**32 - 1, 2**32 - 1),
        HEAD.pack(3, 2, 2),
        HEAD.pack(3, 1, 1) + b"k\xc1\0",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_bytes_that_are_no_message_end_the_connection_and_no_other(pair, beginning):
    other, connection, mailbox, accepted = pair
    second = Connection.connect(mailbox._listener.address)
    second.send("second opens", {})
    taken(mailbox, "second opens")
    second.socket.sendall(beginning)
    other.send(connection, "k", {"x": np.arange(2)})
    assert taken(mailbox, "k")[0]["x"].tolist() == [0, 1]
    for _ in range(100):
        if len(mailbox._connections) == 1:
            break
        mailbox.wait(0.05)
    assert list(mailbox._connections.values()) == [accepted]
    second.close()


def test_a_child_is_told_of_a_malformed_message_by_an_error():
    near, far = socket.socketpair()
    far.sendall(HEAD.pack(MAX_BYTES + 1, 0, 0))
    connection = Connection(near)
    with pytest.raises(FrameError, match="at most"):
        connection.receive(wait=True)
    far.close()
    connection.close()


@pytest.mark.parametrize("secret", [b"", b"short", b"\0" * 32, b"\0" * 4096])
def test_a_stranger_without_the_secret_is_sent_away(mailbox, secret):
    name, _, _ = mailbox._listener.address.partition(" ")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(10)
        stranger.connect(str(tokens.DIRECTORY / name))
        stranger.sendall(secret + ArrayCodec().pack("k", {"x": np.arange(2)})[: 4096 if len(secret) >= 32 else 0])
        for _ in range(3):
            mailbox.wait(0.05)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert not mailbox._connections and mailbox.take("k") is None


def test_the_socket_is_for_this_user_alone_and_goes_with_its_listener():
    listener = Listener("test")
    path = tokens.DIRECTORY / listener.address.partition(" ")[0]
    about = path.stat()
    assert stat.S_ISSOCK(about.st_mode) and stat.S_IMODE(about.st_mode) == 0o600 and about.st_uid == os.geteuid()
    other = Listener("test")
    assert other.address.partition(" ")[2] != listener.address.partition(" ")[2]
    other.close()
    listener.close()
    assert not path.exists()
    with pytest.raises(InfrastructureError, match="cannot be reached"):
        Connection.connect(listener.address)


def test_a_process_that_ends_without_closing_leaves_no_socket():
    code = "from rl_core.transports.direct import Listener; listener = Listener('test'); print(listener.address)"
    address = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert address.startswith("rljob-test-") and not (tokens.DIRECTORY / address.partition(" ")[0]).exists()


def test_no_descriptor_is_left():
    Listener("test").close()  # the token of this process stays open
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        listening, connecting = Mailbox(Listener("test")), Mailbox()
        for number in range(3):
            connection = Connection.connect(listening._listener.address)
            connecting.add(connection)
            connecting.send(connection, f"opens {number}", {"x": BIG[:, :10]})
            taken(listening, f"opens {number}")
        connecting.remove(connection)
        address = listening._listener.address
        listening.close()
        connecting.close()
        with pytest.raises(InfrastructureError):
            Connection.connect(address)
    assert len(os.listdir("/proc/self/fd")) == before


def test_messages_of_another_collection_are_forgotten(pair):
    other, connection, mailbox, _ = pair
    for key in ("1 a", "2 a"):
        other.send(connection, key, {})
    taken(mailbox, "2 a")
    mailbox.keep("2 ")
    assert mailbox.take("1 a") is None


@pytest.mark.parametrize("pause", [0.0, 0.003])
def test_messages_that_follow_each_other_closely_or_not_arrive_in_order(pair, pause):
    other, connection, mailbox, own = pair

    def answer():
        for number in range(200):
            mailbox.send(own, "back", {"n": taken(mailbox, "there")[0]["n"] + 1})
            if number % 20 == 0:
                threading.Event().wait(pause)

    thread = threading.Thread(target=answer)
    thread.start()
    for number in range(200):
        other.send(connection, "there", {"n": np.array(number)})
        assert taken(other, "back")[0]["n"] == number + 1
    thread.join()
    assert not other.wait(0.0) and not other.wait(0.001)


@pytest.mark.parametrize(
    ("text", "most"), [("max 100000", None), ("50000 100000", 0.5), ("1000000 100000", None), ("?", None)]
)
def test_cores_are_those_of_the_container(tmp_path, monkeypatch, text, most):
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(direct, "CGROUP_CPU", tmp_path / "cpu.max")
    here = len(os.sched_getaffinity(0))
    assert direct.cores() == min(here, most or (10 if text.startswith("10") else here))
