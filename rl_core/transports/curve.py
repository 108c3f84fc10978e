"""CURVE keys of a job, loaded from a folder, and the check of who may connect to which service.

Each group of worker processes has a key pair; runner, channel server and supervisors have one each. A ZAP handler on the I/O thread maps
the key of each new connection to its owner and refuses connections that `callers_of_services` does not list; `refused` counts them.
"""

import logging
import os
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq
import zmq.utils.z85

from rl_core.api.errors import ConfigError
from rl_core.plan.groups import BUILT_IN, GroupKind
from rl_core.transports.sockets import IoThread, has_message
from rl_core.transports.unauthenticated import UnauthenticatedConnections

logger = logging.getLogger(__name__)

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


def callers_of_services(groups: Mapping[str, GroupKind] = BUILT_IN) -> dict[str, frozenset[str]]:
    """Return service -> names of the keys that may connect to it.

    The services are "hub" (of the runner), "channel", "weights" (of a trainer), and the RPC server of each group by the name of the group.
    """
    all_names = frozenset({"runner", "supervisor", *groups})
    return {
        "hub": all_names,
        "channel": all_names,
        "weights": frozenset(group.name for group in groups.values() if group.pulls_weights),
        **{group.name: group.callers | {"runner"} for group in groups.values()},
    }


class KeyRing:
    """The secret key of one role and the public keys of all, from `folder`; `groups` are those of the job.

    Raises ConfigError when the secret key of the role is missing, a file is not a key, a secret may be read by others, or a file
    may be written by anyone but its owner. Links are followed (Kubernetes mounts keys as links).
    """

    def __init__(self, folder: str | os.PathLike[str], role: str, groups: Mapping[str, GroupKind] = BUILT_IN) -> None:
        self.folder = Path(folder)
        self.role = role
        self.callers = callers_of_services(groups)
        """Service -> names of the keys that may connect to it."""
        secret_file = self.folder / f"{role}.secret"
        if not secret_file.is_file():
            raise ConfigError(f"key folder {self.folder} must hold {role}.secret, got none; check RLJOB_CURVE_DIR")
        self.secret = _read_key(secret_file, private=True)
        self.public = zmq.curve_public(self.secret)
        self.publics = {path.stem: _read_key(path, private=False) for path in sorted(self.folder.glob("*.public"))}
        self._roles = {key: name for name, key in self.publics.items()}

    def role_of(self, public_key: bytes) -> str | None:
        """Return the role that owns a public key (Z85 text), None when the key does not belong to this job."""
        return self._roles.get(public_key)

    def serve(self, socket: zmq.Socket[Any], service: str) -> None:
        """Make `socket` a CURVE server that admits the callers of `service`. Call on the I/O thread, before bind."""
        if service not in self.callers:
            raise ConfigError(f"service must be one of {sorted(self.callers)}, got {service!r}")
        gate = _gate_of(IoThread.shared())
        UnauthenticatedConnections(IoThread.shared(), socket, what=service)
        socket.curve_server = True
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public
        socket.zap_domain = gate.add(self, service)

    def services(self) -> list[str]:
        """Return all services, those that this role may use first.

        A client tries them in this order when it does not know the server's role.
        """
        services = [{"runner": "hub"}.get(role, role) for role in self.publics]
        return sorted(services, key=lambda service: self.role not in self.callers.get(service, ()))

    def connect(self, socket: zmq.Socket[Any], service: str) -> None:
        """Make `socket` a CURVE client of `service`."""
        role = {"hub": "runner"}.get(service, service)
        if role not in self.publics:
            raise ConfigError(
                f"key folder {self.folder} must hold {role}.public to reach the service {service!r}, got {sorted(self.publics)}"
            )
        socket.curve_serverkey = self.publics[role]
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public


def _read_key(path: Path, *, private: bool) -> bytes:
    mode = path.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"key file {path} must be writable by its owner only, got mode {stat.S_IMODE(mode):04o}; chmod go-w"
        )
    if private and mode & stat.S_IROTH:
        raise ConfigError(
            f"secret key {path} must not be readable by others, got mode {stat.S_IMODE(mode):04o}; chmod o-r"
        )
    key = path.read_bytes().strip()
    try:
        if len(key) != 40:
            raise ValueError(f"{len(key)} characters")
        zmq.utils.z85.decode(key)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"key file {path} must hold 40 characters of Z85, got {error}") from error
    return key


class _Gate:
    """The ZAP handler of one ZeroMQ context: answers each handshake with the role of the peer, or refuses it."""

    def __init__(self, io: IoThread) -> None:
        self.refused: Counter[str] = Counter()
        self._domains: dict[bytes, tuple[KeyRing, str]] = {}
        self._socket = io.context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(_ZAP_ENDPOINT)
        io.register(self._socket, self._answer_all)

    def add(self, keys: KeyRing, service: str) -> bytes:
        domain = f"{service}.{len(self._domains)}".encode()
        self._domains[domain] = (keys, service)
        return domain

    def _answer_all(self) -> None:
        while has_message(self._socket):
            self._answer(self._socket.recv_multipart(zmq.NOBLOCK))

    def _answer(self, parts: list[bytes]) -> None:
        address, _, version, request, domain, _peer, _identity, mechanism, *credentials = parts
        role, reason = self._judge(domain, mechanism, credentials)
        status, text = (b"200", b"OK") if role is not None else (b"400", reason.encode())
        self._socket.send_multipart([address, b"", version, request, status, text, (role or "").encode(), b""])

    def _judge(self, domain: bytes, mechanism: bytes, credentials: list[bytes]) -> tuple[str | None, str]:
        keys, service = self._domains.get(domain, (None, ""))
        if keys is None or mechanism != b"CURVE" or len(credentials) != 1:
            return None, "mechanism"
        role = keys.role_of(zmq.utils.z85.encode(credentials[0]))
        if role is not None and role in keys.callers[service]:
            return role, ""
        self.refused[service] += 1
        logger.warning(
            "refused a connection to service %s: %s", service, f"role {role} is not allowed" if role else "unknown key"
        )
        return None, f"role {role} may not use {service}"


_gates: dict[int, _Gate] = {}


def _gate_of(io: IoThread) -> _Gate:
    gate = _gates.get(id(io))
    if gate is None:
        gate = _gates[id(io)] = _Gate(io)
    return gate


def refused(service: str) -> int:
    """Return how many connections to `service` this process has refused."""
    gate = _gates.get(id(IoThread.shared()))
    return gate.refused[service] if gate is not None else 0
