"""Who a process is: addresses in the tree of groups, and the identity in the environment."""

import pytest

from rl_core.api.errors import ConfigError
from rl_core.api.identity import Identity, WorkerAddress


@pytest.mark.parametrize(
    ("path", "name"), [((), "G"), (3, "G:3"), ((3,), "G:3"), ([3, 1], "G:3:1")], ids=["root", "rank", "tuple", "list"]
)
def test_an_address_is_named_by_group_and_ranks(path, name):
    address = WorkerAddress("G", path)
    assert address.get_name() == name and address.child(7).get_name() == f"{name}:7"
    assert len({address, WorkerAddress("G", address.rank_path)}) == 1


def test_a_group_has_no_colon():
    with pytest.raises(ValueError, match="must not contain ':', got 'G:1'"):
        WorkerAddress("G:1")


def test_an_identity_is_read_from_the_environment_or_names_the_variable_at_fault():
    environ = {"RLJOB_NAME": "j", "RLJOB_UID": "u", "RLJOB_ROLE": "env", "RLJOB_INCARNATION": "2.1", "RANK": "3"}
    identity = Identity.from_env(environ)
    assert (identity.name, identity.incarnation, identity.epoch) == ("env:3", (2, 1), 0)
    for name, value in (("RANK", "x"), ("RLJOB_EPOCH", "1.5"), ("RLJOB_INCARNATION", "a.b")):
        with pytest.raises(ConfigError, match=f"{name} must be .*, got '{value}'"):
            Identity.from_env({**environ, name: value})
    with pytest.raises(ConfigError, match="RLJOB_UID must be set"):
        Identity.from_env({key: value for key, value in environ.items() if key != "RLJOB_UID"})
