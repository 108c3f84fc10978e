"""The CURVE keys and the control token of a job, derived from one master key.

The Secret of a job is a pure function of the master key and the job's uid: when somebody deletes it, it is created again byte-equal.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from rl_core.api.errors import ConfigError
from rl_core.plan.groups import BUILT_IN

MASTER_BYTES = 32
TOKEN_FILE = "control.token"


def key_names(groups: Iterable[str] = BUILT_IN) -> tuple[str, ...]:
    """Return the names of the key pairs of a job: one for each of the given groups, one for runner, channel server and supervisors each."""
    return ("runner", "channel", *groups, "supervisor")


def derive(master: bytes, uid: str, purpose: str) -> bytes:
    """Return 32 bytes for `purpose` (the name of a key pair, or "control"): BLAKE2b keyed by the master over (uid, purpose).

    Raises ConfigError if the master key is not 32 bytes long.
    """
    if len(master) != MASTER_BYTES:
        raise ConfigError(
            f"the master key must have {MASTER_BYTES} bytes, got {len(master)}; create the operator's Secret again"
        )
    message = len(uid).to_bytes(4, "big") + uid.encode() + purpose.encode()
    return hashlib.blake2b(message, digest_size=32, key=master, person=b"rljob-keys").digest()


def curve_pair(master: bytes, uid: str, name: str) -> tuple[str, str]:
    """Return (public, secret) of the key pair `name`, each as Z85 text of 40 characters."""
    import zmq
    from zmq.utils import z85

    secret = z85.encode(derive(master, uid, name))
    return zmq.curve_public(secret).decode(), secret.decode()


def control_token(master: bytes, uid: str) -> str:
    """Return the token that signs calls and answers of the job's control port, 64 hexadecimal digits."""
    return derive(master, uid, "control").hex()


def key_files(master: bytes, uid: str, groups: Iterable[str] = BUILT_IN) -> dict[str, str]:
    """Return the text of every key file of a job by file name: `<name>.public`, `<name>.secret`, `control.token`."""
    files = {TOKEN_FILE: control_token(master, uid)}
    for name in key_names(groups):
        public, secret = curve_pair(master, uid, name)
        files |= {f"{name}.public": public, f"{name}.secret": secret}
    return files


def write_key_folder(folder: Path, files: Mapping[str, str]) -> None:
    """Write `files` (name -> text) into `folder`, readable for the owner only: files have mode 0400, the folder 0700. Replaces files."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    for name, text in files.items():
        path = folder / name
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
