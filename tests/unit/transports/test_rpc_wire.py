"""Errors on their way from one process to another."""

from concurrent.futures import ThreadPoolExecutor

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


def test_a_traceback_begins_in_the_users_code_and_an_error_that_was_not_raised_has_none():
    def own():
        raise DataError("no rows")

    with ThreadPoolExecutor(1) as threads:
        error = threads.submit(own).exception()
    (note,) = rebuild_error(pack_error(error), method="step", peer="env:0").__notes__
    assert note.startswith("raised by step at env:0:\nTraceback") and ", in own\n" in note
    assert "futures/thread.py" not in note
    assert not hasattr(rebuild_error(pack_error(DataError("no rows")), method="step", peer="env:0"), "__notes__")
