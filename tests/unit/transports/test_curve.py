"""Key files: who may read them, what is refused; the table of who may connect to what."""

import pytest
import zmq

from rl_core.api.errors import ConfigError
from rl_core.transports import curve
from tests.curve_keys import generate_keys


@pytest.fixture
def folder(tmp_path):
    for name, text in generate_keys(["runner", "actor", "env"]).items():
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o400)
    return tmp_path


def test_a_key_ring_knows_its_secret_and_the_role_of_every_public_key(folder):
    ring = curve.KeyRing(folder, "actor")
    assert ring.public == zmq.curve_public(ring.secret)
    assert ring.role_of(ring.public) == "actor"
    assert ring.role_of(curve.KeyRing(folder, "env").public) == "env"
    assert ring.role_of(zmq.curve_keypair()[0]) is None


def test_links_are_followed(folder, tmp_path_factory):
    mounted = tmp_path_factory.mktemp("mounted")
    for path in folder.iterdir():
        (mounted / path.name).symlink_to(path)
    assert curve.KeyRing(mounted, "env").role == "env"


@pytest.mark.parametrize(
    ("mode", "ok"),
    [
        (0o400, True),
        (0o600, True),
        (0o440, True),
        (0o444, False),
        (0o404, False),
        (0o620, False),
        (0o602, False),
        (0o660, False),
    ],
)
def test_a_secret_is_refused_when_others_may_read_or_anyone_else_may_write_it(folder, mode, ok):
    (folder / "env.secret").chmod(mode)
    if ok:
        curve.KeyRing(folder, "env")
    else:
        with pytest.raises(ConfigError, match="env.secret must"):
            curve.KeyRing(folder, "env")


def test_a_public_key_may_be_read_by_all_but_written_by_its_owner_only(folder):
    (folder / "env.public").chmod(0o444)
    curve.KeyRing(folder, "actor")
    (folder / "env.public").chmod(0o664)
    with pytest.raises(ConfigError, match="writable by its owner only"):
        curve.KeyRing(folder, "actor")


def test_a_missing_secret_is_named(folder):
    with pytest.raises(ConfigError, match=r"must hold rollout\.secret"):
        curve.KeyRing(folder, "rollout")


@pytest.mark.parametrize("text", ["", "short", "x" * 41, "\u00e9" * 20])
def test_a_file_that_is_no_key_is_refused(folder, text):
    path = folder / "env.public"
    path.chmod(0o600)
    path.write_text(text)
    with pytest.raises(ConfigError, match="40 characters of Z85"):
        curve.KeyRing(folder, "actor")


def test_services_admit_the_groups_that_call_them():
    allowed = curve.callers_of_services()
    assert allowed["env"] == {"rollout", "runner"}
    assert allowed["rollout"] == {"runner", "actor"}
    assert allowed["weights"] == {"rollout"}
    for service in ("hub", "channel"):
        assert allowed[service] >= {"runner", "actor", "rollout", "env"}
