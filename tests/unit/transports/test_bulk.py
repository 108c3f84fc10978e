"""Bulk streams: whole, in order, authentic, once per ticket; a bad peer costs only itself."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import zmq

from rl_core.api.errors import DeadlineExceeded, FrameError, InfrastructureError
from rl_core.messages.weights import BulkTicket
from rl_core.transports import bulk
from rl_core.transports.bulk import BulkReceiver, BulkSender
from rl_core.transports.curve import KeyRing
from rl_core.transports.sockets import IoThread
from tests.curve_keys import generate_keys


@pytest.fixture
def sender():
    sender = BulkSender("tcp://127.0.0.1:0")
    yield sender
    sender.close()


def test_a_stream_arrives_whole_and_in_order(sender):
    arrays = [
        np.arange(700_000, dtype=np.float32),
        np.zeros(0),
        np.arange(5, dtype=np.uint8),
        np.full((3, bulk.CHUNK_BYTES), 4, np.uint8),
    ]
    received = b"".join(bytes(chunk) for chunk in BulkReceiver(sender.offer(arrays), timeout=20))
    assert received == b"".join(array.tobytes() for array in arrays)


def test_chunks_are_bounded_and_do_not_cross_buffers(sender):
    sizes = [
        chunk.nbytes
        for chunk in BulkReceiver(
            sender.offer([np.zeros(bulk.CHUNK_BYTES + 5, np.uint8), np.zeros(7, np.uint8)]), timeout=20
        )
    ]
    assert sizes == [bulk.CHUNK_BYTES, 5, 7]


RECEIVERS = """
import json, sys
from threading import Thread
from rl_core.messages.weights import BulkTicket
from rl_core.transports.bulk import BulkReceiver

def receive(ticket):
    chunks = iter(BulkReceiver(ticket, timeout=1.0))
    said = [bytes(next(chunks))]
    print("began\\n", end="", flush=True)  # in one piece: four threads write
    try:
        said += map(bytes, chunks)
    except Exception as error:
        said.append(error)
    print(f"{said}\\n", end="", flush=True)

for address, ticket, key in json.loads(sys.argv[1]):
    ticket = BulkTicket(address=address, ticket=bytes.fromhex(ticket), key=bytes.fromhex(key))
    Thread(target=receive, args=[ticket]).start()
