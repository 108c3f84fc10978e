"""The job's CURVE keys and control token, derived from one master key and never stored elsewhere (protocol.md 6).

A job's Secret is a pure function of (master, job uid): deleted by hand, it comes back byte-equal.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from rl_core.api.errors import ConfigError

KEY_ROLES = ("runner", "channel", "actor", "rollout", "env", "supervisor")
MASTER_BYTES = 32
TOKEN_FILE = "control.token"


def derive(master: bytes, uid: str, purpose: str) -> bytes:
    """Return 32 bytes for `purpose` (a role or "control"): BLAKE2b keyed by the master over (uid, purpose).

    Raises ConfigError for a master key of another length.
    """
    if len(master) != MASTER_BYTES:
        raise ConfigError(
            f"the master key must have {MASTER_BYTES} bytes, got {len(master)}; create the operator's Secret again"
        )
    message = len(uid).to_bytes(4, "big") + uid.encode() + purpose.encode()
    return hashlib.blake2b(message, digest_size=32, key=master, person=b"rljob-keys").digest()


def curve_pair(master: bytes, uid: str, role: str) -> tuple[str, str]:
    """Return (public, secret) of a role as Z85 text of 40 characters each."""
    import zmq
    from zmq.utils import z85

    secret = z85.encode(derive(master, uid, role))
    return zmq.curve_public(secret).decode(), secret.decode()


def control_token(master: bytes, uid: str) -> str:
    """Return the token that signs calls and answers of the job's control port, 64 hexadecimal digits."""
    return derive(master, uid, "control").hex()


def key_files(master: bytes, uid: str) -> dict[str, str]:
    """Return every key file of a job by name: `<role>.public`, `<role>.secret`, `control.token`."""
    files = {TOKEN_FILE: control_token(master, uid)}
    for role in KEY_ROLES:
        public, secret = curve_pair(master, uid, role)
        files |= {f"{role}.public": public, f"{role}.secret": secret}
    return files


def write_key_folder(folder: Path, files: Mapping[str, str]) -> None:
    """Write key files readable by their owner only (0400) into a folder of mode 0700."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    for name, text in files.items():
        path = folder / name
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
