"""The control port: only with the job's token, only known calls, and a port in use is told with the way out."""

import json
import urllib.error
import urllib.request

import pytest

from rl_core.api.errors import ConfigError
from rl_core.runner.control import ControlServer


@pytest.fixture
def server():
    asked = []
    served = ControlServer(
        "127.0.0.1",
        0,
        token="secret",
        status=lambda: {"step": 3},
        actions={"POST /finish": lambda body: asked.append(body) or {"accepted": True}},
    )
    served.asked = asked
    yield served
    served.close()


def ask(server, method, path, *, token="secret", body=None):
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}", method=method, data=body, headers={"Authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
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


def test_a_port_in_use_is_a_configuration_error_with_the_way_out(server):
    with pytest.raises(ConfigError, match=f"control port {server.port} on 127.0.0.1 must be free.*end the process"):
        ControlServer("127.0.0.1", server.port, token=None, status=dict, actions={})
