"""CURVE key pairs for tests."""

from collections.abc import Iterable

import zmq


def generate_keys(roles: Iterable[str]) -> dict[str, str]:
    """Return new key pairs as file name -> Z85 text: `<role>.secret` and `<role>.public`."""
    files = {}
    for role in roles:
        public, secret = zmq.curve_keypair()
        files[f"{role}.secret"] = secret.decode()
        files[f"{role}.public"] = public.decode()
    return files
