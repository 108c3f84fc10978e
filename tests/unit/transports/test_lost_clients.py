"""A server whose clients are all cut off at once: what they send again when they come back is not run twice."""

from rl_core.messages.rpc import Hello
from rl_core.transports import frames
from rl_core.transports.rpc import IncomingCall, Peer, RpcServer

CLIENTS = 1_000


def request(number):
    parts = frames.encode_message(
        "call", [[], {}], epoch=0, request_id=number, sender=None, method="count", options={"timeout": 5}
    )
    return frames.read_header(memoryview(parts[0])), [bytes(part) for part in parts[1:]]


def test_a_cut_that_loses_a_thousand_clients_at_once_makes_no_request_run_twice():
    server, clients = RpcServer("tcp://127.0.0.1:0", {"count": lambda: None}), []
    for number in range(CLIENTS):
        peer = Peer(f"client-{number}".encode())
        peer.finished[7] = True  # answered, and the answer lost with the connection
        running = IncomingCall(peer, *request(8), answer=lambda call, kind, value: True)
        running.begun, peer.calls[8] = True, running
        server._peers[peer.routing_id] = peer
        clients.append(peer)
    for peer in clients:
        server._forget(peer)
    for lost in clients:
        back = Peer(lost.routing_id)
        server._hello(back, None, Hello(caller=None, memory=None, pending=(7, 8)))
        for number in (7, 8):
            server._call(back, *request(number))
    server.close()
    assert server.counters["duplicates"] == 2 * CLIENTS and server.counters["calls"] == 0
