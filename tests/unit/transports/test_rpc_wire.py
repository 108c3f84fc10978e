"""Errors on their way from one process to another."""

import pytest

from rl_core.api.errors import DataError, InfrastructureError, RemoteError, RLJobError
from rl_core.channel.direct import PeerLost
from rl_core.transports.rpc_wire import pack_error, rebuild_error
from rl_core.workers.result import WorkerErrors


class OwnDataError(DataError):
    """What a user may derive from a public class."""


class OwnError(RLJobError):
    """Has no public class below RLJobError."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DataError("no rows"), DataError),
        (OwnDataError("no rows"), DataError),
        (PeerLost("gone"), InfrastructureError),
        (OwnError("what"), RemoteError),
        (WorkerErrors("two ranks failed", [ValueError("a"), KeyError("b")]), RemoteError),
        (ValueError("a number"), RemoteError),
    ],
)
def test_an_error_arrives_as_its_nearest_public_class(error, expected):
    rebuilt = rebuild_error(pack_error(error), method="step", peer="env:0")
    assert type(rebuilt) is expected
    assert str(error) in str(rebuilt)


def test_an_error_without_public_class_names_its_own():
    rebuilt = rebuild_error(pack_error(OwnError("what")), method="step", peer="env:0")
    assert "step at env:0 raised OwnError: what" in str(rebuilt)
