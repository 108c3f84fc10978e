"""Names of hosts are looked up beside everything else, and for no longer than LOOKUP_SECONDS."""

import socket
import threading

import pytest

from rl_core.api.errors import InfrastructureError
from rl_core.transports import names


@pytest.fixture
def table(monkeypatch):
    """Stands in for the resolver of the system: addresses by name, and a name that is never answered."""
    table, asked, ended = {"hub.job.svc": "10.0.0.7"}, [], threading.Event()

    def look_up(host, port, family, kind):
        asked.append(host)
        if host == "silent.job.svc":
            ended.wait(60)
        if host not in table:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(family, kind, 6, "", (table[host], port))]

    monkeypatch.setattr(names.socket, "getaddrinfo", look_up)
    yield asked
    ended.set()


async def test_a_name_is_replaced_by_its_address(table):
    assert await names.numeric_address("tcp://hub.job.svc:7700") == "tcp://10.0.0.7:7700"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:7700", "tcp://[::1]:7700", "tcp://localhost:7700"])
async def test_an_address_is_not_looked_up(table, address):
    assert await names.numeric_address(address) == address
    assert not table


async def test_a_name_that_nobody_knows_is_an_infrastructure_error(table):
    with pytest.raises(InfrastructureError, match=r"the name other\.job\.svc was not resolved: .*not known"):
        await names.numeric_address("tcp://other.job.svc:7700")


async def test_a_server_that_does_not_answer_delays_no_other_lookup(table, monkeypatch):
    monkeypatch.setattr(names, "LOOKUP_SECONDS", 0.01)
    with pytest.raises(InfrastructureError, match=r"the name silent\.job\.svc was not resolved within 0.01 s"):
        await names.numeric_address("tcp://silent.job.svc:7700")
    monkeypatch.setattr(names, "LOOKUP_SECONDS", 60.0)
    assert await names.numeric_address("tcp://hub.job.svc:7700") == "tcp://10.0.0.7:7700"
