"""A network namespace that has the addresses of all fake pods, and in it the fake runner that answers for them."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PODS = "10.250.0.0/16"
NAME = "rljob-bench"
HOST, GUEST = "10.249.0.1", "10.249.0.2"
RUNNER = Path(__file__).with_name("_fake_runner.py")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def fake_pods(master: Path) -> Iterator[None]:
    """Answer on every pod's control port while the block runs, signed with keys of the `master` file. Needs root."""
    ip("netns", "add", NAME)
    try:
        ip("link", "add", NAME, "type", "veth", "peer", "name", "eth0", "netns", NAME)
        ip("addr", "add", f"{HOST}/30", "dev", NAME)
        ip("link", "set", NAME, "up")
        ip("-n", NAME, "addr", "add", f"{GUEST}/30", "dev", "eth0")
        for link in ("lo", "eth0"):
            ip("-n", NAME, "link", "set", link, "up")
        ip("-n", NAME, "route", "add", "local", PODS, "dev", "lo")
        ip("route", "add", PODS, "via", GUEST)
        with subprocess.Popen(["ip", "netns", "exec", NAME, sys.executable, str(RUNNER), str(master)]) as runner:
            time.sleep(1)
            if runner.poll() is not None:
                raise RuntimeError("the fake runner did not start")
            try:
                yield
            finally:
                runner.terminate()
    finally:
        ip("netns", "del", NAME)  # the link and the route go with it