"""


def test_a_receiver_that_stood_still_itself_does_not_take_the_sender_for_silent():
    go_on, senders = threading.Event(), [BulkSender("tcp://127.0.0.1:0") for _ in range(4)]

    def buffers():
        yield b"first"
        assert go_on.wait(60)
        yield b"second"

    tickets = [sender.offer(buffers()) for sender in senders]
    told = json.dumps([[one.address, one.ticket.hex(), one.key.hex()] for one in tickets])
    with subprocess.Popen([sys.executable, "-c", RECEIVERS, told], stdout=subprocess.PIPE) as process:
        assert [process.stdout.readline() for _ in senders] == [b"began\n"] * 4
        process.send_signal(signal.SIGSTOP)
        go_on.set()
        time.sleep(1.5)  # longer than the receivers wait
        process.send_signal(signal.SIGCONT)
        assert [process.stdout.readline() for _ in senders] == [b"[b'first', b'second']\n"] * 4
    for sender in senders:
        sender.close()


def test_a_ticket_is_good_for_one_stream(sender):
    ticket = sender.offer([b"abc"])
    assert [bytes(chunk) for chunk in BulkReceiver(ticket, timeout=20)] == [b"abc"]
    with pytest.raises(InfrastructureError, match="used before"):
        list(BulkReceiver(ticket, timeout=20))


def test_a_wrong_key_is_noticed_at_the_first_chunk(sender):
    ticket = dataclasses.replace(sender.offer([b"abc"]), key=bytes(32))
    with pytest.raises(FrameError, match="chunk 0 .* not authentic"):
        list(BulkReceiver(ticket, timeout=20))


@pytest.mark.parametrize("attack", ["flip", "swap", "repeat", "leave out", "end early"])
def test_a_stream_changed_on_the_way_is_refused(attack):
    """A sender without our code: it plays back authentic messages of a real stream, changed."""
    key = bytes(range(32))
    messages = [
        [b"C" + bulk._tag(key, b"C", number, payload), payload]
        for number, payload in enumerate([b"one", b"two", b"three"])
    ]
    messages.append([b"E" + bulk._tag(key, b"E", 3), b""])
    if attack == "flip":
        messages[1][1] = b"twO"
    elif attack == "swap":
        messages[0], messages[1] = messages[1], messages[0]
    elif attack == "repeat":
        messages.insert(1, messages[0])
    elif attack == "leave out":
        del messages[1]
    else:
        del messages[2]
    router = IoThread.shared().context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    receiver = iter(BulkReceiver(BulkTicket(address=f"tcp://127.0.0.1:{port}", ticket=b"t", key=key), timeout=20))

    def play():
        peer = router.recv_multipart()[0]
        for message in messages:
            router.send_multipart([peer, *message])

    thread = threading.Thread(target=play)
    thread.start()
    with pytest.raises(FrameError, match="not authentic"):
        list(receiver)
    thread.join(10)
    router.close(0)


def test_many_streams_run_side_by_side_and_a_stalled_one_stops_nobody(sender):
    stalled = iter(BulkReceiver(sender.offer([np.zeros(100 * bulk.CHUNK_BYTES, np.uint8)]), timeout=20))
    next(stalled)
    readers = [
        iter(BulkReceiver(sender.offer([np.full(3 * bulk.CHUNK_BYTES, number, np.uint8)]), timeout=20))
        for number in range(3)
    ]
    for _ in range(3):
        for number, reader in enumerate(readers):
            assert next(reader)[0] == number
    stalled.close()


def test_the_error_of_the_source_reaches_the_receiver(sender):
    def source():
        yield b"first"
        raise OSError("disk gone")

    received = []
    with pytest.raises(InfrastructureError, match="after 1 chunks: the source failed: disk gone"):
        for chunk in BulkReceiver(sender.offer(source()), timeout=20):
            received.append(bytes(chunk))
    assert received == [b"first"]
    assert [bytes(chunk) for chunk in BulkReceiver(sender.offer([b"next"]), timeout=20)] == [b"next"]


def test_a_silent_sender_is_a_deadline_with_address_and_progress():
    router = IoThread.shared().context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(DeadlineExceeded, match=f"127.0.0.1:{port} sent nothing for 0.1 s after 0 chunks"):
        list(BulkReceiver(BulkTicket(address=f"tcp://127.0.0.1:{port}", ticket=b"t", key=bytes(32)), timeout=0.1))
    router.close(0)


def test_a_closed_sender_offers_nothing(sender):
    sender.close()
    with pytest.raises(InfrastructureError, match="closed"):
        sender.offer([b"x"])


def test_streams_of_one_share_hash_each_chunk_once(sender, monkeypatch):
    data, share, hashed = np.zeros(5 * bulk.CHUNK_BYTES, np.uint8), bulk.SharedTags(), []
    real = bulk._tag
    monkeypatch.setattr(bulk, "_tag", lambda *args: (hashed.append(args[1:3]), real(*args))[1])
    tickets = [sender.offer([data], share=share) for _ in range(2)]
    assert tickets[0].key == tickets[1].key and tickets[0].ticket != tickets[1].ticket
    for ticket in tickets:
        assert len(list(BulkReceiver(ticket, timeout=20))) == 5
    assert all(hashed.count((b"C", number)) == 3 for number in range(5))  # at the sender once, at each receiver once


def test_a_receiver_is_woken_out_of_its_wait(sender):
    wake = os.eventfd(1, os.EFD_NONBLOCK)
    with pytest.raises(InfrastructureError, match="given up after 0 chunks"):
        list(BulkReceiver(sender.offer([np.zeros(9)]), timeout=20, wake=wake))
    os.close(wake)


def test_a_stream_with_keys_is_encrypted_and_needs_the_right_role(tmp_path):
    for name, text in generate_keys(["actor", "rollout", "env"]).items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    sender = BulkSender("tcp://127.0.0.1:0", KeyRing(tmp_path, "actor"))
    try:
        assert b"".join(BulkReceiver(sender.offer([b"abc"]), KeyRing(tmp_path, "rollout"), timeout=20)) == b"abc"
        for keys in (KeyRing(tmp_path, "env"), None):
            with pytest.raises(DeadlineExceeded, match="sent nothing"):
                list(BulkReceiver(sender.offer([b"abc"]), keys, timeout=0.2))
    finally:
        sender.close()


class NoConnection:
    """Stands for keys that the sender refused before the first message: the socket has no connection to send on."""

    def connect(self, socket, role):
        socket.setsockopt(zmq.IMMEDIATE, 1)


def test_a_receiver_that_is_refused_before_its_first_message_does_not_wait_for_ever():
    ticket = BulkTicket(address="tcp://127.0.0.1:1", ticket=b"t", key=bytes(32))
    with pytest.raises(DeadlineExceeded, match="sent nothing"):
        list(BulkReceiver(ticket, NoConnection(), timeout=0.1))
    wake = os.eventfd(1, os.EFD_NONBLOCK)
    with pytest.raises(InfrastructureError, match="given up after 0 chunks"):
        list(BulkReceiver(ticket, NoConnection(), timeout=20, wake=wake))
    os.close(wake)
