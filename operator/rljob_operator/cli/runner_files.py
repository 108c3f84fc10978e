"""Asks the runner of a job for its status and its files, through a port-forward to its pod and signed with the token of the job."""

from __future__ import annotations

import base64
import http.client
import json
from contextlib import suppress

from rl_core.api.errors import ConfigError, InfrastructureError
from rl_core.plan.keys import TOKEN_FILE
from rl_core.plan.parts import Ports
from rl_core.plan.signatures import NotTheRunner, Peer, sign
from rljob_operator import naming
from rljob_operator.cli import jobs
from rljob_operator.cli.connection import Connection, Json
from rljob_operator.errors import NotFound
from rljob_operator.kinds import POD, SECRET

PORT = Ports().control
ATTEMPTS = 3
"""Times that a call is made: the end of a port-forward can overtake the end of the answer."""


class RunnerFiles:
    """The runner of one job. One thread at a time."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection, self._name = connection, name
        self._peer: Peer | None = None
        """How calls are signed; None = to be found, at first and after a call that failed, as the job may have another epoch then."""

    def ask(self, body: Json) -> tuple[Json, Json]:
        """Return the answers to `GET /status` and `POST /files`.

        Raises ConfigError for a job without a runner, InfrastructureError for a runner that does not answer.
        """
        peer, self._peer = self._peer or self._found(), None
        data = json.dumps(body).encode()
        for _ in range(ATTEMPTS - 1):
            with suppress(InfrastructureError):
                return self._read(peer, data)
        return self._read(peer, data)

    def _read(self, peer: Peer, data: bytes) -> tuple[Json, Json]:
        status, challenge = self._call(peer, "GET", "/status")
        answer, _ = self._call(peer, "POST", "/files", body=data, challenge=challenge)
        self._peer = peer
        return status, answer

    def _found(self) -> Peer:
        """Return how calls to the present runner are signed."""
        name, connection = self._name, self._connection
        job = jobs.read(connection, name)
        uid = job["metadata"]["uid"]
        with jobs.explained(connection, f"reading the pod of the runner of job {name}"):
            try:
                pod = connection.read(POD, naming.runner_pod(name))
            except NotFound:
                pod = {}
        labels = (pod.get("metadata") or {}).get("labels") or {}
        runs = (pod.get("status") or {}).get("phase") == "Running" and labels.get(naming.LABEL_JOB_UID) == uid
        if not runs:
            raise ConfigError(
                f"job {name} must have a runner that hands out its files, got none: the job is {jobs.phase(job)}; its files are in the "
                f"folder {naming.output_folder(name, uid)} on the volume of checkpoint.path, which docs/running.md shows how to read"
            )
        with jobs.explained(connection, f"reading the control token of job {name}"):
            secret = connection.read(SECRET, naming.secret(name, uid))
        token = base64.b64decode(secret["data"][TOKEN_FILE]).decode().strip()
        return Peer(token=token, uid=uid, epoch=int(labels[naming.LABEL_EPOCH]))

    def _call(self, peer: Peer, method: str, path: str, *, body: bytes = b"", challenge: str = "") -> tuple[Json, str]:
        """Return the decoded answer and the challenge that came with it."""
        call = sign(peer, method, path, body=body, challenge=challenge)
        pod = naming.runner_pod(self._name)
        try:
            with (
                jobs.explained(self._connection, f"reaching the runner of job {self._name}"),
                self._connection.forwarded(pod, PORT) as opened,
            ):
                exchange = http.client.HTTPConnection("localhost", PORT)
                exchange.sock = opened
                # A call that is refused because of its head is answered before its body is sent.
                with suppress(BrokenPipeError):
                    exchange.request(method, path, body=body or None, headers=dict(call.headers))
                response = exchange.getresponse()
                text = response.read()
                proof = call.verify(response.status, dict(response.getheaders()), text)
            answer = json.loads(text)
        except (OSError, ValueError, http.client.HTTPException, NotTheRunner) as error:
            raise InfrastructureError(
                f"the runner in pod {pod} must answer {method} {path}, got {type(error).__name__}: {error}; try again, or see rljob logs "
                f"{self._name} --role actor"
            ) from error
        if response.status == http.HTTPStatus.NOT_FOUND:
            raise ConfigError(
                f"the runner of job {self._name} must hand out its files, got a version of rljob that does not; read them on the volume "
                "as docs/running.md shows"
            )
        if response.status >= http.HTTPStatus.BAD_REQUEST or not isinstance(answer, dict):
            raise InfrastructureError(
                f"the runner in pod {pod} refused {method} {path}: {text[:500].decode(errors='replace')}"
            )
        return answer, proof
