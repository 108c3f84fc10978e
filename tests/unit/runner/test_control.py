"""The control port: only signed calls of this job and epoch, each once, only known ones, and a port in use is told with the way out."""

import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rl_core.api.errors import ConfigError
from rl_core.plan.signatures import NotTheRunner, Peer, sign
from rl_core.runner.__main__ import serve
from rl_core.runner.control import ControlServer
from rl_core.transports.http_server import CONNECTIONS

PEER = Peer(token="secret", uid="job-uid", epoch=2)


@pytest.fixture
def server():
    asked = []
    served = ControlServer(
        "127.0.0.1",
        0,
        peer=PEER,
        status=lambda: {"step": 3},
        actions={
            "POST /finish": lambda body: asked.append(body) or {"accepted": True},
            "POST /drain": lambda body: body["pods"],
        },
    )
    served.asked = asked
    yield served
    served.close()


def send(server, method, path, *, body=b"", headers):
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}", method=method, data=body or None, headers=headers
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def signed_post(server, length):
    """Return the head of a signed call with a body of that many bytes."""
    call = sign(PEER, "POST", "/finish", challenge=challenge_of(server))
    return f"POST /finish HTTP/1.1\r\nAuthorization: {call.headers['Authorization']}\r\nContent-Length: {length}\r\n\r\n".encode()


def challenge_of(server, peer=PEER):
    call = sign(peer, "GET", "/status")
    return call.verify(*send(server, "GET", "/status", headers=call.headers))


def ask(server, method, path, *, peer=PEER, body=b""):
    """Make a call as the operator does: ask for a challenge, then quote it."""
    challenge = challenge_of(server) if method != "GET" else ""
    call = sign(peer, method, path, body=body, challenge=challenge)
    code, _, text = send(server, method, path, body=body, headers=call.headers)
    return code, json.loads(text)


def test_status_and_actions_answer_the_token_holder(server):
    assert ask(server, "GET", "/status") == (200, {"step": 3})
    assert ask(server, "POST", "/finish", body=b'{"why": "test"}') == (200, {"accepted": True})
    assert server.asked == [{"why": "test"}]


@pytest.mark.parametrize(
    ("method", "path", "peer", "code"),
    [
        ("GET", "/status", replace(PEER, token="wrong"), 401),
        ("POST", "/finish", replace(PEER, token=""), 401),
        ("GET", "/status", replace(PEER, uid="another-job"), 421),
        ("POST", "/finish", replace(PEER, epoch=1), 421),
        ("POST", "/drain", replace(PEER, epoch=3), 421),
        ("GET", "/nothing", PEER, 404),
        ("GET", "/finish", PEER, 404),
    ],
)
def test_strangers_stale_leaders_and_unknown_calls_are_refused_and_nothing_happens(server, method, path, peer, code):
    assert ask(server, method, path, peer=peer, body=b"{}" if method == "POST" else b"")[0] == code
    assert server.asked == []


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer secret"}], ids=["nothing", "the token itself"])
def test_a_call_without_a_signature_is_refused(server, headers):
    assert send(server, "GET", "/status", headers=headers)[0] == 401
    assert send(server, "POST", "/finish", headers=headers)[0] == 401 and server.asked == []


def test_a_call_that_was_overheard_does_nothing_when_it_is_sent_again(server):
    call = sign(PEER, "POST", "/finish", body=b"{}", challenge=challenge_of(server))
    assert [send(server, "POST", "/finish", body=b"{}", headers=call.headers)[0] for _ in range(2)] == [200, 401]
    assert server.asked == [{}]


@pytest.mark.parametrize(
    ("path", "body"), [("/drain", b"{}"), ("/finish", b'{"why": "other"}')], ids=["another call", "another body"]
)
def test_a_signature_holds_for_one_call_and_one_body_only(server, path, body):
    call = sign(PEER, "POST", "/finish", body=b"{}", challenge=challenge_of(server))
    assert send(server, "POST", path, body=body, headers=call.headers)[0] == 401 and server.asked == []


