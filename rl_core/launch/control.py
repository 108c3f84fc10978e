"""The launcher's side of the runner's control port (protocol.md 3): what the operator does over the pod network, on loopback."""

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

TIMEOUT = 3.0


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

    def _ask(self, method: str, path: str) -> dict[str, Any] | None:
        request = urllib.request.Request(self._base + path, method=method)
        if self._token_file.is_file():
            request.add_header("Authorization", f"Bearer {self._token_file.read_text().strip()}")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                found = json.loads(answer.read())
        except (OSError, ValueError, http.client.HTTPException, urllib.error.URLError):
            return None
        return found if isinstance(found, dict) else None
