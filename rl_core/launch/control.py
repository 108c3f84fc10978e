"""Client of the runner's control port, for the local launcher; the operator uses the same port over the pod network."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.api.errors import ConfigError
from rl_core.plan.signatures import NotTheRunner, Peer, SignedCall, sign

TIMEOUT = 3.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""An opener without proxies: the proxy settings of the environment do not apply between processes of this machine."""


class ControlClient:
    """Calls the runner at one port. A call returns None without an answer, and for an answer that the runner has not signed."""

    def __init__(self, port: int, token_file: Path, *, uid: str, epoch: Callable[[], int]) -> None:
        """`epoch()` returns the epoch of the runner; calls are signed where the token file exists."""
        self._base = f"http://127.0.0.1:{port}"
        self._token_file, self._uid, self._epoch = token_file, uid, epoch

    def status(self) -> dict[str, Any] | None:
        """Return `/status`."""
        return self._ask("GET", "/status")[0]

    def finish(self, reason: str = "") -> bool:
        """Request a checkpoint and the end of the run; return False if the runner does not answer.

        With the reason "suspend" the run can be resumed; with another reason or none it ends for good.
        """
        return self._change("POST", "/finish", {"reason": reason}) is not None

    def drain(self, pods: Sequence[str]) -> dict[str, Any] | None:
        """Ask pods of elastic groups to finish or return their work; return None without an answer."""
        return self._change("POST", "/drain", {"pods": list(pods)})

    def change(self, generation: int, spec: Mapping[str, Any]) -> bool:
        """Send a changed spec; return False without an answer. Raises ConfigError with the message of a runner that refuses it."""
        return self._change("PUT", "/control", {"generation": generation, "spec": spec}) is not None

    def _change(self, method: str, path: str, body: Any = None) -> dict[str, Any] | None:
        """Make a call that changes something, with a fresh challenge of the runner."""
        status, challenge = self._ask("GET", "/status")
        return None if status is None else self._ask(method, path, body, challenge=challenge)[0]

    def _ask(
        self, method: str, path: str, body: Any = None, *, challenge: str = ""
    ) -> tuple[dict[str, Any] | None, str]:
        """Return the answer and the challenge that came with it."""
        data = b"" if body is None else json.dumps(body).encode()
        call = self._signed(method, path, data, challenge)
        headers = dict(call.headers) if call is not None else {}
        request = urllib.request.Request(self._base + path, method=method, data=data or None, headers=headers)
        try:
            with _OPENER.open(request, timeout=TIMEOUT) as answer:
                text = answer.read()
                proof = call.verify(answer.status, answer.headers, text) if call is not None else ""
                document = json.loads(text)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == http.HTTPStatus.BAD_REQUEST:
                    raise ConfigError(_refusal(error)) from error
            return None, ""
        except (OSError, ValueError, http.client.HTTPException, NotTheRunner):
            return None, ""
        return (document, proof) if isinstance(document, dict) else (None, "")

    def _signed(self, method: str, path: str, body: bytes, challenge: str) -> SignedCall | None:
        if not self._token_file.is_file():
            return None
        peer = Peer(token=self._token_file.read_text().strip(), uid=self._uid, epoch=self._epoch())
        return sign(peer, method, path, body=body, challenge=challenge)


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"the runner refused the call: {error.reason}"
