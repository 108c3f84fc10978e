"""An RPC service with its server and a client, for every test that calls over real sockets."""

import pytest
from rpc_samples import Service

from rl_core.transports.rpc import RpcClient, RpcServer


@pytest.fixture
def service():
    """Handlers of all kinds; those that block are let go at the end."""
    service = Service()
    yield service
    service.release.set()


@pytest.fixture
def server(service):
    """A server of `service` on loopback without keys."""
    server = RpcServer("tcp://127.0.0.1:0", service).start()
    yield server
    server.close()


@pytest.fixture
def client(server):
    """A client of `server`."""
    client = RpcClient(server.address)
    yield client
    client.close()
