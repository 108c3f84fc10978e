"""`rljob view`: serves the page of some runs until it is interrupted."""

import sys
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rl_core.api.errors import ConfigError
from rl_core.view.server import LOOPBACK, ViewServer


def serve_view(folders: Sequence[Path], *, host: str, port: int, browser: bool) -> int:
    """Serve the runs in `folders` until Ctrl-C; return 0. Raises ConfigError for a path that is no folder and a port in use."""
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"OUT must be the output folder of a run, got {folder}: there is no such folder")
    server = ViewServer([folder.resolve() for folder in folders], host=host, port=port)
    try:
        sys.stdout.write(f"{server.url} (Ctrl-C ends it)\n")
        if host not in LOOPBACK:
            sys.stdout.write(f"anybody who reaches {host} can read the samples of these runs\n")
        sys.stdout.flush()
        server.pages.warm_up()
        if browser:
            webbrowser.open(server.url)
        threading.Event().wait()
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    finally:
        server.close()
    return 0