def test_an_answer_of_somebody_else_is_known(server):
    call = sign(PEER, "GET", "/status")
    code, headers, body = send(server, "GET", "/status", headers=call.headers)
    assert call.verify(code, headers, body)
    for forged in ((code, headers, b'{"step": 9}'), (500, headers, body), (code, {}, body)):
        with pytest.raises(NotTheRunner, match="another process has its address"):
            call.verify(*forged)
    with pytest.raises(NotTheRunner):
        sign(PEER, "GET", "/status").verify(code, headers, body)  # an answer to an earlier call


def test_a_body_that_is_not_json_is_refused(server):
    assert ask(server, "POST", "/finish", body=b"{oops")[0] == 400 and server.asked == []


@pytest.mark.parametrize("body", [b"[" * 100_000, b"\xff"], ids=["nested without end", "no text"])
def test_a_body_that_no_reader_takes_is_refused(server, body):
    assert ask(server, "POST", "/finish", body=body)[0] == 400 and server.asked == []


@pytest.mark.parametrize("length", ["-1", "many"])
def test_a_body_without_a_length_is_refused_and_not_waited_for(server, length):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest("POST", "/finish")
    for name, value in sign(PEER, "POST", "/finish", challenge=challenge_of(server)).headers.items():
        connection.putheader(name, value)
    connection.putheader("Content-Length", length)
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 400 and "Content-Length must be a number" in json.load(answer)["error"]
    connection.close()


def test_half_open_requests_are_bounded_and_keep_no_caller_out(server):
    """More than the server holds: strangers that send nothing, half a head, and half a body."""
    threads = threading.active_count()
    starts = (b"", b"GET /sta", signed_post(server, 9) + b"{")
    strangers = []
    for number in range(CONNECTIONS + 20):
        strangers.append(socket.create_connection(("127.0.0.1", server.port), timeout=10))
        strangers[-1].sendall(starts[number % 3])
    assert ask(server, "GET", "/status") == (200, {"step": 3})
    assert len(server.server._open) <= CONNECTIONS and threading.active_count() == threads and server.asked == []
    for stranger in strangers:
        stranger.close()


def test_an_exchange_ends_with_its_time_however_much_its_sender_says():
    served = ControlServer("127.0.0.1", 0, peer=PEER, status=dict, actions={}, seconds=0.2)
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as slow:
        slow.sendall(b"GET /status HTTP/1.1\r\n")
        assert slow.recv(100) == b""
    served.close()


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"\0\0\0\r\n\r\n", b"400"),
        (b"GET /status HTTP/1.1\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", b"431"),
        (99999999999999, b"413"),
        (b"POST /finish HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n", b"401"),
    ],
    ids=["no HTTP", "endless head", "huge body", "a stranger's body"],
)
def test_what_is_not_to_be_read_is_refused_before_it_is(server, sent, code):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as caller:
        caller.sendall(signed_post(server, sent) if isinstance(sent, int) else sent)
        assert caller.recv(1000).split(b" ")[1] == code
    assert server.asked == []


def test_an_action_that_fails_is_told_to_its_caller(server):
    code, answer = ask(server, "POST", "/drain", body=b"{}")
    assert code == 500 and answer == {"error": "KeyError: 'pods'"}


def test_a_port_in_use_is_a_configuration_error_with_the_way_out(server):
    with pytest.raises(ConfigError, match=f"control port {server.port} on 127.0.0.1 must be free.*end the process"):
        ControlServer("127.0.0.1", server.port, peer=None, status=dict, actions={})


@pytest.mark.parametrize(
    ("peer", "in_cluster", "host"),
    [(PEER, True, "0.0.0.0"), (PEER, False, "127.0.0.1"), (None, True, "127.0.0.1")],
    ids=["cluster", "one machine", "no token"],
)
def test_the_control_port_is_open_to_others_in_a_cluster_only(peer, in_cluster, host):
    runner = SimpleNamespace(status=dict, actions=dict)
    served = serve(runner, 0, peer, in_cluster=in_cluster)
    assert served.host == host
    served.close()
