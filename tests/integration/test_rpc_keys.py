"""RPC with CURVE keys over real sockets: who may connect, whose key a server has, what becomes of a call when a stranger takes its place."""

import socket
import time
from dataclasses import replace

import pytest

from rl_core.api.errors import ConfigError, DeadlineExceeded, WorkerLost
from rl_core.transports import curve, sockets
from rl_core.transports.rpc import RpcClient, RpcServer
from tests.curve_keys import generate_keys
from tests.integration.rpc_samples import identity


@pytest.fixture
def keys(tmp_path):
    for name, text in generate_keys(["runner", "rollout", "env", "actor"]).items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o400)
    return lambda role: curve.KeyRing(tmp_path, role)


class TestCurve:
    @pytest.fixture
    def hub(self, keys, service):
        hub = RpcServer("tcp://127.0.0.1:0", service, keys("runner"), identity("runner")).start()
        yield hub
        hub.close()

    @pytest.fixture
    def env(self, keys, service):
        env = RpcServer("tcp://127.0.0.1:0", service, keys("env"), identity("env")).start()
        yield env
        env.close()

    def test_allowed_roles_connect_and_their_role_is_proven(self, hub, keys):
        client = RpcClient(hub.address, keys("rollout"), identity("rollout"), service="hub")
        assert client.call_sync("add", 1, 2) == 3
        assert client.call_sync("who").role == "rollout"
        client.close()

    def test_a_role_that_is_not_listed_is_refused_and_counted(self, env, keys):
        """Actors may not call envs."""
        before = env.refused()
        client = RpcClient(env.address, keys("actor"), identity("actor"), service="env")
        with pytest.raises(DeadlineExceeded, match="not sent: the server refused this process's key"):
            client.call_sync("add", 1, timeout=3)
        assert env.refused() > before
        client.close()

    def test_a_stranger_is_refused_and_counted(self, hub, keys, tmp_path_factory):
        folder = tmp_path_factory.mktemp("stranger")
        for name, text in generate_keys(["rollout"]).items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o400)
        (folder / "runner.public").write_bytes(keys("runner").public)
        (folder / "runner.public").chmod(0o400)
        before = hub.refused()
        client = RpcClient(hub.address, curve.KeyRing(folder, "rollout"), identity("rollout"), service="hub")
        with pytest.raises(DeadlineExceeded):
            client.call_sync("add", 1, timeout=3)
        assert hub.refused() > before
        client.close()

    def test_without_keys_nothing_gets_through(self, hub):
        client = RpcClient(hub.address, None, identity("runner"))
        with pytest.raises(DeadlineExceeded):
            client.call_sync("add", 1, timeout=0.7)
        client.close()

    def test_a_stranger_cannot_make_the_server_hold_a_large_message(self, hub, keys):
        """It speaks ZMTP by hand: a greeting with CURVE, then a frame of 1 GB, before it has proven any key."""
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
        host, port = sockets.split_address(hub.address)
        sent = 0
        with socket.create_connection((host, port), timeout=60) as stranger:
            stranger.sendall(greeting)
            stranger.sendall(b"\x06" + (2**30).to_bytes(8, "big"))  # a long command frame
            with pytest.raises(ConnectionError):
                while sent < 2**28:
                    stranger.sendall(bytes(2**16))
                    sent += 2**16
        client = RpcClient(hub.address, keys("rollout"), identity("rollout"), service="hub")
        assert client.call_sync("add", 1, 2) == 3
        client.close()

    def test_a_role_cannot_be_claimed(self, hub, keys):
        client = RpcClient(hub.address, keys("env"), identity("runner"), service="hub")
        with pytest.raises(DeadlineExceeded, match="the key is that of role env, the message says runner"):
            client.call_sync("add", 1, timeout=3)
        client.close()

    def test_a_group_cannot_be_claimed(self, hub, keys):
        client = RpcClient(hub.address, keys("env"), replace(identity("actor"), role="env"), service="hub")
        with pytest.raises(DeadlineExceeded, match="the key is that of group env, the message says actor"):
            client.call_sync("add", 1, timeout=3)
        client.close()

    def test_a_supervisor_uses_the_key_of_its_pod(self, hub, keys):
        client = RpcClient(hub.address, keys("env"), replace(identity("env"), role="supervisor"), service="hub")
        assert client.call_sync("who").role == "supervisor"
        client.close()

    def test_the_server_must_have_the_key_of_its_service(self, env, keys):
        client = RpcClient(env.address, keys("rollout"), identity("rollout"), service="hub")
        with pytest.raises(DeadlineExceeded, match="not sent: the server did not prove the key of hub"):
            client.call_sync("add", 1, timeout=3)
        client.close()

    def test_an_identity_must_be_given_with_keys(self, keys):
        with pytest.raises(ConfigError, match="must have an identity"):
            RpcClient("tcp://127.0.0.1:1", keys("env"))

    @pytest.mark.parametrize("role", ["rollout", "runner"])
    def test_a_server_whose_service_is_not_named_is_known_by_any_key_of_the_job(self, env, keys, role):
        client = RpcClient(env.address, keys(role), identity(role))
        assert client.call_sync("add", 1, 2) == 3 and client.peer.startswith("env:0 at tcp://")
        client.close()

    def test_and_refuses_as_ever_who_may_not_call_it(self, env, keys):
        before = env.refused()
        client = RpcClient(env.address, keys("actor"), identity("actor"))
        with pytest.raises(DeadlineExceeded, match="the server refused this process's key"):
            client.call_sync("add", 1, timeout=3)
        assert env.refused() > before
        client.close()

    @pytest.fixture
    def others(self, tmp_path_factory):
        """The env's keys of another job."""
        folder = tmp_path_factory.mktemp("other")
        for name, text in generate_keys(["env", "rollout"]).items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o400)
        return curve.KeyRing(folder, "env")

    def test_a_call_whose_server_gave_way_to_a_strangers_is_lost_and_not_waited_for(self, env, keys, service, others):
        client = RpcClient(env.address, keys("rollout"), identity("rollout"), service="env")
        future = client.call_future("block", timeout=600)
        assert service.started.wait(60)
        env.close()
        stranger, deadline = None, time.monotonic() + 60
        while stranger is None:  # until the port is free
            try:
                stranger = RpcServer(env.address, {}, others, identity("env")).start()
            except ConfigError:
                assert time.monotonic() < deadline
        with pytest.raises(WorkerLost, match="block at env:0 .* the connection was lost 2 s ago"):
            future.result(60)
        service.release.set()
        client.close()
        stranger.close()

    def test_a_server_of_another_job_is_never_taken_for_ones_own(self, keys, service, others):
        server = RpcServer("tcp://127.0.0.1:0", service, others, identity("env")).start()
        client = RpcClient(server.address, keys("rollout"), identity("rollout"))
        with pytest.raises(
            DeadlineExceeded, match="not sent: the server did not prove the key of actor or env or hub or"
        ):
            client.call_sync("add", 1, timeout=3)
        client.close()
        server.close()
