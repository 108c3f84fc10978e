"""`rljob view`: serves the page of some runs until it is interrupted."""

import sys
import threading
import webbrowser
from collections.abc import Sequence
from contextlib import ExitStack

from rl_core.cli.copied_output import readable_run
from rl_core.cli.targets import Place
from rl_core.view.server import LOOPBACK, ViewServer


def serve_view(runs: Sequence[str], place: Place, *, host: str, port: int, browser: bool) -> int:
    """Serve `runs`, output folders or names of jobs on a cluster, until Ctrl-C; return 0.

    Copies of jobs are refreshed meanwhile. Raises ConfigError for a run that does not exist and a port in use.
    """
    stopped = threading.Event()
    with ExitStack() as opened:
        readable = [opened.enter_context(readable_run(run, place)) for run in runs]
        server = ViewServer([folder.resolve() for folder, _ in readable], host=host, port=port)
        opened.callback(server.close)
        followers = [
            threading.Thread(target=copied.follow, args=(stopped,)) for _, copied in readable if copied is not None
        ]
        try:
            for follower in followers:
                follower.start()
            sys.stdout.write(f"{server.url} (Ctrl-C ends it)\n")
            if host not in LOOPBACK:
                sys.stdout.write(f"anybody who reaches {host} can read the samples of these runs\n")
            sys.stdout.flush()
            if browser:
                webbrowser.open(server.url)
            threading.Event().wait()
        except KeyboardInterrupt:
            sys.stdout.write("\n")
        finally:
            stopped.set()
            for follower in followers:
                follower.join()  # Joined before the folder that the thread writes to is deleted.
    return 0
