"""The control port: only with the job's token, only known calls, and a port in use is told with the way out."""

import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from rl_core.api.errors import ConfigError
from rl_core.runner.__main__ import serve
from rl_core.runner.control import ControlServer
from rl_core.transports.http_server import CONNECTIONS


@pytest.fixture
def server():
    asked = []
    served = ControlServer(
        "127.0.0.1",
        0,
        token="secret",
        status=lambda: {"step": 3},
        actions={
            "POST /finish": lambda body: asked.append(body) or {"accepted": True},
            "POST /drain": lambda body: body["pods"],
        },
    )
    served.asked = asked
    yield served
    served.close()


def ask(server, method, path, *, token="secret", body=None):
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}", method=method, data=body, headers={"Authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_status_and_actions_answer_the_token_holder(server):
    assert ask(server, "GET", "/status") == (200, {"step": 3})
    assert ask(server, "POST", "/finish", body=b'{"why": "test"}') == (200, {"accepted": True})
    assert server.asked == [{"why": "test"}]


@pytest.mark.parametrize(
    ("method", "path", "token", "code"),
    [
        ("GET", "/status", "wrong", 401),
        ("POST", "/finish", "", 401),
        ("GET", "/nothing", "secret", 404),
        ("GET", "/finish", "secret", 404),
    ],
)
def test_others_are_refused_and_nothing_happens(server, method, path, token, code):
    assert ask(server, method, path, token=token)[0] == code
    assert server.asked == []


def test_a_body_that_is_not_json_is_refused(server):
    assert ask(server, "POST", "/finish", body=b"{oops")[0] == 400 and server.asked == []


@pytest.mark.parametrize("body", [b"[" * 100_000, b"\xff"], ids=["nested without end", "no text"])
def test_a_body_that_no_reader_takes_is_refused(server, body):
    assert ask(server, "POST", "/finish", body=body)[0] == 400 and server.asked == []


@pytest.mark.parametrize("length", ["-1", "many"])
def test_a_body_without_a_length_is_refused_and_not_waited_for(server, length):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest("POST", "/finish")
    connection.putheader("Authorization", "Bearer secret")
    connection.putheader("Content-Length", length)
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 400 and "Content-Length must be a number" in json.load(answer)["error"]
    connection.close()


def test_half_open_requests_are_bounded_and_keep_no_caller_out(server):
    """More than the server holds: strangers that send nothing, half a head, and half a body."""
    threads = threading.active_count()
    starts = (b"", b"GET /sta", b"POST /finish HTTP/1.1\r\nAuthorization: Bearer secret\r\nContent-Length: 9\r\n\r\n{")
    strangers = []
    for number in range(CONNECTIONS + 20):
        strangers.append(socket.create_connection(("127.0.0.1", server.port), timeout=10))
        strangers[-1].sendall(starts[number % 3])
    assert ask(server, "GET", "/status") == (200, {"step": 3})
    assert server.server.connections <= CONNECTIONS and threading.active_count() == threads and server.asked == []
    for stranger in strangers:
        stranger.close()


def test_an_exchange_ends_with_its_time_however_much_its_sender_says():
    served = ControlServer("127.0.0.1", 0, token="secret", status=dict, actions={}, seconds=0.2)
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as slow:
        slow.sendall(b"GET /status HTTP/1.1\r\n")
        assert slow.recv(100) == b""
    served.close()


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"\0\0\0\r\n\r\n", b"400"),
        (b"GET /status HTTP/1.1\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", b"431"),
        (b"POST /finish HTTP/1.1\r\nAuthorization: Bearer secret\r\nContent-Length: 99999999999999\r\n\r\n", b"413"),
        (b"POST /finish HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n", b"401"),
    ],
    ids=["no HTTP", "endless head", "huge body", "a stranger's body"],
)
def test_what_is_not_to_be_read_is_refused_before_it_is(server, sent, code):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as caller:
        caller.sendall(sent)
        assert caller.recv(1000).split(b" ")[1] == code
    assert server.asked == []


def test_an_action_that_fails_is_told_to_its_caller(server):
    code, answer = ask(server, "POST", "/drain", body=b"{}")
    assert code == 500 and answer == {"error": "KeyError: 'pods'"}


def test_a_port_in_use_is_a_configuration_error_with_the_way_out(server):
    with pytest.raises(ConfigError, match=f"control port {server.port} on 127.0.0.1 must be free.*end the process"):
        ControlServer("127.0.0.1", server.port, token=None, status=dict, actions={})


@pytest.mark.parametrize(
    ("token", "in_cluster", "host"),
    [("t", True, "0.0.0.0"), ("t", False, "127.0.0.1"), (None, True, "127.0.0.1")],
    ids=["cluster", "one machine", "no token"],
)
def test_the_control_port_is_open_to_others_in_a_cluster_only(token, in_cluster, host):
    parts = SimpleNamespace(controls=lambda: SimpleNamespace(actions=dict))
    runner = SimpleNamespace(status=dict, parts=parts)
    served = serve(runner, 0, token, in_cluster=in_cluster)
    assert served.host == host
    served.close()
