"""Keys: a pure function of master and job, different for every role and job, usable by ZeroMQ, readable by one user only."""

import hashlib
import stat

import pytest
import zmq
from zmq.utils import z85

from rl_core.api.errors import ConfigError
from rl_core.plan.keys import TOKEN_FILE, control_token, curve_pair, derive, key_files, key_names, write_key_folder
from rl_core.transports.curve import KeyRing

MASTER = bytes(range(32))


def test_secret_is_a_pure_function_of_master_and_job():
    assert key_files(MASTER, "uid-1") == key_files(MASTER, "uid-1")


def test_every_role_job_and_master_has_other_keys():
    secrets = [
        text
        for master, uid in [(MASTER, "a"), (MASTER, "b"), (MASTER[::-1], "a")]
        for name, text in key_files(master, uid).items()
        if not name.endswith(".public")
    ]
    assert len(set(secrets)) == len(secrets) == 3 * (len(key_names()) + 1)


def test_job_and_role_cannot_be_shifted_into_each_other():
    assert derive(MASTER, "ab", "c") != derive(MASTER, "a", "bc")


def test_derivation_is_keyed_blake2b():
    message = (5).to_bytes(4, "big") + b"uid-1" + b"actor"
    assert (
        derive(MASTER, "uid-1", "actor")
        == hashlib.blake2b(message, digest_size=32, key=MASTER, person=b"rljob-keys").digest()
    )


def test_public_half_belongs_to_the_secret():
    for role in key_names():
        public, secret = curve_pair(MASTER, "uid-1", role)
        assert zmq.curve_public(secret.encode()).decode() == public
        assert z85.decode(secret.encode()) == derive(MASTER, "uid-1", role)


def test_control_token_is_hexadecimal_and_no_key():
    token = control_token(MASTER, "uid-1")
    assert len(token) == 64 and bytes.fromhex(token) == derive(MASTER, "uid-1", "control")


@pytest.mark.parametrize("master", [b"", b"short", bytes(33)])
def test_master_key_of_another_length_is_refused(master):
    with pytest.raises(ConfigError, match=f"32 bytes, got {len(master)}"):
        derive(master, "uid-1", "actor")


def test_folder_is_readable_by_its_owner_only_and_can_be_written_again(tmp_path):
    folder = tmp_path / "keys"
    for _ in range(2):
        write_key_folder(folder, key_files(MASTER, "uid-1"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o400}
    assert (folder / TOKEN_FILE).read_text() == control_token(MASTER, "uid-1")
    ring = KeyRing(folder, "actor")
    assert ring.secret.decode() == curve_pair(MASTER, "uid-1", "actor")[1]
    assert set(ring.publics) == set(key_names())
