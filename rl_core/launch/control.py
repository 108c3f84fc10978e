"""The launcher's side of the runner's control port (protocol.md 3): what the operator does over the pod network, on loopback."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.api.errors import ConfigError

TIMEOUT = 3.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""No proxy of the environment stands between two processes of this machine."""


class ControlClient:
    """Asks the runner at one port; every call answers None when it does not answer."""

    def __init__(self, port: int, token_file: Path, *, host: str = "127.0.0.1") -> None:
        self._base = f"http://{host}:{port}"
        self._token_file = token_file

    def status(self) -> dict[str, Any] | None:
        """Return `/status`."""
        return self._ask("GET", "/status")

    def finish(self) -> bool:
        """Ask for a checkpoint and an orderly end; False when nobody heard it."""
        return self._ask("POST", "/finish") is not None

    def drain(self, pods: Sequence[str]) -> dict[str, Any] | None:
        """Ask rollout or env pods to finish or return their work; None when nobody heard it."""
        return self._ask("POST", "/drain", {"pods": list(pods)})

    def change(self, generation: int, spec: Mapping[str, Any]) -> bool:
        """Send a changed spec; False when nobody heard it. Raises ConfigError with the runner's words when it is refused."""
        return self._ask("PUT", "/control", {"generation": generation, "spec": spec}) is not None

    def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any] | None:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, method=method, data=data)
        if self._token_file.is_file():
            request.add_header("Authorization", f"Bearer {self._token_file.read_text().strip()}")
        try:
            with _OPENER.open(request, timeout=TIMEOUT) as answer:
                found = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                if error.code == http.HTTPStatus.BAD_REQUEST:
                    raise ConfigError(_refusal(error)) from error
            return None
        except (OSError, ValueError, http.client.HTTPException):
            return None
        return found if isinstance(found, dict) else None


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"the runner refused the call: {error.reason}"
